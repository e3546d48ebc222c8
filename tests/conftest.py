"""What every test shares: the settings of Hypothesis."""

from hypothesis import settings

# The same examples on every machine and every run, however slow the machine.
settings.register_profile("penstock", deadline=None, derandomize=True)
settings.load_profile("penstock")

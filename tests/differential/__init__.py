"""A differential fuzzer: random models, losses and schedules, split against unsplit in float64.

A case is plain data drawn from one seed (`case`, `drawing`). It is run twice, as a pipeline and as
one model (`running`), and every number is compared (`comparing`). What differs is made small
(`shrinking`) and printed. `python -m tests.differential --help` shows the command.
"""

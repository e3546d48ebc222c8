"""See schedules, timelines and plans: in the terminal, as figures, as pages, as traces.

>>> from penstock import view
>>> print(view.compare(["1F1B", "ZB-H1"], ranks=4, microbatches=8))
schedule  end time s  ratio  bubble  peak microbatches
1F1B              33  1.000  27.3 %                  4
ZB-H1             27  0.818  11.1 %                  4
"""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.view.drawing import Comparison, Drawing
    from penstock.view.verbs import compare, draw, page, plot, report, save, write_trace

__all__ = [
    "Comparison",
    "Drawing",
    "compare",
    "draw",
    "page",
    "plot",
    "report",
    "save",
    "write_trace",
]

# Who only prints a comparison needs no pages and no plans.
_VALUES = ("Comparison", "Drawing")
_HOMES = {name: "drawing" if name in _VALUES else "verbs" for name in __all__}

__getattr__, __dir__ = late_names(__name__, _HOMES)

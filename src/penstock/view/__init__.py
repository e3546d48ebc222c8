"""See schedules, timelines and plans: in the terminal, as figures, as pages, as traces.

>>> from penstock import view
>>> print(view.compare(["1F1B", "ZB-H1"], ranks=4, microbatches=8))
schedule  end time s  ratio  bubble  peak microbatches
1F1B              33  1.000  27.3 %                  4
ZB-H1             27  0.818  11.1 %                  4
"""

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

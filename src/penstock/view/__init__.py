"""See schedules, timelines and plans: in the terminal, as figures, as pages, as traces.

>>> from penstock import view
>>> print(view.compare(["1F1B", "ZB-H1"], ranks=4, microbatches=8))
schedule  end time s  ratio  bubble  peak microbatches
1F1B              33  1.000  27.3 %                  4
ZB-H1             27  0.818  11.1 %                  4
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

# The values that verbs return; who only prints one needs no pages and no plans.
_VALUES = ("Comparison", "Drawing")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'drawing' if name in _VALUES else 'verbs'}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What a client has put in the place of a name in one of torch's modules.

Programs replace functions in torch's modules and count on torch to call theirs. Ours are defined
elsewhere, so callers of these functions look here first.
"""

import sys
from typing import TypeVar

__all__ = ["find_replaced"]

_T = TypeVar("_T")


def find_replaced(module: str, name: str, ours: _T) -> _T:
    """Return what a module under torch's name has under this name; ours, unless it was replaced.

    >>> find_replaced("schedules", "no such name", 3)
    3
    """
    found: _T = getattr(sys.modules.get(f"penstock.dropin.{module}"), name, ours)
    return found

"""Numbers, bytes and shares, formatted for people."""

from math import floor, log10

__all__ = ["format_bytes", "format_number", "format_share", "nice_step"]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_number(value: float) -> str:
    """Format a number with up to four digits, or with all digits of its integer part.

    >>> format_number(33.0), format_number(0.123456), format_number(123456.7)
    ('33', '0.1235', '123,457')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bytes(value: float) -> str:
    """Format a number of bytes in the largest unit that gives at least 1.

    >>> format_bytes(512), format_bytes(3 * 2**30), format_bytes(9.777e9)
    ('512 B', '3 GiB', '9.11 GiB')
    """
    unit = 0
    while value >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value /= 1024
        unit += 1
    number = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {_BYTE_UNITS[unit]}"


def format_share(value: float) -> str:
    """Format a fraction as a percentage.

    >>> format_share(0.2727), format_share(-1e-12)
    ('27.3 %', '0.0 %')
    """
    text = f"{value:.1%}".replace("%", " %")
    # What rounding leaves over of a difference may be below 0.
    return "0.0 %" if text == "-0.0 %" else text


def nice_step(at_least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... (or 0.5, 0.2, ...) not below `at_least`.

    >>> nice_step(3.5), nice_step(0.06)
    (5.0, 0.1)
    """
    power = 10.0 ** floor(log10(at_least))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= at_least)

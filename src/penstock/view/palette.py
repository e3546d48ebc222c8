"""The colours of every picture, defined once: how each kind of action looks.

The four compute kinds stay distinct for readers with protanopia, deuteranopia and tritanopia,
even in their lighter shades. Where colour is missing, a letter distinguishes them.
"""

from dataclasses import dataclass

from penstock.ir.actions import Kind

__all__ = [
    "BORDER",
    "IDLE",
    "INK",
    "LOOKS",
    "MEMORY",
    "PAPER",
    "TRACE_COLOURS",
    "Look",
    "contrast",
    "shade",
    "text_colour",
]

INK = "#000000"
PAPER = "#ffffff"
IDLE = "#ebebeb"
BORDER = "#111111"
MEMORY = "#6b7280"

# The share of white in the colour of the last stage of a rank; the first stage has none.
_LIGHTEST = 0.45


@dataclass(frozen=True, slots=True)
class Look:
    """The appearance of one kind of action: its colour, its letter without colour, its name."""

    colour: str
    letter: str
    label: str


LOOKS: dict[Kind, Look] = {
    Kind.FORWARD: Look("#2b63a8", "F", "Forward"),
    Kind.BACKWARD_INPUT: Look("#f0a202", "I", "Backward input"),
    Kind.BACKWARD_WEIGHT: Look("#5fa845", "W", "Backward weight"),
    Kind.FULL_BACKWARD: Look("#a63a50", "B", "Full backward"),
    Kind.SEND_F: Look("#9db4cc", ">", "Send forward"),
    Kind.RECV_F: Look("#c3d0dd", "]", "Receive forward"),
    Kind.SEND_B: Look("#cba6ad", "<", "Send backward"),
    Kind.RECV_B: Look("#dfcacd", "[", "Receive backward"),
    Kind.UNSHARD: Look("#8d8799", "U", "Unshard"),
    Kind.RESHARD: Look("#b9b5c2", "R", "Reshard"),
    Kind.REDUCE_GRAD: Look("#7c8a80", "G", "Reduce gradients"),
    Kind.RECOMPUTE: Look("#7196c8", "C", "Recompute"),
    Kind.OFFLOAD: Look("#b79ac9", "v", "Offload"),
    Kind.RELOAD: Look("#d3bfe0", "^", "Reload"),
}

# Trace viewers accept only these colour names; each is the nearest to the kind's own colour.
TRACE_COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "rail_response",
    Kind.BACKWARD_INPUT: "rail_idle",
    Kind.BACKWARD_WEIGHT: "rail_load",
    Kind.FULL_BACKWARD: "terrible",
    Kind.SEND_F: "thread_state_runnable",
    Kind.RECV_F: "thread_state_runnable",
    Kind.SEND_B: "thread_state_uninterruptible",
    Kind.RECV_B: "thread_state_uninterruptible",
    Kind.UNSHARD: "generic_work",
    Kind.RESHARD: "grey",
    Kind.REDUCE_GRAD: "thread_state_unknown",
    Kind.RECOMPUTE: "rail_animation",
    Kind.OFFLOAD: "thread_state_sleeping",
    Kind.RELOAD: "thread_state_iowait",
}


def shade(kind: Kind, local_stage: int = 0, num_local_stages: int = 1) -> str:
    """Return the colour of a kind on one of a rank's stages: later stages are lighter.

    >>> shade(Kind.FORWARD), shade(Kind.FORWARD, 1, 2)
    ('#2b63a8', '#8aa9cf')
    """
    share = _LIGHTEST * local_stage / max(num_local_stages - 1, 1)
    channels = (
        round(channel + (255 - channel) * share) for channel in _channels(LOOKS[kind].colour)
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def text_colour(background: str) -> str:
    """Return ink or paper, whichever reads better on this background."""
    return max(INK, PAPER, key=lambda colour: contrast(colour, background))


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21, as WCAG defines it.

    https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio
    """
    darker, lighter = sorted((_luminance(first), _luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    red, green, blue = (_linear(channel / 255) for channel in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _channels(colour: str) -> tuple[int, ...]:
    """Return red, green and blue of a colour such as `#2b63a8`, each from 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))

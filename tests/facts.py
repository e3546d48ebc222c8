"""Numbers that others published or measured, as data. Times are in milliseconds."""

from dataclasses import dataclass

__all__ = [
    "CONTROLLABLE_MEMORY",
    "V_ORDER",
    "ZERO_BUBBLE",
    "ControllableMemoryRow",
    "VOrderRow",
    "ZeroBubbleRow",
]


@dataclass(frozen=True, slots=True)
class ZeroBubbleRow:
    """One model of Zero Bubble Pipeline Parallelism: costs of a stage and bubble rates.

    ZB-1p and ZB-2p are the authors' heuristics with p and 2p activations per rank.
    """

    model: str
    ranks: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    transfer: float
    one_f_one_b: float
    zb_h1: float
    zb_h2: float
    zb_1p: float
    zb_2p: float


@dataclass(frozen=True, slots=True)
class VOrderRow:
    """One model with two stages per rank in a V: costs of one of them and bubble rates.

    `zb_v` is the authors' heuristic; `v_order` is the fixed order that torch ships as
    ZBVZeroBubble, priced by the same rules.
    """

    model: str
    ranks: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    transfer: float
    one_f_one_b: float
    zb_v: float
    v_order: float


@dataclass(frozen=True, slots=True)
class ControllableMemoryRow:
    """What the authors' greedy scheduler reaches at unit costs and without transfer."""

    family: str
    ranks: int
    microbatches: int
    bubble_rate: float


# https://arxiv.org/abs/2401.10241
ZERO_BUBBLE = (
    ZeroBubbleRow(
        "1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433
    ),
    ZeroBubbleRow(
        "6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029
    ),
    ZeroBubbleRow(
        "14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066
    ),
    ZeroBubbleRow(
        "28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038
    ),
)

V_ORDER = (
    VOrderRow("6.2B", 16, 48, 14.407, 14.380, 9.676, 1.610, 0.2668, 0.0697, 0.0712),
    VOrderRow("14.6B", 24, 72, 6.763, 6.969, 5.251, 0.755, 0.2699, 0.0638, 0.0623),
    VOrderRow("28.3B", 32, 96, 9.458, 9.748, 7.288, 0.879, 0.2676, 0.0593, 0.0582),
)

# https://arxiv.org/abs/2405.15362
CONTROLLABLE_MEMORY = (
    ControllableMemoryRow("V-Min", 8, 24, 0.1579),
    ControllableMemoryRow("V-Half", 8, 24, 0.1056),
)

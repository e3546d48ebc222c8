"""Facts about each family that the gallery cannot compute: formulae, origin, use.

In the formulae p is ranks, m microbatches, v stages per rank; F, I and W are the seconds of one
rank's share of the model, B is I and W together, and F&B an overlapped pair. Tests check each
formula against the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["ENTRIES", "At", "Entry", "Formula", "Paper"]


@dataclass(frozen=True, slots=True)
class At:
    """The sizes at which a formula is evaluated: ranks, microbatches, stages per rank.

    F, I and W take one second each, so that F+B is 3 and so is F&B.
    """

    p: int
    m: int
    v: int


Value: TypeAlias = Callable[[At], float]


@dataclass(frozen=True, slots=True)
class Paper:
    """The origin of a schedule."""

    title: str
    link: str


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula as a paper would print it, and its value or, if not exact, its maximum."""

    text: str
    value: Value
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class Entry:
    """One family in the gallery: idle seconds of a step, microbatches held, origin, use."""

    bubble: Formula
    memory: Formula
    papers: tuple[Paper, ...]
    use: str


_GPIPE = Paper(
    "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, 2018",
    "https://arxiv.org/abs/1811.06965",
)
_PIPEDREAM = Paper(
    "PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018",
    "https://arxiv.org/abs/1806.03377",
)
_FLUSH = Paper(
    "Memory-Efficient Pipeline-Parallel DNN Training, 2020 (with a flush after every step)",
    "https://arxiv.org/abs/2006.09503",
)
_MEGATRON = Paper(
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021",
    "https://arxiv.org/abs/2104.04473",
)
_BREADTH_FIRST = Paper(
    "Breadth-First Pipeline Parallelism, 2022", "https://arxiv.org/abs/2211.05953"
)
_ZERO_BUBBLE = Paper("Zero Bubble Pipeline Parallelism, 2024", "https://arxiv.org/abs/2401.10241")
_CONTROLLABLE = Paper(
    "Pipeline Parallelism with Controllable Memory, 2024", "https://arxiv.org/abs/2405.15362"
)
_DEEPSEEK = Paper("DeepSeek-V3 Technical Report, 2024", "https://arxiv.org/abs/2412.19437")
_DUALPIPE = Paper("DualPipe, the authors' repository", "https://github.com/deepseek-ai/DualPipe")

_ALL = Formula("m", lambda at: at.m)
_AS_RANKS = Formula("p", lambda at: at.p)
_NONE = Formula("0", lambda _: 0)

ENTRIES: dict[str, Entry] = {
    "ForwardOnly": Entry(
        _NONE,
        Formula("0: no graph is kept", lambda _: 0),
        (),
        "For evaluation. `Pipeline.evaluate` uses it automatically, with the placement of the "
        "training schedule.",
    ),
    "GPipe": Entry(
        Formula("(p-1)(F+B)", lambda at: (at.p - 1) * 3),
        _ALL,
        (_GPIPE,),
        "The simplest order. Use it to understand the others, or where activations are small or "
        "checkpointed: it holds every microbatch at once.",
    ),
    "1F1B": Entry(
        Formula("(p-1)(F+B)", lambda at: (at.p - 1) * 3),
        _AS_RANKS,
        (_PIPEDREAM, _FLUSH),
        "The usual choice, and the baseline: the bubble of GPipe, but memory that does not grow "
        "with the number of microbatches.",
    ),
    "Interleaved1F1B": Entry(
        Formula("(p-1)(F+B)/v", lambda at: (at.p - 1) * 3 / at.v),
        Formula("p + (p-1)/v", lambda at: at.p + (at.p - 1) / at.v),
        (_MEGATRON,),
        "A smaller bubble without splitting the backward, for somewhat more memory and v times "
        "the messages. Good where links are fast.",
    ),
    "LoopedBFS": Entry(
        Formula("(p-1)(F+B)/v", lambda at: (at.p - 1) * 3 / at.v),
        _ALL,
        (_BREADTH_FIRST,),
        "With fully sharded parameters: a stage's parameters are gathered once for all "
        "microbatches rather than once for each.",
    ),
    "ZB-H1": Entry(
        Formula("(p-1)(F+I-W)", lambda at: at.p - 1),
        _AS_RANKS,
        (_ZERO_BUBBLE,),
        "A third of the bubble of 1F1B with its memory, its messages and one stage per rank: the "
        "first thing to try after 1F1B.",
    ),
    "ZB-H2": Entry(
        Formula("(p-1)(F+I-2W)", lambda _: 0),
        Formula("2p-1", lambda at: 2 * at.p - 1),
        (_ZERO_BUBBLE,),
        "No bubble where F, I and W take the same time, for almost twice the memory of 1F1B.",
    ),
    "InterleavedZeroBubble": Entry(
        Formula("(p-1)(F+I-W)/v", lambda at: (at.p - 1) / at.v),
        _AS_RANKS,
        (_ZERO_BUBBLE, _MEGATRON),
        "The bubble of ZB-H1 divided by the stages per rank, for more messages.",
    ),
    "ZBV": Entry(
        Formula("0 for F = I = W", lambda _: 0),
        _AS_RANKS,
        (_ZERO_BUBBLE,),
        "No bubble at equal costs with the memory of 1F1B, the same on every rank; embedding and "
        "head are on one rank, which suits tied weights. Needs fast links: two stages per rank.",
    ),
    "V-Half": Entry(
        Formula("at most half that of 1F1B", lambda at: (at.p - 1) * 3 / 2, is_exact=False),
        Formula("(p+2)//2", lambda at: (at.p + 2) // 2),
        (_CONTROLLABLE,),
        "Half the activations of 1F1B and less than half its bubble, where memory is short.",
    ),
    "V-Min": Entry(
        Formula("at most two thirds of 1F1B's", lambda at: (at.p - 1) * 2, is_exact=False),
        Formula("(p+4)//3", lambda at: (at.p + 4) // 3),
        (_CONTROLLABLE,),
        "A third of the activations of 1F1B, where memory is the bottleneck.",
    ),
    "DualPipeV": Entry(
        Formula("(p-1)(F&B+B-3W)/2", lambda at: at.p - 1),
        Formula("p + 1/2", lambda at: at.p + 1 / 2),
        (_DEEPSEEK, _DUALPIPE),
        "Where communication inside a stage (expert parallelism) can hide behind compute: a "
        "forward and a backward run side by side. Without such a gain ZBV has less bubble.",
    ),
    "DualPipe": Entry(
        Formula("(p/2-1)(F&B+B-3W)", lambda at: (at.p / 2 - 1) * 2),
        Formula("p + 1", lambda at: at.p + 1),
        (_DEEPSEEK, _DUALPIPE),
        "Like DualPipeV, with two copies of the model and twice the parameters. Useful if these "
        "are small compared to the experts, as in the authors' models.",
    ),
}

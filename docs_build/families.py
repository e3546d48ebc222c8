"""Facts about each family that the gallery can neither compute nor look up: origin and use."""

from dataclasses import dataclass

__all__ = ["ENTRIES", "Entry", "Paper"]


@dataclass(frozen=True, slots=True)
class Paper:
    """The origin of a schedule."""

    title: str
    link: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One family in the gallery: its origin, and when to use it."""

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

ENTRIES: dict[str, Entry] = {
    "ForwardOnly": Entry(
        (),
        "For evaluation. `Pipeline.evaluate` uses it automatically, with the placement of the "
        "training schedule.",
    ),
    "GPipe": Entry(
        (_GPIPE,),
        "The simplest order. Use it to understand the others, or where activations are small or "
        "checkpointed: it holds every microbatch at once.",
    ),
    "1F1B": Entry(
        (_PIPEDREAM, _FLUSH),
        "The usual choice, and the baseline: the bubble of GPipe, but memory that does not grow "
        "with the number of microbatches.",
    ),
    "Interleaved1F1B": Entry(
        (_MEGATRON,),
        "A smaller bubble without splitting the backward, for somewhat more memory and v times "
        "the messages. Good where links are fast.",
    ),
    "LoopedBFS": Entry(
        (_BREADTH_FIRST,),
        "With fully sharded parameters: a stage's parameters are gathered once for all "
        "microbatches rather than once for each.",
    ),
    "ZB-H1": Entry(
        (_ZERO_BUBBLE,),
        "A third of the idle time of 1F1B with its memory, its messages and one stage per rank: "
        "the first thing to try after 1F1B.",
    ),
    "ZB-H2": Entry(
        (_ZERO_BUBBLE,),
        "No gaps between the first and the last action of a rank where F, I and W take the same "
        "time, for almost twice the memory of 1F1B.",
    ),
    "InterleavedZeroBubble": Entry(
        (_ZERO_BUBBLE, _MEGATRON),
        "The bubble of ZB-H1 divided by the stages per rank, for more messages.",
    ),
    "ZBV": Entry(
        (_ZERO_BUBBLE,),
        "No gaps in a rank's work at equal costs with the memory of 1F1B, the same on every rank; "
        "embedding and head are on one rank, which suits tied weights. Needs fast links: two "
        "stages per rank.",
    ),
    "V-Half": Entry(
        (_CONTROLLABLE,),
        "Half the activations of 1F1B and less than half its bubble, where memory is short.",
    ),
    "V-Min": Entry(
        (_CONTROLLABLE,),
        "A third of the activations of 1F1B, where memory is the bottleneck.",
    ),
    "DualPipeV": Entry(
        (_DEEPSEEK, _DUALPIPE),
        "Where communication inside a stage (expert parallelism) can hide behind compute: a "
        "forward and a backward run side by side. Without such a gain ZBV has less bubble.",
    ),
    "DualPipe": Entry(
        (_DEEPSEEK, _DUALPIPE),
        "Like DualPipeV, with two copies of the model and twice the parameters. Useful if these "
        "are small compared to the experts, as in the authors' models.",
    ),
}

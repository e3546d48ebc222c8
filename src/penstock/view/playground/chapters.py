"""Five short chapters, from one device to zero bubble, with the numbers of their schedules."""

from dataclasses import asdict, dataclass

from penstock.schedules.registry import FAMILIES
from penstock.sim.engine import simulate
from penstock.units import format_number, format_share

__all__ = ["chapters"]


@dataclass(frozen=True, slots=True)
class _Chapter:
    """A schedule to look at, what it shows, and what to try next."""

    title: str
    family: str
    ranks: int
    microbatches: int
    text: str
    task: str


_CHAPTERS = (
    _Chapter(
        "One device",
        "1F1B",
        1,
        4,
        "One device runs the forward (F) and the backward (B) of one microbatch after the other. "
        "It is never idle, and a step takes {time}. But the whole model has to fit on it.",
        "Press Play and watch one action after the other.",
    ),
    _Chapter(
        "Four devices, one batch",
        "GPipe",
        4,
        1,
        "The model is cut into four stages, one per rank. A stage needs the output of the stage "
        "before it, so only one rank works at a time: ranks are idle for {bubble} of the step. "
        "That idle time is the bubble.",
        "Press Play: the list below the picture says what each rank waits for.",
    ),
    _Chapter(
        "Microbatches fill the pipe",
        "GPipe",
        4,
        8,
        "The batch is cut into eight microbatches. While rank 1 works on the first, rank 0 has "
        "the second. The bubble falls to {bubble}, but GPipe runs all forwards first, so a rank "
        "holds the activations of {memory} microbatches at once.",
        "Move the slider Microbatches to 32: the bubble shrinks further, and memory grows.",
    ),
    _Chapter(
        "One forward, one backward",
        "1F1B",
        4,
        8,
        "1F1B starts a backward as soon as it can, then alternates. The step takes as long as "
        "with GPipe, {time}, but no rank holds more than {memory} microbatches, whatever their "
        "number.",
        "Drag a B of rank 0 to the left of its F: the box below says which rule that breaks.",
    ),
    _Chapter(
        "Zero bubble",
        "ZBV",
        4,
        8,
        "A backward has two halves. The next rank waits for the gradient of the inputs (I) only; "
        "the gradient of the weights (W) can wait, and fills gaps. With two stages per rank in "
        "the shape of a V, ranks are idle for {bubble} of the step, at its start and its end, and "
        "hold no more than with 1F1B.",
        "Raise Transfer to 0.2 and compare all families below: which suffers most?",
    ),
)


def chapters() -> list[dict[str, object]]:
    """Return the chapters as JSON values for the page."""
    return [asdict(chapter) | {"text": _with_numbers(chapter)} for chapter in _CHAPTERS]


def _with_numbers(chapter: _Chapter) -> str:
    family = FAMILIES[chapter.family]
    schedule = family.generate(chapter.ranks, chapter.microbatches, family.stages_per_rank)
    timeline = simulate(schedule)
    return chapter.text.format(
        time=f"{format_number(timeline.end_time)} s",
        bubble=format_share(timeline.bubble_rate),
        memory=format_number(timeline.peak_microbatches),
    )

"""Recorded steps, and predictions beside them, as commands print them: text and JSON values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli import reports
from penstock.sim.recorded.review import Pair, Review
from penstock.sim.recorded.slowdowns import Slowdown, find_slowdowns
from penstock.sim.timeline import Timeline
from penstock.sim.waits import find_waits

if TYPE_CHECKING:
    from penstock.planner import Revision

__all__ = [
    "recorded_values",
    "recorded_view",
    "review_text",
    "review_values",
    "revision_values",
    "slowdown_text",
]


def review_text(found: Review, recorded: Timeline) -> str:
    """Return a review as text: every rank and kind, why the step differs, slowed compute."""
    return "\n".join([str(found), *map(slowdown_text, find_slowdowns(recorded))])


def review_values(found: Review) -> dict[str, object]:
    """Return a review as plain values."""
    difference = found.difference
    return {
        "step": _pair(found.step),
        "difference": {"seconds": difference.seconds, "by_cause": difference.by_cause},
        "per_rank": [
            {"rank": rank, "compute": _pair(found.ranks[rank]), "idle": _pair(idle)}
            for rank, idle in enumerate(found.idle)
        ],
        "per_kind": {kind.text: _pair(pair) for kind, pair in found.kinds.items()},
        "per_stage": [
            {
                "rank": tally.rank,
                "stage": tally.stage,
                "kind": tally.kind.text,
                "actions": tally.actions,
                "seconds": _pair(tally.seconds),
            }
            for tally in found.tallies
        ],
    }


def revision_values(found: "Revision", reviews: Sequence[Review]) -> dict[str, object]:
    """Return a revision as plain values, with the reviews of the recorded steps."""
    return {
        "steps": [review_values(review) for review in reviews],
        "old_seconds": found.old.seconds,
        "new_seconds": found.new.seconds,
        "gain": found.gain,
        "imbalance": found.imbalance,
        "is_offered": found.is_offered,
    }


def recorded_values(recorded: Timeline) -> dict[str, object]:
    """Return the times, waits and messages of a recorded step, as plain values."""
    return {
        "recorded_end_time": recorded.end_time,
        "recorded_bubble_rate": recorded.bubble_rate,
        "recorded_waits": reports.gap_values(find_waits(recorded).awaited),
        "slowdowns": [
            {
                "rank": slow.rank,
                "stage": slow.stage,
                "kind": slow.kind.text,
                "messages": slow.messages,
                "beside_seconds": slow.beside_seconds,
                "alone_seconds": slow.alone_seconds,
            }
            for slow in find_slowdowns(recorded)
        ],
    }


def recorded_view(recorded: Timeline) -> RenderableType:
    """Return the times, waits and messages of a recorded step, as text and a table."""
    slowdowns = [Text(slowdown_text(slowdown)) for slowdown in find_slowdowns(recorded)]
    return Group(
        Text(f"As recorded, {reports.headline(recorded)}."),
        Text(),
        Text("Waits, as recorded", style="bold"),
        reports.gap_table(find_waits(recorded).awaited),
        Text(),
        Text("Compute beside messages, as recorded", style="bold"),
        *(slowdowns or [Text("nothing was notably slower beside messages")]),
    )


def slowdown_text(slow: Slowdown) -> str:
    """Return a sentence about compute that messages have slowed down.

    >>> from penstock.ir.actions import Kind
    >>> slowdown_text(Slowdown(2, 2, Kind.FULL_BACKWARD, "receives", 0.036, 0.025))
    'B of stage 2 took 1.4x as long while receives were pending (36 ms against 25 ms)'
    """
    beside, alone = (
        f"{1e3 * value:.3g} ms" for value in (slow.beside_seconds, slow.alone_seconds)
    )
    return (
        f"{slow.kind.text} of stage {slow.stage} took {slow.ratio:.1f}x as long while "
        f"{slow.messages} were pending ({beside} against {alone})"
    )


def _pair(pair: Pair) -> dict[str, float]:
    return {"predicted": pair.predicted, "recorded": pair.recorded}

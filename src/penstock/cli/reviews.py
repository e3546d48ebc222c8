"""A prediction beside recorded steps, as the commands print it: text and JSON values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.reports import slowdown_text
from penstock.sim.recorded.review import Pair, Review
from penstock.sim.recorded.slowdowns import find_slowdowns
from penstock.sim.timeline import Timeline

if TYPE_CHECKING:
    from penstock.planner import Revision

__all__ = ["review_text", "review_values", "revision_values"]


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


def _pair(pair: Pair) -> dict[str, float]:
    return {"predicted": pair.predicted, "recorded": pair.recorded}

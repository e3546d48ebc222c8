"""Where the seconds of a step go, so that two plans can be compared.

|- work -|- recompute -|- imbalance -|- transfer -|- bubble -|- reduction -|

  work, recompute   what an average rank computes, once and again
  imbalance         how much more the busiest rank computes
  transfer          what the same order would gain if messages took no time
  bubble            the rest: waiting that the order causes, to the end of the last rank if all
                    ranks wait for it
  reduction         adding up the gradients of replicas, after that
"""

from dataclasses import dataclass, fields, replace

from penstock.planner.plans import Plan
from penstock.sim.engine import simulate
from penstock.units import format_share

__all__ = ["Breakdown", "break_down", "why_slower"]

# Causes below this share of the difference are not mentioned.
_WORTH_MENTIONING = 0.1


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step by cause; together they are the whole step."""

    work: float
    recompute: float
    imbalance: float
    transfer: float
    bubble: float
    reduction: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.by_cause.values())

    @property
    def by_cause(self) -> dict[str, float]:
        """The seconds with their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def break_down(plan: Plan) -> Breakdown:
    """Return where the seconds of a plan's step go."""
    problem, timeline = plan.problem, plan.timeline
    busiest, mean = max(timeline.busy_seconds), sum(timeline.busy_seconds) / problem.ranks
    checkpointed = list(plan.choices.checkpointed) if plan.choices is not None else []
    forwards = problem.costs.per_stage("forward", problem.stages)[checkpointed]
    recompute = float(problem.microbatches * forwards.sum()) / problem.ranks
    at_once = simulate(plan.schedule, replace(problem.costs, transfer=0.0))
    transfer = plan.seconds - at_once.period(problem.boundary)
    return Breakdown(
        work=mean - recompute,
        recompute=recompute,
        imbalance=busiest - mean,
        transfer=transfer,
        bubble=plan.seconds - busiest - transfer,
        reduction=0.0 if plan.choices is None else plan.choices.reduction_seconds,
    )


def why_slower(other: Breakdown, best: Breakdown) -> str:
    """Return why one plan is slower than another, with the shares of the other's step.

    >>> best = Breakdown(work=90, recompute=0, imbalance=2, transfer=1, bubble=7)
    >>> why_slower(replace(best, recompute=5, bubble=12, imbalance=1), best)
    'slower by 9.0 %: recompute +5.0 %, bubble +5.0 %'
    """
    lost = other.seconds - best.seconds
    more = {cause: other.by_cause[cause] - best.by_cause[cause] for cause in best.by_cause}
    causes = [
        f"{cause} +{format_share(seconds / best.seconds)}"
        for cause, seconds in sorted(more.items(), key=lambda item: -item[1])
        if seconds > _WORTH_MENTIONING * lost
    ]
    slower = f"slower by {format_share(lost / best.seconds)}"
    return f"{slower}: {', '.join(causes)}" if lost > 0 and causes else "as fast"

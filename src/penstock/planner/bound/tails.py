"""The least time that a step still takes once an action has started or ended."""

from dataclasses import dataclass

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bound.rounds import Rounds

__all__ = ["Tails", "find_tails"]


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """Per stage and microbatch: from the start of F, and from the end of I, to the end of a step.

    What starts (F) or ends (I) at second t makes the step at least t plus its tail. Where the
    step of a rank is its span, the end is that of a rank whose clock is set back by its start.
    """

    forward: Floats
    backward: Floats


def find_tails(rounds: Rounds) -> Tails:
    """Follow each microbatch through the stages after it, and wait for those behind it there.

    After I of a stage come its W, I of the stage before, and I of the next microbatch here; after
    F come F of the next stage and F of the next microbatch here. All of these, and what work a
    rank must still have left (`Visits.most_done`), take place in every schedule.
    """
    own_forward, own_backward = _own_tails(rounds)
    backward = np.empty_like(own_backward)
    seconds = rounds.by_stage(rounds.visits.backward)
    weight = rounds.by_stage(rounds.visits.weight - rounds.counted_from)
    for stage, spacing in enumerate(seconds):
        tail = np.maximum(own_backward[stage] - spacing, weight[stage])
        if stage:
            ahead = rounds.lag_up[stage - 1] + seconds[stage - 1]
            tail = np.maximum(tail, ahead + backward[stage - 1])
        backward[stage] = _wait_for_next(tail, spacing)
    forward = np.empty_like(backward)
    after = rounds.turnaround + seconds[-1] + backward[-1]
    for stage, spacing in reversed(list(enumerate(rounds.by_stage(rounds.visits.forward)))):
        tail = np.maximum(own_forward[stage], spacing + after)
        forward[stage] = _wait_for_next(tail, spacing)
        if stage:
            after = rounds.lag_down[stage - 1] + forward[stage]
    return Tails(forward, backward)


def _wait_for_next(tail: Floats, spacing: float) -> Floats:
    """Return each microbatch's tail, or that of a later one, at least `spacing` behind."""
    place = spacing * np.arange(len(tail))
    latest: Floats = np.maximum.accumulate((tail + place)[::-1])[::-1]
    return latest - place


def _own_tails(rounds: Rounds) -> tuple[Floats, Floats]:
    """Return, per stage and microbatch, what its rank has left when it starts F, and I, there."""
    visits = rounds.visits
    everything = visits.microbatches * visits.whole - rounds.counted_from
    left = everything[None, :, None] - visits.most_done
    own_backward = left[visits.rounds :][::-1]
    return rounds.by_stage(left[: visits.rounds]), rounds.by_stage(own_backward)

"""The agreement before a step: what every rank was given, and who cannot begin."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.dropin.schedules import Schedule1F1B
from penstock.dropin.stage import PipelineStage
from tests.dropin.scripts import OURS, build, gradients, make_batch, make_blocks, step
from tests.processes import Processes

RANKS = 2
MICROBATCHES = 4


def fail_alone(rank: int, step_number: int) -> list[str]:
    """Let one rank fail while it looks for its schedule, in one of its steps."""
    schedule, held = build(OURS, "1F1B", rank, RANKS, MICROBATCHES)
    find, found = schedule._find_lowered, []

    def fail() -> Any:
        raise ValueError("no order here")

    for number in range(3):
        schedule._find_lowered = fail if rank and number == step_number else find
        try:
            step(schedule, held, RANKS, make_batch(8))
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
        else:
            found.append("well")
    return found


@pytest.mark.parametrize(
    ("step_number", "doing"), [(0, "prepare its schedule"), (1, "begin the step")]
)
def test_a_rank_that_fails_alone_before_its_step_is_named(
    two_processes: Processes, step_number: int, doing: str
) -> None:
    # The others opened their connections, or waited in the step, until the group's timeout.
    first, second = (["well"] * 3 for _ in range(2))
    first[step_number] = f"rank 1 cannot {doing}: ValueError: no order here"
    second[step_number] = "no order here"
    assert two_processes.run(fail_alone, step_number) == [first, second]


def refuse_after_steady_steps(rank: int) -> tuple[str, bool]:
    schedule, held = build(OURS, "1F1B", rank, RANKS, MICROBATCHES)
    batch = make_batch(8)
    for _ in range(3):
        step(schedule, held, RANKS, batch)
    for module in held.values():
        module.zero_grad()
    parts: Any = {"arg_mbs": [(part,) for part in batch[0].chunk(4)]}
    if rank:
        parts = {"target_mbs": [batch[1]]}
    with pytest.raises((ValueError, RuntimeError), match="Expecting 4 target_mbs") as caught:
        schedule.step(**parts)
    step(schedule, held, RANKS, batch)
    again = gradients(held)
    fresh, others = build(OURS, "1F1B", rank, RANKS, MICROBATCHES)
    step(fresh, others, RANKS, batch)
    torch.testing.assert_close(again, gradients(others))
    return str(caught.value).split(" (")[0].split(";")[
        0
    ], schedule._runner.session.transport.knows_shapes


def test_a_rank_that_cannot_begin_is_named_after_steps_that_went_well(
    two_processes: Processes,
) -> None:
    # The shapes are known by then, and rank 0 must neither send its first forward nor count it.
    refused = "Expecting 4 target_mbs but got 1"
    assert [text for text, _ in two_processes.run(refuse_after_steady_steps)] == [
        f"rank 1 cannot begin the step: BatchError: {refused}",
        refused,
    ]


class Wide(nn.Module):
    """Returns more columns if its keyword says so, or fails while it is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_blocks(1)[0]
        self.is_broken = False

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        if self.is_broken:
            raise ValueError("broken")
        result: torch.Tensor = self.block(x[..., :6]).repeat(1, times)
        return result


def change_one_rank(rank: int, changed: int, values: list[int]) -> list[str]:
    """Run steps in which one rank is given a keyword, 0 to break it; return how each went."""
    module = Wide()
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda y, target: (y - target).sum())
    x, target = make_batch(8)
    found = []
    for times in values:
        module.is_broken, times = times == 0 and rank == changed, max(times, 1)
        width = times if rank == changed == 1 else 1
        given: Any = {"target": target.repeat(1, width)} if rank else {}
        if rank == changed:
            given["kwarg_mbs"] = [{"times": times}] * MICROBATCHES
            given["arg_mbs"] = None if rank else [(part,) for part in x.chunk(MICROBATCHES)]
            given["target_mbs"] = list(given.pop("target").chunk(MICROBATCHES)) if rank else None
        try:
            schedule.step(*(() if rank or rank == changed else (x,)), **given)
        except Exception as error:
            found.append(str(error).splitlines()[0].split(": ")[-1])
        else:
            session: Any = schedule._runner.session
            found.append("known" if session.transport.knows_shapes else "learned")
    return found


@pytest.mark.parametrize("changed", [0, 1])
def test_another_form_on_one_rank_is_learned_by_all(
    two_processes: Processes, changed: int
) -> None:
    steps = ["learned", "known", "learned", "known", "known"]
    found = two_processes.run(change_one_rank, changed, [1, 1, 2, 2, 1])
    assert found == [steps] * RANKS


def test_a_first_forward_that_fails_is_raised_by_all(two_processes: Processes) -> None:
    # Nothing about the call has changed, so that the other rank counts on what it knows.
    found = two_processes.run(change_one_rank, 0, [1, 1, 0, 1, 1])
    assert found == [["learned", "known", "broken", "learned", "known"]] * RANKS

"""Overlapped pairs in one process: they run by turns, and gradients stay those of the model."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.models import WIDTH, differences, gradients_of, make_batch, mean_loss
from tests.strategies import examples, schedules, with_overlaps
from tests.tables import read_schedule
from tests.training.composition import reference_gradients

# The second pair runs by turns, after the first has shown that it can.
TABLE = "0F0 0F1 (0F2;0B0)OVERLAP_F_B (0F3;0B1)OVERLAP_F_B 0B2 0B3"
NOTES: list[str] = []


class Late:
    """Communication whose result is only there after the wait."""

    def __init__(self, value: torch.Tensor) -> None:
        self.result, self._value = torch.full_like(value, torch.nan), value

    def wait(self) -> None:
        self.result.copy_(self._value.flip(-1))


def begin(value: torch.Tensor) -> tuple[torch.Tensor, Late]:
    late = Late(value)
    return late.result, late


class Talking(nn.Module):
    """A layer between two exchanges of rows."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = ps.communicate(value, self._begin, self._reverse)
        value = torch.tanh(self.layer(value))
        return ps.communicate(value, self._begin, self._reverse)

    def _begin(self, value: torch.Tensor) -> tuple[torch.Tensor, Late]:
        NOTES.append(f"{self.name}F")
        return begin(value)

    def _reverse(self, value: torch.Tensor) -> tuple[torch.Tensor, Late]:
        NOTES.append(f"{self.name}B")
        return begin(value)


class Checkpointed(nn.Module):
    """A module that runs again in its backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.inner, value, use_reentrant=False)
        return output


def make_stages(count: int, wrap: Callable[[nn.Module], nn.Module] = nn.Sequential) -> list[Any]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), wrap(Talking(str(stage))), nn.Linear(WIDTH, WIDTH)
        ).double()
        for stage in range(count)
    ]


def train(
    stages: Sequence[nn.Module], schedule: ps.Schedule, steps: int = 2, **given: Any
) -> tuple[ps.Pipeline, dict[str, float]]:
    """Return a pipeline after some steps, and where the last gradients differ."""
    parts = [stages[part] for part in schedule.dataflow.parts]
    batch, target = make_batch(2 * schedule.microbatches)
    expected = reference_gradients(stages, batch, target)
    pipeline = ps.Pipeline(
        parts, schedule, microbatches=schedule.microbatches, loss=mean_loss, **given
    )
    for _ in range(steps):
        NOTES.clear()
        pipeline.zero_grad()
        pipeline.step(batch, target=target)
    found = gradients_of(pipeline.named_parameters())
    return pipeline, differences(found, expected)


def test_a_pair_runs_by_turns_from_its_second_run_on() -> None:
    pipeline, wrong = train(make_stages(1), read_schedule(TABLE), steps=1)
    assert wrong == {}
    pairs = "0F0F0B0B", "0F0B0F0B"
    assert "".join(NOTES) == "0F0F0F0F" + "".join(pairs) + "0B0B0B0B"
    pipeline.close()


def test_a_pair_without_turning_points_starts_no_thread() -> None:
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()]
    pipeline, wrong = train(stages, read_schedule(TABLE))
    assert wrong == {}
    assert pipeline._part.overlaps._pool is None
    assert "overlapped actions one after the other (no turning points)" in repr(pipeline)


def test_every_combination_of_kinds_pairs() -> None:
    table = """
    0F0 0F1 0I0 (0F2;0I1)OVERLAP_F_B (0F3;0W0)OVERLAP_F_B (0I2;0W1)OVERLAP_F_B
    (0F4;0F5)OVERLAP_F_B (0B3;0W2)OVERLAP_F_B (0B4;0B5)OVERLAP_F_B
    """.replace("\n", " ")
    pipeline, wrong = train(make_stages(1), read_schedule(table))
    assert wrong == {}
    assert "by turns (turning points in stages [0]), but not those of stages [0]" in repr(pipeline)


@pytest.mark.parametrize("wrap", [nn.Sequential, Checkpointed])
@pytest.mark.parametrize("seed", [None, 3])
def test_dualpipe_v_is_exact(wrap: Callable[[nn.Module], nn.Module], seed: int | None) -> None:
    schedule = ps.build("DualPipeV", ranks=2, microbatches=6)
    pipeline, wrong = train(make_stages(4, wrap), schedule, seed=seed)
    assert wrong == {}
    assert "overlapped actions by turns (turning points in stages [0, 1, 2, 3])>" in repr(pipeline)


def test_a_module_that_runs_again_is_not_run_beside_itself() -> None:
    # A module may keep something in itself between its turning points.
    pipeline, wrong = train(make_stages(1, Checkpointed), read_schedule(TABLE))
    assert wrong == {}
    assert "but not those of stages [0] with themselves" in repr(pipeline)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_schedule_with_overlapped_pairs_is_exact(data: st.DataObject) -> None:
    chosen = data.draw(schedules(max_ranks=3, max_microbatches=5, max_stages_per_rank=2))
    if chosen.is_forward_only:
        return
    schedule = data.draw(with_overlaps(chosen))
    wrap = data.draw(st.sampled_from([nn.Sequential, Checkpointed]))
    _, wrong = train(make_stages(schedule.dataflow.num_parts, wrap), schedule)
    assert wrong == {}


class Breaking(nn.Module):
    """Fails between two exchanges, in one microbatch of a chosen step."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.calls, self.breaks_at = part, 0, 0
        self.talking = Talking()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.talking(value)
        self.calls += 1
        if self.calls == self.breaks_at:
            if self.part == "F":
                raise ValueError("broken forward")
            if value.requires_grad:
                value.register_hook(self._fail)  # type: ignore[no-untyped-call]  # untyped upstream
        output: torch.Tensor = self.talking(value)
        return output

    def _fail(self, _: torch.Tensor) -> None:
        raise ValueError("broken backward")


@pytest.mark.parametrize(
    ("part", "breaks_at", "place"),
    [("F", 8, "stage 0, microbatch 3, 0F3"), ("B", 6, "stage 0, microbatch 1, 0B1")],
)
def test_an_error_in_either_half_names_it_and_leaves_the_pipeline_well(
    part: str, breaks_at: int, place: str
) -> None:
    module = Breaking(part).double()
    pipeline, _ = train([module], read_schedule(TABLE), steps=1)
    batch, target = make_batch(8)
    module.breaks_at = breaks_at
    with pytest.raises(ps.PenstockError, match=place):
        pipeline.step(batch, target=target)
    pipeline.zero_grad()
    pipeline.step(batch, target=target)
    expected = reference_gradients([module], batch, target)
    assert differences(gradients_of(pipeline.named_parameters()), expected) == {}


def test_a_recorded_pair_has_the_times_of_both_halves() -> None:
    pipeline, _ = train(make_stages(1), read_schedule(TABLE))
    batch, target = make_batch(8)
    timeline = pipeline.step(batch, target=target, record=True).timeline
    assert timeline is not None
    spans = {str(span.action): span for span in timeline.spans(0)}
    forward, backward = spans["0F3"], spans["0B1"]
    assert forward.start < backward.start < forward.end < backward.end

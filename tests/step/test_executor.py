"""The loop that runs a lowered schedule, bound to real stages in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from torch import nn

import penstock as ps
from penstock.ir.graph import build_graph
from penstock.loss.weigher import KnownWeights
from penstock.parallel.replica import replica_of
from penstock.ranks.faults import StepFailedError
from penstock.ranks.transport import LocalTransport
from penstock.step.clocks import HostClock
from penstock.step.executor import Executor
from penstock.step.model_end import keep_loss
from penstock.step.overlap.overlaps import Overlaps
from penstock.step.program.entries import order_for_one_process
from penstock.step.stage import Stage
from penstock.step.step_data import Around, Microbatches, Results
from tests.strategies import dag_schedules
from tests.tables import read_schedule


def texts(schedule: ps.Schedule, rows: list[int]) -> list[str]:
    return [str(schedule.rows.action(row)) for row in rows]


def test_one_process_runs_the_ranks_side_by_side() -> None:
    schedule = read_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    order = texts(schedule, order_for_one_process(schedule))
    assert order == ["0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1"]


@given(dag_schedules())
def test_one_process_runs_every_row_once_after_all_that_it_needs(schedule: ps.Schedule) -> None:
    lowered = ps.lower(schedule)
    graph = build_graph(lowered)
    done: set[int] = set()
    for row in order_for_one_process(lowered):
        needs = graph.need[graph.first[row] : graph.first[row + 1]].tolist()
        assert done.issuperset(needs)
        done.add(row)
    assert done == set(range(len(lowered.rows)))


@dataclass
class Run:
    """Two linear stages on two ranks, and an executor of a schedule for them."""

    schedule: ps.Schedule
    around: Mapping[ps.Kind, Around] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lowered = ps.lower(self.schedule)
        self.modules = [nn.Linear(2, 2, bias=False).double() for _ in range(2)]
        for number, module in enumerate(self.modules):
            nn.init.constant_(module.weight, number + 1)
        self.stages = {
            stage: Stage(stage, module, replica_of(module))
            for stage, module in enumerate(self.modules)
        }
        self.transport = LocalTransport(2)
        self.executor = Executor(
            self.lowered,
            order_for_one_process(self.lowered),
            self.stages,
            self.transport,
            loss=lambda output, target: (output * target).sum(),
            around=self.around,
            overlaps=Overlaps(torch.device("cpu")),
        )
        self.transport.begin_step(b"")

    def batch(self, *, keeps_outputs: bool = False) -> Microbatches:
        count = self.schedule.microbatches
        ones = torch.ones(1, 2, dtype=torch.float64)
        return Microbatches(
            args=[(ones * (number + 1),) for number in range(count)],
            kwargs={stage: [{}] * count for stage in range(2)},
            targets=[ones] * count,
            weigher=KnownWeights([0.5] * count),
            row_weights=[0.5] * count,
            keeps_outputs=keeps_outputs,
        )


TRAINING = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_step_leaves_weighed_losses_outputs_and_gradients() -> None:
    run, results = Run(read_schedule(TRAINING)), Results()
    run.executor.run(run.batch(keeps_outputs=True), results)
    # Ones through a matrix of ones give twos, through one of twos eights: a loss of sixteen.
    assert results.losses == [(16.0, 0.5), (32.0, 0.5)]
    outputs = {number: output.value.tolist() for number, output in results.outputs.items()}
    assert outputs == {0: [[8.0, 8.0]], 1: [[16.0, 16.0]]}
    gradients = [module.weight.grad for module in run.modules]
    assert [g.tolist() for g in gradients if g is not None] == [
        [[6.0, 6.0], [6.0, 6.0]],
        [[3.0, 3.0], [3.0, 3.0]],
    ]


def test_schedule_without_backwards_keeps_no_graph() -> None:
    run, results = Run(read_schedule("0F0 0F1\n1F0 1F1")), Results()
    run.executor.run(run.batch(keeps_outputs=True), results)
    assert [output.value.requires_grad for output in results.outputs.values()] == [False, False]
    assert [stage.num_flights for stage in run.stages.values()] == [0, 0]
    assert [module.weight.grad for module in run.modules] == [None, None]


def test_recording_has_every_row_that_was_run_with_its_times() -> None:
    run, results = Run(read_schedule(TRAINING)), Results()
    recording = run.executor.record(run.batch(), results, HostClock())
    assert recording.row == order_for_one_process(run.lowered)
    assert recording.memory == [0.0] * len(recording.row)
    times = [t for pair in zip(recording.start, recording.end, strict=True) for t in pair]
    assert times == sorted(times)


def test_error_names_the_place_and_the_next_step_runs() -> None:
    is_broken = True

    def break_once(action: ps.Action, work: Callable[[], None]) -> None:
        if is_broken and str(action) == "1B1":
            raise ValueError("broken on purpose")
        work()

    run = Run(read_schedule(TRAINING), {ps.Kind.FULL_BACKWARD: break_once})
    with pytest.raises(StepFailedError) as caught:
        run.executor.run(run.batch(), Results())
    assert str(caught.value) == (
        "rank 1, stage 1, microbatch 1, 1B1: ValueError: broken on purpose"
    )
    is_broken = False
    for stage in run.stages.values():
        stage.clear()
    run.transport.begin_step(b"")
    results = Results()
    run.executor.run(run.batch(), results)
    assert [loss for loss, _ in results.losses] == [16.0, 32.0]


def test_place_of_an_action_without_a_microbatch_is_its_stage() -> None:
    def fail(_: ps.Action, __: Callable[[], None]) -> None:
        raise ValueError("broken on purpose")

    run = Run(read_schedule(TRAINING), {ps.Kind.REDUCE_GRAD: fail})
    with pytest.raises(StepFailedError) as caught:
        run.executor.run(run.batch(), Results())
    assert str(caught.value) == ("rank 1, stage 1, 1REDUCE_GRAD: ValueError: broken on purpose")


def test_losses_are_kept_without_the_memory_that_they_were_made_in() -> None:
    # The mean of torch's own losses is the head of a buffer as large as the output; kept
    # as it is for every microbatch, it made the memory of a step grow with their number.
    run, results = Run(read_schedule(TRAINING)), Results()
    run.executor = Executor(
        run.lowered,
        order_for_one_process(run.lowered),
        run.stages,
        run.transport,
        loss=nn.functional.mse_loss,
        around={},
        overlaps=Overlaps(torch.device("cpu")),
    )
    run.executor.run(run.batch(), results)
    assert [type(loss) for loss, _ in results.losses] == [float, float]
    elsewhere = keep_loss(torch.ones(64, device="meta")[0])
    assert isinstance(elsewhere, torch.Tensor)
    assert elsewhere.untyped_storage().nbytes() == 4

"""What a step keeps alive in one process: no more than its schedule says, and nothing after it."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as ps
from penstock.measuring.live_memory import LiveMemory, storages_of
from tests.covering import all_but_slow
from tests.models import WIDTH, copy_blocks, make_batch, make_blocks, make_stages, mean_loss
from tests.strategies import FAMILY_NAMES

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
COMPUTE = (
    ps.Kind.FORWARD,
    ps.Kind.FULL_BACKWARD,
    ps.Kind.BACKWARD_INPUT,
    ps.Kind.BACKWARD_WEIGHT,
)
BLOCKS = make_blocks()


@pytest.fixture(autouse=True)
def _without_garbage_collector() -> Iterator[None]:
    """Memory must go when its last owner does, not when the collector happens to run."""
    gc.disable()
    yield
    gc.enable()


class ActivationCounter:
    """Counts the live activations of every rank, after each of its actions."""

    def __init__(self, rank_of_stage: tuple[int, ...]) -> None:
        self._rank_of_stage = rank_of_stage
        self._rank = 0
        self._alive: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self.peaks = [0] * (max(rank_of_stage) + 1)

    def run(self, action: ps.Action, work: Callable[[], None]) -> None:
        """Goes around every action."""
        self._rank = self._rank_of_stage[action.stage]
        work()
        alive = [ref for ref in self._alive[self._rank] if not ref.expired()]  # type: ignore[no-untyped-call]  # upstream
        self._alive[self._rank] = alive
        self.peaks[self._rank] = max(self.peaks[self._rank], len(alive))

    def note(self, value: torch.Tensor) -> None:
        """Take a tensor of the rank that runs now for an activation."""
        reference = StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]  # upstream
        self._alive[self._rank].append(reference)


class CountedStage(nn.Module):
    """A stage with one activation, which is needed for the inputs and for the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.counters: list[ActivationCounter] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        activation = torch.tanh(value)
        for counter in self.counters:
            counter.note(activation)
        output: torch.Tensor = self.layer(activation)
        return output


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 3), (4, 8)])
@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_peak_activations_of_every_rank_are_those_that_the_simulator_predicts(
    family: str, ranks: int, microbatches: int
) -> None:
    schedule = ps.build(family, ranks=ranks, microbatches=microbatches)
    counter = ActivationCounter(schedule.placement.rank_of_stage)
    parts = [CountedStage() for _ in range(schedule.dataflow.num_parts)]
    pipeline = ps.Pipeline(
        [parts[part] for part in schedule.dataflow.parts],
        schedule,
        microbatches=microbatches,
        loss=mean_loss,
        options=ps.RunOptions(around=dict.fromkeys(COMPUTE, counter.run)),
    )
    batch, target = make_batch(2 * microbatches)
    # The weight work of the first step is not all split off yet: a stage learns there which can.
    pipeline.step(batch, target=target)
    for part in parts:
        part.counters.append(counter)
    pipeline.step(batch, target=target)
    predicted = ps.simulate(ps.lower(schedule)).rank_peak_activations
    assert tuple(counter.peaks) == predicted


def peak_bytes(family: str, ranks: int, microbatches: int) -> int:
    """Return the most bytes alive after any action of a step, beside batch and parameters."""
    stages = make_stages(family, ranks, copy_blocks(BLOCKS))
    batch, target = make_batch(4 * microbatches)
    peaks = [0]

    def measure(_: ps.Action, work: Callable[[], None]) -> None:
        work()
        peaks.append(memory.bytes())

    pipeline = ps.Pipeline(
        stages,
        family,
        ranks=ranks,
        microbatches=microbatches,
        loss=mean_loss,
        options=ps.RunOptions(around=dict.fromkeys(ps.Kind, measure)),
    )
    with LiveMemory() as memory:
        # In the first two steps outputs are kept, to compare their loss with that of all together.
        for _ in range(3):
            peaks.clear()
            pipeline.step(batch, target=target)
    return max(peaks)


ONE_ACTIVATION = 4 * WIDTH * 8


@pytest.mark.parametrize(
    "family", all_but_slow(["1F1B", "ZB-H1", "Interleaved1F1B", "ZBV", "V-Min"], ["1F1B", "ZBV"])
)
def test_peak_memory_does_not_grow_with_the_number_of_microbatches(family: str) -> None:
    few, many = peak_bytes(family, 4, 8), peak_bytes(family, 4, 32)
    assert abs(many - few) <= ONE_ACTIVATION


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_only_gradients_are_alive_after_a_step(family: str) -> None:
    stages = make_stages(family, 2, copy_blocks(BLOCKS))
    pipeline = ps.Pipeline(stages, family, ranks=2, microbatches=4, loss=mean_loss)
    batch, target = make_batch()
    with LiveMemory() as memory:
        pipeline.step(batch, target=target)
    assert memory.storages() == storages_of(p.grad for p in pipeline.parameters())


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_outputs_that_were_asked_for_are_alive_beside_the_gradients(family: str) -> None:
    stages = make_stages(family, 2, copy_blocks(BLOCKS))
    pipeline = ps.Pipeline(stages, family, ranks=2, microbatches=4, loss=mean_loss)
    batch, target = make_batch()
    with LiveMemory() as memory:
        result = pipeline.step(batch, target=target, return_outputs=True)
    gradients = storages_of(p.grad for p in pipeline.parameters())
    assert memory.storages() == gradients | storages_of([result.outputs])
    assert not result.outputs.requires_grad
    del result
    assert memory.storages() == gradients


def test_nothing_is_alive_after_an_evaluation_whose_outputs_nobody_asked_for() -> None:
    pipeline = ps.Pipeline(
        make_stages("ZBV", 2, copy_blocks(BLOCKS)), "ZBV", microbatches=4, loss=mean_loss
    )
    batch, target = make_batch()
    with LiveMemory() as memory:
        pipeline.evaluate(batch, target=target, return_outputs=False)
    assert memory.storages() == set()


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_fiftieth_step_leaves_as_much_alive_as_the_second(family: str) -> None:
    pipeline = ps.Pipeline(
        make_stages(family, 2, copy_blocks(BLOCKS)), family, microbatches=4, loss=mean_loss
    )
    batch, target = make_batch()
    left = []
    with LiveMemory() as memory:
        for _ in range(50):
            pipeline.step(batch, target=target)
            left.append(memory.bytes())
    assert left[1:] == [left[1]] * 49


@pytest.mark.parametrize("family", ["GPipe", "1F1B", "ZBV"])
def test_outputs_that_nobody_asked_for_die_with_their_backward(family: str) -> None:
    stages = make_stages(family, 2, copy_blocks(BLOCKS))
    logits: list[StorageWeakRef] = []

    def note(_: nn.Module, __: object, output: torch.Tensor) -> None:
        logits.append(StorageWeakRef(output.untyped_storage()))  # type: ignore[no-untyped-call]  # upstream

    alive_after: list[list[bool]] = []

    def look(action: ps.Action, work: Callable[[], None]) -> None:
        work()
        if action.stage == len(stages) - 1:
            alive_after.append([not ref.expired() for ref in logits])  # type: ignore[no-untyped-call]  # upstream

    around = {ps.Kind.FULL_BACKWARD: look, ps.Kind.BACKWARD_INPUT: look}
    pipeline = ps.Pipeline(
        stages,
        family,
        ranks=2,
        microbatches=4,
        loss=mean_loss,
        options=ps.RunOptions(around=around),
    )
    batch, target = make_batch()
    stages[-1].register_forward_hook(note)
    pipeline.step(batch, target=target)
    # After the n-th backward of the last stage, the outputs of the first n microbatches are gone.
    assert [sum(alive) for alive in alive_after] == [
        len(alive) - number for number, alive in enumerate(alive_after, 1)
    ]
    assert len(logits) == 4


def test_failed_step_leaves_nothing_but_gradients_alive() -> None:
    stages = make_stages("ZBV", 2, copy_blocks(BLOCKS))
    calls = 0

    def fail_at_last(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ValueError("the fourth call")

    stages[-1].register_forward_hook(fail_at_last)
    pipeline = ps.Pipeline(stages, "ZBV", microbatches=4, loss=mean_loss)
    batch, target = make_batch()
    with LiveMemory() as memory:
        with pytest.raises(ps.errors.PipelineError, match="the fourth call"):
            pipeline.step(batch, target=target)
        # The traceback of the error holds on to what the failed call had at hand.
        gc.collect()
    assert memory.storages() == storages_of(p.grad for p in pipeline.parameters())

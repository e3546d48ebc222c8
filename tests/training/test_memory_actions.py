"""Steps that recompute, offload and reload: the gradients of the unsplit model, exactly."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.passes import add_offload, add_recompute
from tests.models import (
    WIDTH,
    copy_blocks,
    cut,
    differences,
    gradients_of,
    make_batch,
    make_blocks,
    make_stages,
    mean_loss,
    run_reference,
)
from tests.processes import Processes
from tests.strategies import examples, schedules, with_memory_actions

BLOCKS = make_blocks()
BATCH, TARGET = make_batch()
FAMILIES = ("GPipe", "1F1B", "ZB-H1", "ZBV", "Interleaved1F1B", "DualPipeV")


def everywhere(family: str, ranks: int = 2, microbatches: int = 4) -> ps.Schedule:
    """Half of all forwards recomputed, and as many offloaded as have the time."""
    schedule = ps.build(family, ranks=ranks, microbatches=microbatches)
    pairs = [(s, m) for s in range(schedule.num_stages) for m in range(microbatches)]
    return add_offload(add_recompute(schedule, pairs[::2]), pairs[1::2], behind=0, ahead=0)


def run_steps(
    stages: list[nn.Module], schedule: ps.Schedule, steps: int = 2, **more: Any
) -> float:
    pipeline = ps.Pipeline(stages, schedule, loss=mean_loss, **more)
    for _ in range(steps):
        for stage in stages:
            stage.zero_grad()
        result = pipeline.step(BATCH, target=TARGET)
    assert result.loss is not None
    return result.loss


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_and_loss_equal_those_of_the_unsplit_model(family: str) -> None:
    blocks = copy_blocks(BLOCKS)
    loss = run_steps(make_stages(family, 2, blocks), everywhere(family))
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert loss == pytest.approx(expected.loss, abs=1e-12)
    assert (
        differences(gradients_of(nn.Sequential(*blocks).named_parameters()), expected.gradients)
        == {}
    )


@given(st.data())
@settings(max_examples=examples(40))
def test_any_choice_in_any_order_gives_the_same_gradients(data: st.DataObject) -> None:
    chains = schedules(max_ranks=3, max_microbatches=4, max_stages_per_rank=2)
    plain = data.draw(
        chains.filter(
            lambda s: s.dataflow.is_chain and not s.is_forward_only and s.num_stages <= 8
        )
    )
    schedule = data.draw(with_memory_actions(plain))
    blocks = copy_blocks(BLOCKS)
    run_steps([*cut(blocks, plain.num_stages)], schedule, steps=1)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert (
        differences(gradients_of(nn.Sequential(*blocks).named_parameters()), expected.gradients)
        == {}
    )


class Counting(nn.Module):
    """Counts its forwards, draws random numbers, writes to a buffer, and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.calls: Counter[bool] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[torch.is_grad_enabled()] += 1
        y = nn.functional.dropout(self.norm(self.layer(x)), 0.5)
        result: torch.Tensor = torch.tanh(y) * torch.rand((), dtype=torch.float64)
        return result


def make_counting(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Counting() for _ in range(count)]


# Without a seed, ranks in one process share a generator, so their turns decide who draws what.
@pytest.mark.parametrize(("family", "seed"), [("1F1B", None), ("1F1B", 7), ("ZB-H1", 7)])
def test_random_numbers_and_buffers_are_those_of_one_run(family: str, seed: int | None) -> None:
    plain, again = make_counting(), make_counting()
    schedule = ps.build(family, ranks=3, microbatches=4)
    chosen = [(stage, m) for stage in range(3) for m in range(4)]
    for stages, order in ((plain, schedule), (again, add_recompute(schedule, chosen))):
        torch.manual_seed(3)
        run_steps(stages, order, seed=seed)
    one, other = (nn.Sequential(*stages) for stages in (plain, again))
    assert (
        differences(
            gradients_of(other.named_parameters()), gradients_of(one.named_parameters()), 0
        )
        == {}
    )
    assert differences(dict(other.named_buffers()), dict(one.named_buffers()), 0) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZB-H1"])
def test_each_forward_runs_again_once_per_microbatch(family: str) -> None:
    stages = make_counting()
    schedule = add_recompute(ps.build(family, ranks=3, microbatches=4), [(1, 0), (1, 2)])
    run_steps(stages, schedule, steps=1)
    counted = [stage.calls[True] for stage in stages if isinstance(stage, Counting)]
    assert counted == [4, 6, 4]


@pytest.mark.parametrize("family", ["1F1B", "ZB-H1"])
def test_autocast_and_shared_weights(family: str) -> None:
    found = []
    for order in (ps.build(family, ranks=2, microbatches=4), everywhere(family)):
        stages: list[nn.Module] = [*cut(copy_blocks(BLOCKS), 2)]
        for stage in stages:
            stage.float()
        one, other = (stage.get_submodule("0.0") for stage in stages)
        other.weight = one.weight
        pipeline = ps.Pipeline(stages, order, loss=mean_loss)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipeline.step(BATCH.float(), target=TARGET.float())
        found.append(gradients_of(nn.Sequential(*stages).named_parameters()))
    assert differences(found[1], found[0], 0) == {}


class InPlace(nn.Module):
    """Writes to what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.mul_(0.5))
        return result


def test_a_stage_that_writes_to_its_inputs_runs_again_from_what_it_received() -> None:
    torch.manual_seed(0)
    plain: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), InPlace(), nn.Tanh()]
    again = deepcopy(plain)
    schedule = ps.build("1F1B", ranks=3, microbatches=4)
    run_steps(plain, schedule)
    run_steps(again, add_recompute(schedule, [(1, m) for m in range(4)]))
    one, other = (gradients_of(nn.Sequential(*s).named_parameters()) for s in (plain, again))
    assert differences(other, one, 0) == {}


def test_a_stage_that_writes_to_the_batch_cannot_run_again() -> None:
    schedule = add_recompute(ps.build("1F1B", ranks=2, microbatches=2), [(0, 0)])
    stages = [InPlace(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]
    pipeline = ps.Pipeline(stages, schedule, loss=mean_loss)
    with pytest.raises(PipelineError, match="writes in place to its piece of the batch"):
        pipeline.step(BATCH.clone(), target=TARGET)


def test_a_step_after_a_failed_one_works() -> None:
    blocks = copy_blocks(BLOCKS)
    stages: list[nn.Module] = [*cut(blocks, 2)]
    pipeline = ps.Pipeline(stages, everywhere("1F1B"), loss=mean_loss)
    with pytest.raises(PipelineError):
        pipeline.step(BATCH[:, :3], target=TARGET)
    for block in blocks:
        block.zero_grad()
    pipeline.step(BATCH, target=TARGET)
    found = gradients_of(nn.Sequential(*blocks).named_parameters())
    assert differences(found, run_reference(BLOCKS, BATCH, TARGET).gradients) == {}


def run_rank(rank: int, schedule: ps.Schedule) -> dict[str, torch.Tensor]:
    blocks = copy_blocks(BLOCKS)
    stages = cut(blocks, schedule.num_stages)
    own = {stage: stages[stage] for stage in schedule.placement.stages(rank)}
    pipeline = ps.Pipeline(own, schedule, loss=mean_loss, group=torch.distributed.group.WORLD)
    for _ in range(2):
        for block in blocks:
            block.zero_grad()
        pipeline.step(BATCH, target=TARGET)
    names = {p: name for name, p in nn.Sequential(*blocks).named_parameters()}
    return {names[p]: p.grad for p in pipeline.parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_gradients_are_exact_on_two_processes(two_processes: Processes, family: str) -> None:
    answers = two_processes.run(run_rank, everywhere(family))
    gradients = {name: value for found in answers for name, value in found.items()}
    assert differences(gradients, run_reference(BLOCKS, BATCH, TARGET).gradients) == {}


class Moving(nn.Module):
    """Subtracts a mean that moves with every forward; the buffer is another tensor each time."""

    mean: torch.Tensor

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        moved = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        if self.replaces:
            self.mean = moved
        else:
            self.mean.copy_(moved)
        return torch.tanh(y - moved)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_stage_runs_again_with_the_buffers_that_its_forward_began_with(replaces: bool) -> None:
    # The second run saw buffers of later microbatches, and kept what it put in their place.
    torch.manual_seed(0)
    plain: list[nn.Module] = [Moving(replaces=replaces) for _ in range(3)]
    again = deepcopy(plain)
    schedule = ps.build("1F1B", ranks=3, microbatches=4)
    run_steps(plain, schedule)
    run_steps(again, add_recompute(schedule, [(s, m) for s in range(3) for m in range(4)]))
    one, other = nn.Sequential(*plain), nn.Sequential(*again)
    expected = gradients_of(one.named_parameters())
    assert differences(gradients_of(other.named_parameters()), expected, 0) == {}
    assert differences(dict(other.named_buffers()), dict(one.named_buffers()), 0) == {}


class LateCount(Counting):
    """Begins to change a buffer in its second step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.train(self.calls.total() >= 4)
        return super().forward(x)


def test_a_buffer_that_begins_to_change_later_is_refused_and_then_expected() -> None:
    schedule = add_recompute(ps.build("1F1B", ranks=2, microbatches=4), [(0, 2)])
    stages = [LateCount(), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]
    pipeline = ps.Pipeline(stages, schedule, loss=mean_loss)
    pipeline.step(BATCH, target=TARGET)
    with pytest.raises(PipelineError, match=r"stage 0 must change its buffers .* running_mean"):
        pipeline.step(BATCH, target=TARGET)
    pipeline.step(BATCH, target=TARGET)


class OwnLoss(nn.Module):
    """Computes the loss of the model, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_a_model_that_computes_its_own_loss_may_recompute_its_last_stage() -> None:
    # What the loss had counted was asked of a graph that saves nothing, and the step failed.
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64), OwnLoss()]
    labels = torch.randint(WIDTH, (len(BATCH),))
    labels[:3] = -100
    schedule = add_recompute(ps.build("ZB-H1", ranks=2, microbatches=4))
    pipeline = ps.Pipeline(stages, schedule, loss=ps.find_loss)
    losses = []
    for _ in range(3):
        pipeline.zero_grad()
        losses.append(pipeline.step(BATCH, labels=labels).loss)
    found = gradients_of(nn.Sequential(*stages).named_parameters())
    pipeline.zero_grad()
    loss = stages[1](stages[0](BATCH), labels)["loss"]
    loss.backward()
    assert losses == pytest.approx([loss.item()] * 3, abs=1e-12)
    assert differences(found, gradients_of(nn.Sequential(*stages).named_parameters())) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZB-H1"])
def test_a_loss_may_take_gradients_through_a_stage_that_runs_again(family: str) -> None:
    # The loss ran after the forward that saves nothing, and found no graph to go through.
    def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = mean_loss(output, target)
        if not output.requires_grad:
            return value
        (gradient,) = torch.autograd.grad(output.square().sum(), last.weight, create_graph=True)
        return value + gradient.square().sum()

    found = []
    for chosen in ([], [(1, 0), (1, 1), (1, 3)]):
        last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        nn.init.constant_(last.weight, 0.1)
        nn.init.zeros_(last.bias)
        schedule = add_recompute(ps.build(family, ranks=2, microbatches=4), chosen)
        stages = [*cut(copy_blocks(BLOCKS), 1), last]
        pipeline = ps.Pipeline(stages, schedule, loss=penalized, reduction="mean")
        pipeline.step(BATCH, target=TARGET)
        found.append(gradients_of(pipeline.named_parameters()))
    assert differences(found[1], found[0]) == {}


class Centered(nn.Module):
    """A loss that draws, moves a buffer and writes to its target."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target.sub_(self.center).mul_(torch.rand_like(target))
            self.center.mul_(0.9).add_(0.1 * output.mean(0))
        return mean_loss(output, target)


def test_a_loss_is_made_once_where_a_stage_runs_again() -> None:
    # It was made in both runs, so that its buffers moved twice, and its target was written twice.
    found, centers = [], []
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    for chosen in ([], [(1, m) for m in range(4)]):
        blocks, loss = copy_blocks(BLOCKS), Centered()
        pipeline = ps.Pipeline(
            [*cut(blocks, 2)], add_recompute(schedule, chosen), loss=loss, reduction="mean"
        )
        torch.manual_seed(5)
        for _ in range(2):
            pipeline.step(BATCH, target=TARGET.clone())
        found.append(gradients_of(pipeline.named_parameters()))
        centers.append(loss.center)
    assert differences(found[1], found[0], 0) == {}
    assert torch.equal(*centers)


class HandsOn(nn.Module):
    """Returns its input beside its result, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x.clone()) * mask.clone(), x


class WritesToAll(nn.Module):
    """Writes to a value that another stage has been given, or to a keyword."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, h: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        {"x": x, "mask": mask}[self.name].mul_(0.5)
        return h * x.clone() * mask.clone()


@pytest.mark.parametrize("name", ["x", "mask"])
def test_what_another_stage_has_written_to_is_not_run_again_from(name: str) -> None:
    # Only writes of the stage's own forward were looked at, so the second run began with others'.
    schedule = ps.build("LoopedBFS", ranks=1, microbatches=2, stages_per_rank=2)
    stages = [HandsOn(), WritesToAll(name)]
    given: dict[str, Any] = {
        "mask": torch.ones(len(BATCH), 1, dtype=torch.float64),
        "target": TARGET,
    }
    ps.Pipeline(stages, schedule, loss=mean_loss).step(BATCH.clone(), **given)
    pipeline = ps.Pipeline(stages, add_recompute(schedule, [(0, 0)]), loss=mean_loss)
    with pytest.raises(PipelineError, match=r"stage 0 must run again from what .* another stage"):
        pipeline.step(BATCH.clone(), **given)


def test_a_batch_of_inference_mode_may_be_run_again_from() -> None:
    # Its tensors have no versions, and asking for them raised an error of torch's.
    with torch.inference_mode():
        batch = BATCH.clone()
    schedule = add_recompute(ps.build("1F1B", ranks=2, microbatches=2))
    stages = [Embedded(), *cut(copy_blocks(BLOCKS), 1)]
    ps.Pipeline(stages, schedule, loss=mean_loss).step(batch, target=TARGET)


class Embedded(nn.Module):
    """Saves nothing of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1

"""What users combine with a pipeline: checkpoints, autocast, frozen parts, added losses, skips."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
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
)
from tests.processes import Processes
from tests.training.composition import SendLog, reference_gradients

FAMILIES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBV")
MICROBATCHES = 4


def train_in_one_process(
    stages: Sequence[nn.Module], family: str | ps.Schedule, rows: int = 16
) -> dict[str, float]:
    """Return where the gradients of one step differ from the unsplit model's."""
    batch, target = make_batch(rows)
    expected = reference_gradients(stages, batch, target)
    pipeline = ps.Pipeline(stages, family, microbatches=MICROBATCHES, loss=mean_loss)
    pipeline.step(batch, target=target)
    return differences(gradients_of(pipeline.named_parameters()), expected)


class Checkpointed(nn.Module):
    """Keeps nothing of its block but the input, and counts how often the block runs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.runs = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self._run, value, use_reentrant=False)
        return output

    def _run(self, value: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        output: torch.Tensor = self.block(value)
        return output


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_checkpointed_blocks_are_recomputed_once_per_microbatch(family: str) -> None:
    blocks: list[nn.Module] = [Checkpointed(block) for block in make_blocks()]
    stages = make_stages(family, 2, blocks)
    batch, target = make_batch()
    expected = reference_gradients(stages, batch, target)
    pipeline = ps.Pipeline(stages, family, microbatches=MICROBATCHES, loss=mean_loss)
    pipeline.step(batch, target=target)
    assert differences(gradients_of(pipeline.named_parameters()), expected) == {}
    assert [b.runs for b in blocks if isinstance(b, Checkpointed)] == [2 * MICROBATCHES] * 8


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_dropout_in_checkpointed_blocks_is_the_same_when_recomputed(family: str) -> None:
    blocks = [nn.Sequential(block, nn.Dropout(0.5)) for block in make_blocks()]
    batch, target = make_batch()
    plain, checkpointed = (
        make_stages(family, 2, made)
        for made in (copy_blocks(blocks), [Checkpointed(b) for b in copy_blocks(blocks)])
    )
    found = []
    for stages in (plain, checkpointed):
        pipeline = ps.Pipeline(stages, family, microbatches=MICROBATCHES, loss=mean_loss)
        torch.manual_seed(7)
        pipeline.step(batch, target=target)
        gradients = gradients_of(pipeline.named_parameters())
        found.append({name.replace("block.", ""): g for name, g in gradients.items()})
    assert differences(found[0], found[1]) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_autocast_around_a_step_works_as_on_the_unsplit_model(family: str) -> None:
    blocks = [block.float() for block in make_blocks()]
    stages = make_stages(family, 2, blocks)
    batch, target = (value.float() for value in make_batch())

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert output.dtype == torch.bfloat16
        return mean_loss(output.float(), target)

    whole = deepcopy(nn.Sequential(*stages))
    with torch.autocast("cpu", torch.bfloat16):
        # Microbatch by microbatch, so that rounding is the same.
        for part, goal in zip(batch.chunk(4), target.chunk(4), strict=True):
            torch.autograd.backward(loss(whole(part), goal) / 4)
        pipeline = ps.Pipeline(stages, family, microbatches=4, loss=loss)
        pipeline.step(batch, target=target)
    expected = gradients_of(whole.named_parameters())
    found = gradients_of(pipeline.named_parameters())
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert differences(found, expected, limit=1e-3) == {}


class Adapted(nn.Module):
    """A frozen block with a small trained path beside it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False).double()
        self.up = nn.Linear(2, WIDTH, bias=False).double()
        for number, layer in enumerate((self.down, self.up)):
            nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(number))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block(value) + self.up(self.down(value))
        return output


def make_frozen_stages(trained: Sequence[int]) -> list[nn.Module]:
    """Four stages of two blocks; only some are trained, by a small path beside the blocks."""
    stages: list[nn.Module] = [*cut(make_blocks(), 4)]
    return [
        Adapted(stage) if number in trained else stage.requires_grad_(False)
        for number, stage in enumerate(stages)
    ]


@pytest.mark.parametrize("trained", [(2, 3), (0, 3), (0,), (3,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_stages_pass_gradients_on_and_get_none(family: str, trained: Sequence[int]) -> None:
    stages = make_frozen_stages(trained)
    if family in ("GPipe", "1F1B"):
        schedule = ps.build(family, ranks=4, microbatches=MICROBATCHES)
    else:
        schedule = ps.build(family, ranks=2, microbatches=MICROBATCHES)
    assert train_in_one_process(stages, schedule) == {}


def count_gradient_messages(_: int, trained: Sequence[int], family: str) -> list[str]:
    """Return the links on which tensors went back in one step."""
    log = SendLog()
    batch, target = make_batch()
    pipeline = ps.Pipeline(
        make_frozen_stages(trained),
        family,
        microbatches=1,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(around={ps.Kind.SEND_B: log.watch}),
    )
    log.listen(pipeline)
    pipeline.step(batch, target=target)
    return [action for action in log.seen if action != "outside"]


@pytest.mark.parametrize(
    ("family", "trained", "expected"),
    [
        ("Interleaved1F1B", (2, 3), [[], ["3SEND_B0"]]),
        ("Interleaved1F1B", (0, 3), [["2SEND_B0"], ["3SEND_B0", "1SEND_B0"]]),
        ("ZBV", (3,), [[], []]),
        ("ZBV", (1, 3), [["3SEND_B0"], []]),
    ],
)
def test_no_gradient_travels_to_stages_that_need_none(
    family: str, trained: Sequence[int], expected: list[list[str]], two_processes: Processes
) -> None:
    assert two_processes.run(count_gradient_messages, trained, family) == expected


class Penalised(nn.Module):
    """Adds a loss of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.block(value)
        ps.add_loss(0.01 * output.square().mean())
        return output


def penalised_reference(
    blocks: Sequence[nn.Module], batch: torch.Tensor, target: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit model with the same penalties, written out."""
    model = nn.ModuleList(copy_blocks(blocks))
    total = torch.zeros((), dtype=torch.float64)
    for number, block in enumerate(model):
        batch = block(batch)
        if number in (2, 5):
            total = total + 0.01 * batch.square().mean()
    total = total + mean_loss(batch, target)
    torch.autograd.backward(total)
    return total.item(), gradients_of(model.named_parameters())


@pytest.mark.parametrize("rows", [16, 10, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_added_in_the_middle_give_exactly_their_gradients(family: str, rows: int) -> None:
    blocks = make_blocks()
    batch, target = make_batch(rows)
    loss, expected = penalised_reference(blocks, batch, target)
    made = [Penalised(b) if n in (2, 5) else b for n, b in enumerate(copy_blocks(blocks))]
    pipeline = ps.Pipeline(
        make_stages(family, 2, made), family, microbatches=MICROBATCHES, loss=mean_loss
    )
    result = pipeline.step(batch, target=target)
    found = {
        name: gradient
        for number, block in enumerate(made)
        for name, gradient in gradients_of(
            (f"{number}.{name.removeprefix('block.')}", p) for name, p in block.named_parameters()
        ).items()
    }
    assert differences(found, expected) == {}
    assert result.loss == pytest.approx(loss, abs=1e-12)


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return value


def make_counting_stages() -> list[nn.Module]:
    return [
        nn.Sequential(stage, nn.BatchNorm1d(WIDTH, dtype=torch.float64), Counter())
        for stage in cut(make_blocks(), 4)
    ]


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
def test_buffers_are_changed_once_per_microbatch_and_by_nothing_else(family: str) -> None:
    stages = make_counting_stages()
    untouched = [deepcopy(dict(stage.named_buffers())) for stage in stages]
    pipeline = ps.Pipeline(stages, family, microbatches=MICROBATCHES, loss=mean_loss)
    for stage, before in zip(stages, untouched, strict=True):
        assert differences(dict(stage.named_buffers()), before, limit=0.0) == {}
    batch, target = make_batch()
    reference = deepcopy(nn.Sequential(*stages))
    for part in batch.chunk(MICROBATCHES):
        reference(part)
    pipeline.step(batch, target=target)
    found = dict(nn.Sequential(*stages).named_buffers())
    assert differences(found, dict(reference.named_buffers())) == {}
    counts = [int(b) for name, b in found.items() if name.endswith(("calls", "tracked"))]
    assert counts == [MICROBATCHES] * 8


def build_and_look(_: int) -> tuple[bool, bool, list[int]]:
    """Whether building and an evaluation left random numbers and gradients alone; the counts."""
    stages = make_counting_stages()
    state = torch.get_rng_state()
    pipeline = ps.Pipeline(
        stages, "ZBV", microbatches=MICROBATCHES, loss=mean_loss, group=dist.group.WORLD
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    pipeline.evaluate(batch)
    has_same_state = torch.equal(torch.get_rng_state(), state)
    # Stages of other ranks were given, too, and must not change.
    others = [stage for number, stage in enumerate(stages) if number not in pipeline.modules]
    is_empty = all(p.grad is None for stage in others for p in stage.parameters())
    counts = [int(b) for n, b in nn.ModuleList(stages).named_buffers() if n.endswith("calls")]
    return has_same_state, is_empty, counts


def test_the_first_step_in_processes_runs_each_stage_once_per_microbatch(
    two_processes: Processes,
) -> None:
    # ZBV: rank 0 holds the stages 0 and 3; a step and an evaluation of four microbatches each.
    assert two_processes.run(build_and_look) == [
        (True, True, [8, 0, 0, 8]),
        (True, True, [0, 8, 8, 0]),
    ]


class Join(nn.Module):
    """A stage that may get several values, and adds up what it makes of each."""

    def __init__(self, block: nn.Module, inputs: int) -> None:
        super().__init__()
        self.block = block
        self.shares = nn.Parameter(torch.linspace(0.5, 1.5, inputs, dtype=torch.float64))

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.shares, values, strict=True)
        joined = sum((share * value for share, value in pairs), torch.zeros(()))
        output: torch.Tensor = self.block(joined)
        return output


FLOW = ps.Dataflow(4, [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)])


def make_skipping_stages() -> list[nn.Module]:
    inputs = [max(1, len(FLOW.producers(stage))) for stage in range(4)]
    return [Join(s, n) for s, n in zip(cut(make_blocks(), 4), inputs, strict=True)]


def skipping_reference(
    stages: Sequence[nn.Module], batch: torch.Tensor, target: torch.Tensor
) -> dict[str, torch.Tensor]:
    model = nn.ModuleList(deepcopy(list(stages)))
    first = model[0](batch)
    second = model[1](first)
    third = model[2](second)
    output = model[3](*(dict(enumerate((first, second, third)))[p] for p in FLOW.producers(3)))
    torch.autograd.backward(mean_loss(output, target))
    return gradients_of(model.named_parameters())


def build_skipping(family: str, ranks: int) -> ps.Schedule:
    return replace(ps.build(family, ranks=ranks, microbatches=MICROBATCHES), dataflow=FLOW)


SKIPPING = [("GPipe", 4), ("1F1B", 4), ("Interleaved1F1B", 2), ("ZBV", 2)]


@pytest.mark.parametrize(("family", "ranks"), SKIPPING)
def test_values_that_skip_stages_give_the_gradients_of_the_unsplit_model(
    family: str, ranks: int
) -> None:
    stages = make_skipping_stages()
    batch, target = make_batch()
    expected = skipping_reference(stages, batch, target)
    pipeline = ps.Pipeline(
        stages, build_skipping(family, ranks), microbatches=MICROBATCHES, loss=mean_loss
    )
    pipeline.step(batch, target=target)
    assert differences(gradients_of(pipeline.named_parameters()), expected) == {}


def train_skipping(_: int, family: str, ranks: int) -> tuple[dict[str, float], list[str]]:
    """Return where gradients differ, and the sends of one microbatch."""
    log = SendLog()
    stages = make_skipping_stages()
    batch, target = make_batch()
    expected = skipping_reference(stages, batch, target)
    pipeline = ps.Pipeline(
        stages,
        build_skipping(family, ranks),
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(around=dict.fromkeys((ps.Kind.SEND_F, ps.Kind.SEND_B), log.watch)),
    )
    log.listen(pipeline)
    for _step in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        log.seen.clear()
        pipeline.step(batch, target=target)
    found = gradients_of(pipeline.named_parameters())
    wrong = differences(found, {name: expected[name] for name in found})
    return wrong, sorted(action for action in log.seen if action.split(">")[0].endswith("0"))


def test_each_link_of_a_skip_is_used_once_per_microbatch_and_direction(
    two_processes: Processes, four_processes: Processes
) -> None:
    # Skips name the stage at the other end; those between stages of one rank send nothing.
    assert four_processes.run(train_skipping, "1F1B", 4) == [
        ({}, ["0SEND_F0", "0SEND_F0>3"]),
        ({}, ["1SEND_B0", "1SEND_F0", "1SEND_F0>3"]),
        ({}, ["2SEND_B0", "2SEND_F0"]),
        ({}, ["3SEND_B0", "3SEND_B0>0", "3SEND_B0>1"]),
    ]
    assert two_processes.run(train_skipping, "ZBV", 2) == [
        ({}, ["0SEND_F0", "3SEND_B0", "3SEND_B0>1"]),
        ({}, ["1SEND_B0", "1SEND_F0>3", "2SEND_F0"]),
    ]

"""Steps over real processes: torch's results for the same script, and what torch gets wrong."""

import copy
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from penstock.dropin import schedules
from penstock.dropin._utils import PipeliningMetadataError
from penstock.dropin.run import session
from penstock.dropin.schedules import PipelineScheduleMulti, _Action, _PipelineScheduleRuntime
from penstock.dropin.stage import PipelineStage
from penstock.errors import PipelineError
from penstock.measuring.live_memory import LiveMemory
from penstock.ranks.group_transport import GroupTransport
from tests.covering import all_but_slow
from tests.dropin.scripts import (
    IS_OLD_TORCH,
    LOOPED,
    OURS,
    SINGLE,
    THEIRS,
    V_SHAPED,
    WIDTH,
    build,
    gradients,
    make_batch,
    make_blocks,
    stages_of,
    step,
)
from tests.processes import Processes

CPU = torch.device("cpu")
ALL = (*SINGLE, *LOOPED, *V_SHAPED)
COMPARED = (*SINGLE, *LOOPED) if IS_OLD_TORCH else ALL
CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


def train(package: str, name: str, rank: int, ranks: int, microbatches: int, rows: int) -> Any:
    """Losses, outputs and gradients of three steps of gradient descent, with one evaluation."""
    schedule, held = build(package, name, rank, ranks, microbatches)
    weights = [weight for module in held.values() for weight in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    found: list[Any] = []
    for number in range(3):
        optimizer.zero_grad()
        found.append((*step(schedule, held, ranks, make_batch(rows, number)), gradients(held)))
        optimizer.step()
    # Torch cannot evaluate where stages that follow each other are on one rank.
    if name not in V_SHAPED:
        found.append(step(schedule, held, ranks, make_batch(rows, 9), evaluate=True))
    return found


def compare_with_torch(rank: int, ranks: int, name: str, microbatches: int, rows: int) -> int:
    theirs = train(THEIRS, name, rank, ranks, microbatches, rows)
    ours = train(OURS, name, rank, ranks, microbatches, rows)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    return sum(len(losses) for losses, *_ in ours)


@pytest.mark.parametrize("name", COMPARED)
def test_two_ranks_give_what_torch_gives(two_processes: Processes, name: str) -> None:
    found = two_processes.run(compare_with_torch, 2, name, 4, 8)
    assert sorted(found) == [0, 12 if name in V_SHAPED else 16]


# Every schedule is compared on two ranks by default, and one of each kind on four.
@pytest.mark.parametrize(
    "name", all_but_slow(COMPARED, ("1F1B", "Interleaved1F1B", *V_SHAPED[:1]))
)
def test_four_ranks_give_what_torch_gives(four_processes: Processes, name: str) -> None:
    found = four_processes.run(compare_with_torch, 4, name, 8, 16)
    assert sorted(found) == [0, 0, 0, 24 if name in V_SHAPED else 32]


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 3, 6, 8, 12])
@pytest.mark.parametrize("name", COMPARED)
def test_any_number_of_microbatches_gives_what_torch_gives(
    two_processes: Processes, name: str, microbatches: int
) -> None:
    if name == "DualPipeV" and microbatches < 4:
        pytest.skip("torch has no DualPipeV with fewer microbatches than stages")
    two_processes.run(compare_with_torch, 2, name, microbatches, 2 * microbatches)


def reference(
    num_stages: int, held: dict[int, nn.Module], batches: list[Any]
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor | None]]]:
    """Return outputs and summed gradients of the unsplit model for a sum over each batch."""
    model = nn.Sequential(*make_blocks(num_stages))
    found = []
    for x, target in batches:
        output = model(x)
        torch.autograd.backward(nn.functional.mse_loss(output, target, reduction="sum"))
        here = {index: model[index] for index in held}
        found.append((output.detach(), gradients(here)))
    return found


def change_shapes(rank: int, ranks: int, name: str) -> list[bool]:
    """Steps and evaluations on batches of all sizes, gradients adding up all the time."""
    loss_fn = nn.MSELoss(reduction="sum")
    schedule, held = build(OURS, name, rank, ranks, 4, loss_fn=loss_fn, scale_grads=False)
    num_stages = ranks * len(held)
    batches = [make_batch(rows, rows) for rows in (8, 10, 4, 7, 8, 10)]
    known = []
    for batch, (output, grads) in zip(batches, reference(num_stages, held, batches), strict=True):
        _, found = step(schedule, held, ranks, batch)
        known.append(schedule._runner.session.transport.knows_shapes)
        torch.testing.assert_close(gradients(held), grads, **CLOSE)
        for rows in (5, 8):
            other = make_batch(rows, 3)
            _, evaluated = step(schedule, held, ranks, other, evaluate=True)
            if num_stages - 1 in held:
                torch.testing.assert_close(found, output, **CLOSE)
                model = nn.Sequential(*make_blocks(num_stages))
                torch.testing.assert_close(evaluated, model(other[0]).detach(), **CLOSE)
        torch.testing.assert_close(gradients(held), grads, **CLOSE)
    return known


def stages_in(schedule: Any) -> list[Any]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


@pytest.mark.parametrize("name", all_but_slow(ALL, ("1F1B", "InterleavedZeroBubble", "DualPipeV")))
def test_batches_of_other_sizes_are_learned_once(two_processes: Processes, name: str) -> None:
    found = two_processes.run(change_shapes, 2, name)
    assert found == [[False, False, False, False, True, True]] * 2


class Wide(nn.Module):
    """A stage of several outputs: one with a gradient, one frozen, one of integers, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, factor: float = 1.0) -> Any:
        value = self.layer(x) * factor
        for item in rest[:2]:
            value = value + item.to(value.dtype)
        return value, value.detach().round(), torch.arange(len(x)).view(-1, 1), value.sum(1)


def pass_many_values(rank: int) -> None:
    torch.manual_seed(0)
    parts = nn.ModuleList([Wide() for _ in range(4)]).double()
    model = copy.deepcopy(parts)
    indices = [rank, rank + 2]
    stages: list[Any] = [PipelineStage(parts[i], i, 4, CPU) for i in indices]

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output[0], target)

    schedule = schedules.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss_fn)
    x, target = make_batch(8)
    for frozen, factor in ((False, 1.0), (True, 2.0), (False, 2.0)):
        for part in (parts[0], model[0]):
            part.requires_grad_(not frozen)
        parts.zero_grad()
        model.zero_grad()
        args = (x,) if rank == 0 else ()
        schedule.step(*args, target=target if rank else None, factor=factor)
        for row, wanted in zip(x.split(2), target.split(2), strict=True):  # type: ignore[no-untyped-call]  # upstream
            values: Any = (row,)
            for part in model:
                values = part(*values, factor=factor)
            torch.autograd.backward(loss_fn(values, wanted) / 4)
        torch.testing.assert_close(
            gradients({i: parts[i] for i in indices}), gradients({i: model[i] for i in indices})
        )


def test_values_of_all_kinds_cross_and_layers_may_be_frozen(two_processes: Processes) -> None:
    two_processes.run(pass_many_values)


def insist(rank: int) -> list[str]:
    """Step on rank 0 alone, which must find out what is wrong without the other rank."""
    block = make_blocks(2)[rank]
    stage = PipelineStage(block, rank, 2, CPU)
    stage._runtime_validate = True
    schedule = schedules.ScheduleGPipe(stage, 4)
    x, _ = make_batch(8)
    for _ in range(2):
        schedule.step(*((x,) if rank == 0 else ()))
    found = []
    hooks: list[Any] = [None, None, torch.flatten, torch.Tensor.float]
    for hook, batch in zip(hooks, (make_batch(9)[0], x.int(), x, x), strict=True):
        if rank == 0:
            handle = block.register_forward_hook(
                lambda *values, hook=hook: (hook or id_)(values[2])
            )
            with pytest.raises(PipeliningMetadataError) as caught:
                schedule.step(batch)
            found.append(str(caught.value).split(": ")[1])
            handle.remove()
    return found


def id_(value: Any) -> Any:
    return value


def test_stages_that_insist_on_shapes_refuse_others_at_once(two_processes: Processes) -> None:
    expected = ["shape mismatch", "dtype mismatch", "shape mismatch", "dtype mismatch"]
    assert two_processes.run(insist) == [expected, []]


class Unequal(PipelineScheduleMulti):
    """Stages that follow each other on one rank, in an order of the user's own."""

    holders = (0, 0, 1, 1, 0)
    order: ClassVar = {0: "0F0 1F0 . . 4F0 4B0 . . 1B0 0B0", 1: ". . 2F0 3F0 . . 3I0 3W0 2B0"}

    def __init__(self, stages: Any, n_microbatches: int, **settings: Any) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, **settings)
        self.pipeline_order = read(self.order)
        self._validate_and_set_stage_mapping(self.pipeline_order)


class WithMessages(_PipelineScheduleRuntime):
    """An order with messages, receives first, as a user may write it."""

    holders = (0, 1)
    order: ClassVar = {
        0: "0RECV_B0 0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD",
        1: "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1 1REDUCE_GRAD",
    }

    def __init__(self, stages: Any, n_microbatches: int, **settings: Any) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, **settings)
        self.pipeline_order_with_comms = read(self.order)


def read(order: dict[int, str]) -> Any:
    return {
        rank: [None if text == "." else _Action.from_str(text) for text in line.split()]
        for rank, line in order.items()
    }


def run_own_order(rank: int, schedule_class: Any, microbatches: int) -> None:
    held_by = schedule_class.holders
    blocks = make_blocks(len(held_by))
    held = {i: blocks[i] for i, holder in enumerate(held_by) if holder == rank}
    stages: list[Any] = [PipelineStage(b, i, len(held_by), CPU) for i, b in held.items()]
    loss_fn = nn.MSELoss(reduction="sum")
    schedule = schedule_class(stages, microbatches, loss_fn=loss_fn, scale_grads=False)
    batches = [make_batch(2 * microbatches, seed) for seed in range(3)]
    for batch, (output, grads) in zip(
        batches, reference(len(held_by), held, batches), strict=True
    ):
        args = (batch[0],) if 0 in held else ()
        is_last = len(held_by) - 1 in held
        found = schedule.step(*args, target=batch[1] if is_last else None)
        torch.testing.assert_close(gradients(held), grads, **CLOSE)
        if is_last:
            torch.testing.assert_close(found, output, **CLOSE)


@pytest.mark.parametrize(("schedule_class", "microbatches"), [(Unequal, 1), (WithMessages, 2)])
def test_orders_of_the_user_run(
    two_processes: Processes, schedule_class: Any, microbatches: int
) -> None:
    two_processes.run(run_own_order, schedule_class, microbatches)


def run_from_a_file(rank: int, folder: str, name: str) -> None:
    """Run an order from its class, from a file of compute, and from a file with messages."""
    found = []
    for source in ("class", "compute_only", "compute_comms"):
        schedule, held = build(OURS, name, rank, 2, 4, defer_pp_recv=True)
        if source == "class":
            for form in ("compute_only", "compute_comms"):
                schedule._dump_csv(f"{folder}/{rank}.{form}.csv", format=form)
        else:
            runtime = _PipelineScheduleRuntime(
                schedule._stages, 4, loss_fn=nn.functional.mse_loss, defer_pp_recv=True
            )
            runtime._load_csv(f"{folder}/{rank}.{source}.csv", format=source)  # type: ignore[arg-type]  # one of them
            assert runtime.pipeline_order_with_comms == schedule.pipeline_order_with_comms
            schedule = runtime
        step(schedule, held, 2, make_batch(8))
        found.append(gradients(held))
    assert [list(grads) for grads in found] == [list(found[0])] * 3
    torch.testing.assert_close(found, [found[0]] * 3, **CLOSE)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_orders_from_files_run_like_their_class(
    two_processes: Processes, tmp_path: Any, name: str
) -> None:
    two_processes.run(run_from_a_file, str(tmp_path), name)


class OwnWeights(nn.Module):
    """A layer that makes its weight gradients itself, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = x @ self.weight.detach()
        if not output.requires_grad:
            output.requires_grad_()
        if torch.is_grad_enabled():
            output.register_hook(lambda grad: self.kept.append((x.detach(), grad)))  # type: ignore[no-untyped-call]  # upstream
        return output

    def build(self) -> Any:
        def run() -> None:
            x, grad = self.kept.pop(0)
            product = x.mT @ grad
            self.weight.grad = product if self.weight.grad is None else self.weight.grad + product

        return run


def build_own_weight_work(rank: int, name: str) -> None:
    torch.manual_seed(0)
    parts = nn.ModuleList([OwnWeights() for _ in range(4)])
    indices = stages_of(name, rank, 2)
    stages: list[Any] = [
        PipelineStage(parts[i], i, 4, CPU, dw_builder=parts[i].build)  # type: ignore[arg-type]  # a method
        for i in indices
    ]
    schedule = schedules.get_schedule_class(name)(stages, 4, loss_fn=nn.functional.mse_loss)
    weights = [part.weight.detach().requires_grad_() for part in parts]  # type: ignore[operator]  # a tensor
    x, target = make_batch(8)
    value = x
    for weight in weights:
        value = value @ weight
    expected = torch.autograd.grad(nn.functional.mse_loss(value, target), weights)
    step(schedule, {i: parts[i] for i in indices}, 2, (x, target))
    torch.testing.assert_close(
        [parts[i].weight.grad for i in indices], [expected[i] for i in indices]
    )


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "Interleaved1F1B"])
def test_weight_work_of_the_users_own_is_run(two_processes: Processes, name: str) -> None:
    two_processes.run(build_own_weight_work, name)


def refuse_target(rank: int) -> str:
    """Give a wrong target to the last rank, which knows the rows of the batch from rank 0."""
    schedule, _ = build(OURS, "GPipe", rank, 2, 1)
    x, target = make_batch(8)
    if rank == 0:
        with pytest.raises(PipelineError, match="rows") as told:
            schedule.eval(x)
        return str(told.value).splitlines()[0]
    with pytest.raises(ValueError, match="rows") as caught:
        schedule.eval(target=target[:4])
    return str(caught.value)


def test_a_target_of_half_the_batch_is_refused(two_processes: Processes) -> None:
    told, text = two_processes.run(refuse_target)
    assert text.startswith("the target has 4 rows for a batch of 8, ")
    assert told == f"rank 1, stage 1, microbatch 0, 1F0: BatchError: {text}"


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def peak_bytes(rank: int, package: str, name: str, microbatches: int) -> int:
    """Return the most bytes alive after any forward, beside the batch and the parameters."""
    # The loss of `mse_loss` keeps a storage as large as its input.
    schedule, held = build(package, name, rank, 2, microbatches, loss_fn=mean_square)
    x, target = make_batch(2 * microbatches)
    args = (x,) if 0 in held else ()
    given = {"target": target} if max(held) == 2 * len(held) - 1 else {}
    peaks: list[int] = []
    with LiveMemory() as memory:
        schedule.step(*args, **given, return_outputs=False)
        for module in held.values():
            module.register_forward_hook(lambda *_: peaks.append(memory.bytes()))
            module.zero_grad()
        before = memory.bytes()
        schedule.step(*args, **given, return_outputs=False)
    peak: int = max(peaks) - before
    return peak


@pytest.mark.parametrize(
    "name",
    all_but_slow(
        ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"], ("1F1B", "ZBVZeroBubble")
    ),
)
def test_memory_does_not_grow_with_the_number_of_microbatches(
    two_processes: Processes, name: str
) -> None:
    few, many = (two_processes.run(peak_bytes, OURS, name, number) for number in (8, 32))
    row_bytes = 2 * WIDTH * 8
    growth = [after - before for before, after in zip(few, many, strict=True)]
    assert [abs(change) <= row_bytes + 24 * 8 for change in growth] == [True, True]


def change_shapes_by_order(rank: int, ranks: int, name: str) -> list[bool]:
    """Change shapes where messages have no tags and meet by order alone, as on NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "GroupTransport", partial(GroupTransport, by_order=True))
        return change_shapes(rank, ranks, name)


@pytest.mark.parametrize("name", all_but_slow(ALL, V_SHAPED))
def test_messages_may_meet_by_order_alone(two_processes: Processes, name: str) -> None:
    found = two_processes.run(change_shapes_by_order, 2, name)
    assert found == [[False, False, False, False, True, True]] * 2

"""What trainers put into torch's classes and modules takes effect, and newer call forms work."""

import copy
from collections.abc import Callable
from threading import Thread
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock.dropin import schedules
from penstock.dropin import stage as stages_module
from penstock.dropin.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
    _PipelineScheduleRuntime,
)
from penstock.dropin.stage import (
    PipelineStage,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from tests.dropin.scripts import OURS, build, gradients, make_batch, make_blocks, step
from tests.processes import Processes

CPU = torch.device("cpu")


def make_stages(blocks: nn.ModuleList, kind: type[PipelineStage] = PipelineStage) -> list[Any]:
    return [kind(block, index, len(blocks), CPU) for index, block in enumerate(blocks)]


def expected_gradients(blocks: nn.ModuleList, rows: int) -> list[Any]:
    model = nn.Sequential(*copy.deepcopy(blocks))
    x, target = make_batch(rows)
    torch.autograd.backward(nn.functional.mse_loss(model(x), target))
    return [weight.grad for weight in model.parameters()]


def check(blocks: nn.ModuleList, rows: int) -> None:
    found = [weight.grad for weight in blocks.parameters()]
    torch.testing.assert_close(found, expected_gradients(blocks, rows))


# ---- microbatches that come ready


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", [ScheduleGPipe, ScheduleInterleaved1F1B])
def test_a_step_takes_microbatches_by_name(schedule_class: Any) -> None:
    blocks = make_blocks(1)
    (stage,) = make_stages(blocks)
    given = stage if schedule_class is ScheduleGPipe else [stage]
    schedule = schedule_class(given, 2, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(4)
    losses: list[torch.Tensor] = []
    output = schedule.step(
        arg_mbs=[(part,) for part in x.chunk(2)],
        kwarg_mbs=[{}, {}],
        target_mbs=list(target.chunk(2)),
        losses=losses,
    )
    assert len(losses) == 2
    torch.testing.assert_close(output, blocks[0](x).detach())
    check(blocks, 4)
    evaluated = schedule.eval(arg_mbs=[(part,) for part in x.chunk(2)])
    torch.testing.assert_close(evaluated, output)
    with pytest.raises(ValueError, match="a whole batch or microbatches, not both"):
        schedule.step(x, arg_mbs=[(x,), (x,)], target=target)


# ---- what newer versions of torch take


@pytest.mark.usefixtures("alone")
def test_gathering_is_limited_by_name_on_every_torch() -> None:
    stages = make_stages(make_blocks(2))
    for limit in (1, 2):
        schedule = ScheduleInterleaved1F1B(
            stages, 2, max_active_stages=limit, unshard_lookahead="auto"
        )
        texts = [str(action) for action in schedule.pipeline_order_with_comms[0]]
        assert (texts.index("1UNSHARD") < texts.index("0F0")) == (limit == 2)
    with pytest.raises(ValueError, match=r"max_active_stages must be 1 or more \(got 0\)"):
        ScheduleInterleaved1F1B(stages, 2, max_active_stages=0)


WAITING = ("0F0", "0WAIT_SEND_F0", "1F0", "1B0", "1WAIT_SEND_B0", "0B0", "0REDUCE_GRAD")


@pytest.mark.usefixtures("alone")
def test_waits_for_sends_are_read_and_left_to_the_transport() -> None:
    actions = [_Action.from_str(text) for text in WAITING]
    assert [str(action) for action in actions] == list(WAITING)
    assert not any(action.is_compute_op for action in actions if action and "WAIT" in str(action))
    blocks = make_blocks(2)
    schedule = _PipelineScheduleRuntime(make_stages(blocks), 1, loss_fn=nn.functional.mse_loss)
    schedule._prepare_schedule_with_comms({0: [*actions]}, format="compute_comms")
    x, target = make_batch(2)
    schedule.step(x, target=target)
    check(blocks, 2)


# ---- methods and functions of a client's own


def patched_backward(
    self: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
) -> Any:
    """Call torch's functions on what torch passes, as trainers do."""
    assert isinstance(last_backward, bool)
    output: Any = bwd_kwargs.get("stage_output")
    match backward_type:
        case "full":
            values = (output, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            return stage_backward(*values), None
        case "input":
            assert len(output) == 1
            values = (output, bwd_kwargs["output_grads"], bwd_kwargs["input_values"])
            return stage_backward_input(*values, self.submod.parameters())
        case _:
            groups = bwd_kwargs["param_groups"]
            return stage_backward_weight(self.submod.parameters(), groups), None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", [ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
def test_a_backward_put_into_a_stage_gets_what_torchs_gets(schedule_class: Any) -> None:
    # The loss came bare where torch hands it over in a tuple: TypeError: len() of a 0-d tensor.
    blocks = make_blocks(2)
    stages = make_stages(blocks)
    for stage in stages:
        stage.backward_maybe_with_nosync = MethodType(patched_backward, stage)
    schedule = schedule_class(stages, 4, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(8)
    for _ in range(2):
        blocks.zero_grad()
        schedule.step(x, target=target)
        check(blocks, 8)
    assert [stage.runtime.num_flights for stage in stages] == [0, 0]


@pytest.mark.usefixtures("alone")
def test_functions_put_into_torchs_modules_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def spy(module: Any, name: str) -> None:
        ours: Callable[..., Any] = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return ours(*args, **kwargs)

        call.__name__ = name
        monkeypatch.setattr(module, name, call)

    for name in ("merge_chunks", "split_args_kwargs_into_chunks", "_split_tensor"):
        spy(schedules, name)
    spy(stages_module, "stage_backward")
    blocks = make_blocks(2)
    schedule = ScheduleInterleaved1F1B(make_stages(blocks), 2, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(4)
    schedule.step(x, target=target)
    check(blocks, 4)
    split = ["split_args_kwargs_into_chunks", "_split_tensor"]
    assert called == [*split, *["stage_backward"] * 4, "merge_chunks"]


@pytest.mark.usefixtures("alone")
def test_connections_can_be_prepared_by_a_subclass() -> None:
    warmed: list[tuple[bool, bool]] = []

    class Warm(ScheduleGPipe):
        def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
            super()._warmup_p2p(stages, has_backward, p2p_done)
            assert [stage._get_init_p2p_neighbors_ops() for stage in stages] == [[]]
            warmed.append((has_backward, p2p_done))

    schedule = Warm(make_stages(make_blocks(1))[0], 2, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(4)
    schedule.step(x, target=target)
    schedule.step(x, target=target)
    schedule.eval(x)
    assert warmed == [(True, False), (False, True)]


class Pooled(PipelineStage):
    """Shares receive buffers between microbatches, as trainers do that count on torch's layout."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(2, has_backward)
        for number in range(2, num_microbatches):
            self.args_recv_info[number] = self.args_recv_info[number % 2]

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(2)
        self.chunks = num_microbatches
        for number in range(2, num_microbatches):
            self.grad_recv_info[number] = self.grad_recv_info[number % 2]


class Watched(Pooled):
    """Counts its sends, and receives into buffers of its own."""

    sends = 0

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        self.sends += 1
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        self.sends += 1
        return super().get_bwd_send_ops(bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        operations = super().get_fwd_recv_ops(fwd_chunk_id)
        self.received = [operation.tensor for operation in operations]
        return operations


def train_with_own_methods(rank: int) -> tuple[int, int]:
    blocks = make_blocks(2)
    stage = Watched(blocks[rank], rank, 2, CPU)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(8)
    expected = expected_gradients(blocks, 8)
    size = len(expected) // 2
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), target=target if rank else None)
        found = [weight.grad for weight in stage.submod.parameters()]
        torch.testing.assert_close(found, expected[rank * size : (rank + 1) * size])
    # Each direction has a channel of its own, which newer torch has a setting for.
    session: Any = schedule._runner.session
    assert sorted(session.transport.routes) == [(0, 1), (1, 0)]
    return stage.sends, len(getattr(stage, "received", ()))


def test_methods_of_a_clients_own_stage_are_called(two_processes: Processes) -> None:
    # A pool of receive buffers crashed, because _setup_forward_recv_info was missing.
    assert two_processes.run(train_with_own_methods) == [(8, 0), (8, 1)]


# ---- stages where they are not expected, and parameters that are let go of


def place_for_another_schedule(rank: int) -> str:
    blocks = make_blocks(4)
    stages: list[Any] = [PipelineStage(blocks[i], i, 4, CPU) for i in (rank, rank + 2)]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(8)
    with pytest.raises(ValueError, match="places") as caught:
        schedule.step(*((x,) if rank == 0 else ()), target=target if rank else None)
    return str(caught.value)


def test_stages_placed_for_another_schedule_are_named(two_processes: Processes) -> None:
    # It was KeyError: 2, at the first action of a stage that is elsewhere.
    assert [text.split(";")[0] for text in two_processes.run(place_for_another_schedule)] == [
        "rank 0 holds the stages [0, 2], but its schedule places [0, 3] there",
        "rank 1 holds the stages [1, 3], but its schedule places [1, 2] there",
    ]


def evaluate_sharded(rank: int) -> list[bool]:
    """Without backwards, REDUCE_GRAD is the last that an order says of its stage."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone = [dist.new_group([number]) for number in range(2)][rank]
    block = make_blocks(1)[0]
    fully_shard(block, mesh=mesh)
    stage: Any = PipelineStage(block, 0, 1, CPU, group=alone)
    schedule = _PipelineScheduleRuntime([stage], 1, loss_fn=nn.functional.mse_loss)
    order = [_Action.from_str(text) for text in ("0UNSHARD", "0F0", "0B0", "0REDUCE_GRAD")]
    schedule._prepare_schedule_with_comms({0: [*order]}, format="compute_comms")
    x, target = make_batch(2)
    schedule.eval(x, target=target)
    return [isinstance(weight, DTensor) for weight in block.parameters()]


def test_sharded_parameters_are_let_go_of_without_backwards(two_processes: Processes) -> None:
    # REDUCE_GRAD did nothing in a run without backwards, and left parameters gathered.
    assert two_processes.run(evaluate_sharded) == [[True] * 6] * 2


def learn_by_refusal(rank: int) -> str:
    """Give one rank a batch too small to split, which the others must not wait for."""
    schedule, held = build(OURS, "GPipe", rank, 2, 4)
    x, target = make_batch(2)[0], make_batch(8)[1]
    given = {"target": target} if rank else {}
    with pytest.raises(
        (ValueError, RuntimeError), match="Expecting 4 arg_mbs but got 2"
    ) as caught:
        schedule.step(*(() if rank else (x,)), **given)
    losses, _ = step(schedule, held, 2, make_batch(8))
    assert all(grad is not None for grad in gradients(held).values())
    return f"{len(losses)} {str(caught.value).split(';')[0]}"


def test_a_batch_that_one_rank_cannot_split_is_refused_by_all(two_processes: Processes) -> None:
    refused = "Expecting 4 arg_mbs but got 2"
    assert two_processes.run(learn_by_refusal) == [
        f"0 {refused}",
        f"4 rank 0 cannot begin the step: BatchError: {refused}",
    ]


# ---- functions in the place of actions, on several ranks


def run_forward(action: _Action, ctx: Any) -> None:
    """Do a forward as trainers do that overlap it with something of their own."""
    owner, microbatch = ctx.schedule_ref, action.microbatch_index
    held = {stage.stage_index: stage for stage in owner._stages}
    stage = held[action.stage_index]
    if not stage.is_first and action.stage_index - 1 not in held:
        schedules._wait_batch_p2p(owner.fwd_recv_ops.pop((action.stage_index, microbatch)))
    args, kwargs = ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch]
    output = stage.forward_one_chunk(microbatch, args, kwargs)
    owner._maybe_compute_loss(stage, output, ctx.target_mbs, microbatch)
    if action.stage_index + 1 in held:
        held[action.stage_index + 1].set_local_fwd_input(output, microbatch)


def run_backward(action: _Action, ctx: Any) -> None:
    owner, microbatch = ctx.schedule_ref, action.microbatch_index
    held = {stage.stage_index: stage for stage in owner._stages}
    stage = held[action.stage_index]
    if not stage.is_last and action.stage_index + 1 not in held:
        schedules._wait_batch_p2p(owner.bwd_recv_ops.pop((action.stage_index, microbatch)))
    owner.backward_counter[action.stage_index] += 1
    loss = owner._maybe_get_loss(stage, microbatch)
    stage.backward_one_chunk(microbatch, loss=loss, full_backward=True)
    if action.stage_index - 1 in held:
        gradients = stage.get_local_bwd_output(microbatch)
        held[action.stage_index - 1].set_local_bwd_input(gradients, microbatch)


def overlap(action: _Action, ctx: Any) -> None:
    """Run both parts at once, the backward in a thread of its own."""
    forward, backward = action.sub_actions or ()
    thread = Thread(target=run_backward, args=(backward, ctx))
    thread.start()
    run_forward(forward, ctx)
    thread.join()


def train_with_own_functions(rank: int) -> int:
    schedule, held = build(OURS, "DualPipeV", rank, 2, 8)
    schedule.register_custom_function(schedules.FORWARD, run_forward)
    schedule.register_custom_function(schedules.FULL_BACKWARD, run_backward)
    schedule.register_custom_function(schedules.OVERLAP_F_B, overlap)
    plain, expected = build(OURS, "DualPipeV", rank, 2, 8)
    for number in range(2):
        for module in (*held.values(), *expected.values()):
            module.zero_grad()
        batch = make_batch(16, number)
        losses, _ = step(schedule, held, 2, batch)
        step(plain, expected, 2, batch)
        torch.testing.assert_close(gradients(held), gradients(expected))
    return len(losses)


def test_functions_of_the_user_wait_for_messages_of_other_ranks(
    two_processes: Processes,
) -> None:
    assert two_processes.run(train_with_own_functions) == [8, 0]

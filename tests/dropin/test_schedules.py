import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.dropin import schedules
from penstock.dropin.microbatch import TensorChunkSpec, _Replicate
from penstock.dropin.schedules import (
    FORWARD,
    OVERLAP_F_B,
    SEND_F,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _Action,
    _batch_p2p,
    _PipelineContext,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    _ScheduleForwardOnly,
    _sorted_batch_p2p,
    _wait_batch_p2p,
    get_schedule_class,
)
from penstock.dropin.stage import PipelineStage, _PipelineStageBase, _RecvInfo
from tests.dropin.scripts import WIDTH, Block, make_batch, make_blocks

CPU = torch.device("cpu")
ONE_STAGE = [
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
]


class StandIn(_PipelineStageBase):
    """All of a stage that a schedule reads before its first step."""

    def __init__(self, num_stages: int = 1, group_size: int = 1, group_rank: int = 0) -> None:
        self.submod = None  # type: ignore[assignment]  # a stand-in has no module
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = group_rank
        self.group = None

    def _create_grad_recv_info(self, *_: Any, **__: Any) -> Any:
        return None

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None


class Talker(StandIn):
    """A stand-in that says whom it talks to, and runs nothing."""

    def __init__(self, index: int, stages: int, sources: list[int], sinks: list[int]) -> None:
        super().__init__(num_stages=stages, group_size=stages, group_rank=index)
        self.stage_index = index
        self.device = CPU
        self._sources, self._sinks = sources, sinks

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        infos = [_RecvInfo("x", source=s, buffer=None, tensor_meta=None) for s in self._sources]
        self.args_recv_info = {0: tuple(infos)}
        self.act_send_info = {0: self._sinks}
        return ()

    def clear_runtime_states(self) -> None:
        return None


def parse(*texts: str) -> list[_Action | None]:
    return [_Action.from_str(text) for text in texts]


def make_schedule(
    schedule_class: Any, module: nn.Module, microbatches: int, **settings: Any
) -> Any:
    stage = PipelineStage(module, 0, 1, CPU)
    settings.setdefault("loss_fn", nn.functional.mse_loss)
    given = stage if issubclass(schedule_class, PipelineScheduleSingle) else [stage]
    return schedule_class(given, microbatches, **settings)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [weight.grad for weight in module.parameters()]


def reference(module: nn.Module, rows: int, **settings: Any) -> tuple[Any, Any, Any]:
    module = copy.deepcopy(module)
    x, target = make_batch(rows)
    output = module(x)
    loss = nn.functional.mse_loss(output, target, **settings)
    torch.autograd.backward(loss)
    return output.detach(), loss.detach(), gradients(module)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1f1b", Schedule1F1B),
        ("GPIPE", ScheduleGPipe),
        ("LoopedBFS", ScheduleLoopedBFS),
        ("interleaved1F1B", ScheduleInterleaved1F1B),
        ("InterleavedZeroBubble", ScheduleInterleavedZeroBubble),
        ("ZBVZeroBubble", ScheduleZBVZeroBubble),
        ("DualPipeV", ScheduleDualPipeV),
        ("PipelineScheduleSingle", PipelineScheduleSingle),
        ("PipelineScheduleMulti", PipelineScheduleMulti),
    ],
)
def test_classes_are_found_by_name(name: str, expected: type) -> None:
    assert get_schedule_class(name) is expected
    assert issubclass(expected, _PipelineSchedule)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"'FiveF1B' \(expected one of 1F1B, Interleaved1F1B, GPipe"
    ):
        get_schedule_class("FiveF1B")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 10), (3, 6)])
def test_orders_need_no_more_of_a_stage_than_torch_reads(ranks: int, microbatches: int) -> None:
    for schedule_class in ONE_STAGE[2:]:
        stages: list[Any] = [StandIn(3 * ranks, ranks) for _ in range(3)]
        schedule = schedule_class(stages, microbatches)
        assert sorted(schedule.pipeline_order) == sorted(schedule.pipeline_order_with_comms)
        assert schedule.stage_index_to_group_rank == {s: s % ranks for s in range(3 * ranks)}
        assert schedule._simulate().keys() == schedule.pipeline_order.keys()
    for v_class in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        stages = [StandIn(2 * ranks, ranks) for _ in range(2)]
        mapping = v_class(stages, microbatches).stage_index_to_group_rank
        assert list(mapping.values()) == [*range(ranks), *reversed(range(ranks))]
        assert all(stage.stage_index_to_group_rank == mapping for stage in stages)
    for single_class in (ScheduleGPipe, Schedule1F1B):
        order: Any = single_class(StandIn(ranks, ranks), microbatches).pipeline_order
        assert [str(order[ranks - 1][0]), sorted(order)] == [f"{ranks - 1}F0", [*range(ranks)]]


@pytest.mark.parametrize("schedule_class", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_a_v_takes_two_stages_per_rank(schedule_class: Any) -> None:
    with pytest.raises(ValueError, match="takes two stages per rank"):
        schedule_class([StandIn(6, 2) for _ in range(3)], 8)


def test_sizes_that_a_schedule_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one microbatch per stage"):
        Schedule1F1B(StandIn(4, 4), 3)
    with pytest.raises(ValueError, match="at least one microbatch per stage"):
        ScheduleDualPipeV([StandIn(8, 4), StandIn(8, 4)], 7)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", [*ONE_STAGE[3:4], *[ScheduleZBVZeroBubble]])
def test_compiled_stages_are_refused_where_backwards_are_split(schedule_class: Any) -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    stage = PipelineStage(nn.Sequential(compiled), 0, 1, CPU)
    with pytest.raises(RuntimeError, match="compiled"):
        schedule_class([stage], 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", ONE_STAGE)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_one_stage_alone_trains_like_the_module(schedule_class: Any, microbatches: int) -> None:
    module = Block().double()
    schedule = make_schedule(schedule_class, module, microbatches)
    output, loss, grads = reference(module, 6)
    x, target = make_batch(6)
    for _ in range(3):
        module.zero_grad()
        losses: list[torch.Tensor] = [torch.ones(1)]
        found = schedule.step(x, target=target, losses=losses)
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        torch.testing.assert_close(gradients(module), grads)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", ONE_STAGE)
def test_sums_are_not_divided(schedule_class: Any) -> None:
    module = Block().double()

    def loss_fn(output: torch.Tensor, target: torch.Tensor, *, reduction: str) -> torch.Tensor:
        return nn.functional.mse_loss(output, target, reduction=reduction)

    schedule = make_schedule(schedule_class, module, 2, loss_fn=loss_fn, scale_grads=False)
    _, loss, grads = reference(module, 4, reduction="sum")
    x, target = make_batch(4)
    losses: list[torch.Tensor] = []
    settings = {"reduction": "sum"}
    found = schedule.step(
        x, target=target, losses=losses, return_outputs=False, loss_kwargs=settings
    )
    assert found is None
    torch.testing.assert_close((sum(losses), gradients(module)), (loss, grads))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", ONE_STAGE)
def test_gradients_of_steps_add_up(schedule_class: Any) -> None:
    # Torch divides what was there before once more in every step.
    module = Block().double()
    schedule = make_schedule(schedule_class, module, 3)
    _, _, grads = reference(module, 6)
    x, target = make_batch(6)
    for number in range(1, 4):
        schedule.step(x, target=target)
        expected = [number * grad for grad in grads]
        torch.testing.assert_close(gradients(module), expected)
        schedule.eval(x, target=target)
        torch.testing.assert_close(gradients(module), expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule_class", ONE_STAGE)
def test_evaluation_gives_outputs_and_losses_and_changes_nothing(schedule_class: Any) -> None:
    module = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)).double()
    schedule = make_schedule(schedule_class, module, 2)
    x, target = make_batch(4)
    module.eval()
    losses: list[torch.Tensor] = []
    found = schedule.eval(x, target=target, losses=losses)
    assert not found.requires_grad
    torch.testing.assert_close(found, module(x))
    expected = nn.functional.mse_loss(module(x), target)
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
    torch.testing.assert_close(schedule.eval(make_batch(7)[0]), module(make_batch(7)[0]))
    module.train()
    assert gradients(module) == [None] * len(gradients(module))
    schedule.step(x, target=target)
    # The first step looks at shapes, but runs every microbatch once only.
    assert module[1].num_batches_tracked == 2
    assert not any(grad is None for grad in gradients(module))


@pytest.mark.usefixtures("alone")
def test_a_step_needs_gradients_enabled_and_a_target() -> None:
    schedule = make_schedule(ScheduleGPipe, Block().double(), 2)
    x, target = make_batch(4)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call eval\(\)"):
        schedule.step(x, target=target)
    with pytest.raises(ValueError, match="got no target"):
        schedule.step(x)
    free = make_schedule(
        ScheduleInterleaved1F1B, Block().double(), 2, backward_requires_autograd=False
    )
    with torch.no_grad():
        free.step(x, target=target)


@pytest.mark.usefixtures("alone")
def test_batches_and_targets_that_do_not_fit_are_refused() -> None:
    schedule = make_schedule(ScheduleGPipe, Block().double(), 4)
    x, target = make_batch(8)
    with pytest.raises(ValueError, match="the target has 4 rows for a batch of 8"):
        schedule.step(x, target=target[:4])
    with pytest.raises(ValueError, match="Expecting 4 arg_mbs but got 3"):
        schedule.step(x[:3], target=target)
    with pytest.raises(TypeError, match="losses must be a list"):
        schedule.step(x, target=target, losses=())
    with pytest.raises(TypeError, match="arg_mbs must be a list"):
        schedule._step_microbatches(arg_mbs=(x,))
    schedule.step(x, target=target)


@pytest.mark.usefixtures("alone")
def test_a_target_may_be_a_tree_and_have_several_rows_for_one() -> None:
    def loss_fn(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(output, target["a"].view(-1, WIDTH))

    module = Block().double()
    schedule = make_schedule(ScheduleGPipe, module, 2, loss_fn=loss_fn)
    x, target = make_batch(4)
    schedule.step(x, target={"a": target.flatten()})
    torch.testing.assert_close(gradients(module), reference(module, 4)[2])


@pytest.mark.usefixtures("alone")
def test_microbatches_may_come_split() -> None:
    module = Block().double()
    schedule = make_schedule(ScheduleGPipe, module, 3)
    x, target = make_batch(9)
    sizes = [2, 3, 4]
    losses: list[torch.Tensor] = []
    schedule._step_microbatches(
        arg_mbs=[[part] for part in torch.split(x, sizes)],
        target_mbs=list(torch.split(target, sizes)),
        losses=losses,
    )
    assert len(losses) == 3
    assert [chunk.shape[0] for chunk in schedule._stage.output_chunks] == sizes


@pytest.mark.usefixtures("alone")
def test_gradients_of_the_batch_itself_are_there() -> None:
    x, target = make_batch(4)
    x.requires_grad_()
    scale = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)

    class Scaled(nn.Module):
        def forward(self, value: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return value * scale

    schedule = make_schedule(
        ScheduleGPipe, Scaled(), 2, loss_fn=lambda o, t: (o * t).sum(), scale_grads=False
    )
    schedule.step(x, scale=scale, target=target)
    torch.testing.assert_close(x.grad, target)
    torch.testing.assert_close(scale.grad, (x * target).sum(1, keepdim=True).detach())


@pytest.mark.usefixtures("alone")
def test_specs_say_how_arguments_are_split_and_outputs_merged() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor, *, offset: torch.Tensor) -> torch.Tensor:
            return x + offset

    stage = PipelineStage(Turned(), 0, 1, CPU)
    schedule = ScheduleInterleaved1F1B(
        [stage],
        3,
        args_chunk_spec=(TensorChunkSpec(1),),
        kwargs_chunk_spec={"offset": _Replicate()},  # type: ignore[dict-item]  # not split
        output_merge_spec=TensorChunkSpec(1),  # type: ignore[arg-type]  # one tensor
    )
    x, offset = torch.randn(2, 6), torch.randn(2, 1)
    torch.testing.assert_close(schedule.step(x, offset=offset), x + offset)


@pytest.mark.usefixtures("alone")
def test_a_forward_only_schedule_has_no_losses() -> None:
    module = Block().double()
    schedule = make_schedule(_ScheduleForwardOnly, module, 2, loss_fn=None)
    x, target = make_batch(4)
    torch.testing.assert_close(schedule.step(x), module(x))
    assert schedule.pipeline_order is None
    with pytest.raises(RuntimeError, match="computes no losses"):
        schedule.step(x, target=target)


TWO_ON_ONE = ("0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1")
HALVES = ("0F0", "0F1", "1F0", "1F1", "1I0", "0I0", "1I1", "0I1", "1W0", "0W1", "0W0", "1W1")


def make_runtime(blocks: nn.ModuleList, **settings: Any) -> _PipelineScheduleRuntime:
    stages: list[Any] = [
        PipelineStage(block, index, len(blocks), CPU) for index, block in enumerate(blocks)
    ]
    return _PipelineScheduleRuntime(stages, 2, loss_fn=nn.functional.mse_loss, **settings)


@contextmanager
def left_for_the_collector() -> Iterator[list[object]]:
    """Collect, after the block, what only the garbage collector can free."""
    found: list[object] = []
    gc.collect()
    # What earlier tests have left in caches may become garbage at any time. Asking an object for
    # its class makes one of torch's warn, which other tests may have brought back into sight.
    _before = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.extend(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", [TWO_ON_ONE, HALVES])
def test_any_order_of_one_rank_runs_and_leaves_no_garbage(order: tuple[str, ...]) -> None:
    blocks = make_blocks(2)
    output, _, grads = reference(nn.Sequential(*blocks), 4)
    schedule = make_runtime(blocks)
    actions = [*order, "1REDUCE_GRAD", "0REDUCE_GRAD"]
    schedule._prepare_schedule_with_comms({0: parse(*actions)}, format="compute_comms")
    x, target = make_batch(4)
    schedule.step(x, target=target)
    blocks.zero_grad()
    with left_for_the_collector() as garbage:
        found = schedule.step(x, target=target)
    assert [item for item in garbage if isinstance(item, torch.Tensor)] == []
    torch.testing.assert_close((found, gradients(blocks)), (output, grads))


@pytest.mark.usefixtures("alone")
def test_orders_go_through_files(tmp_path: Path) -> None:
    blocks = make_blocks(2)
    schedule = make_runtime(blocks)
    compute, comms = tmp_path / "compute.csv", tmp_path / "comms.csv"
    compute.write_text(",".join(["", *TWO_ON_ONE]) + "\n", encoding="utf-8")
    schedule._load_csv(str(compute))
    assert schedule.pipeline_order == {0: [None, *parse(*TWO_ON_ONE)]}
    schedule._dump_csv(str(comms))
    again = make_runtime(blocks)
    again._load_csv(str(comms), format="compute_comms")
    assert again.pipeline_order_with_comms == schedule.pipeline_order_with_comms
    assert [str(a) for a in again.pipeline_order_with_comms[0]][-4:] == [
        "0B0",
        "0B1",
        "0REDUCE_GRAD",
        "0RESHARD",
    ]
    schedule._dump_csv(compute, format="compute_only")
    multi: Any = PipelineScheduleMulti(schedule._stages, 2)
    multi._load_csv(compute)
    assert multi.pipeline_order == schedule.pipeline_order
    multi._dump_csv(comms)
    assert comms.read_text(encoding="utf-8").strip() == ",".join(["", *TWO_ON_ONE])
    with pytest.raises(AssertionError, match="compute_only"):
        multi._load_csv(compute, format="compute_comms")
    for load in (schedule._load_csv, schedule._dump_csv):
        with pytest.raises(NotImplementedError, match="'other'"):
            load(compute, format="other")  # type: ignore[arg-type]  # wrong


@pytest.mark.usefixtures("alone")
def test_orders_that_cannot_run_are_refused() -> None:
    schedule = make_runtime(make_blocks(2))
    with pytest.raises(ValueError, match=r"0SEND_F0 is not compute; leave it out"):
        schedule._prepare_schedule_with_comms({0: parse("0F0", "0SEND_F0")})
    slots = [*parse(*TWO_ON_ONE), None]
    with pytest.raises(AssertionError, match="idle"):
        schedule._prepare_schedule_with_comms({0: slots}, format="compute_comms")
    with pytest.raises(AssertionError):
        schedule._prepare_schedule_with_comms({0: parse("0F0")})
    with pytest.raises(NotImplementedError):
        schedule._prepare_schedule_with_comms({0: []}, format="other")  # type: ignore[arg-type]  # wrong


@pytest.mark.usefixtures("alone")
def test_an_order_may_be_set_at_any_time() -> None:
    blocks = make_blocks(2)
    _, _, grads = reference(nn.Sequential(*blocks), 4)
    stages: list[Any] = [PipelineStage(block, i, 2, CPU) for i, block in enumerate(blocks)]
    schedule = PipelineScheduleMulti(stages, 2, loss_fn=nn.functional.mse_loss)
    x, target = make_batch(4)
    for order in (TWO_ON_ONE, HALVES):
        blocks.zero_grad()
        schedule.pipeline_order = {0: parse(*order)}
        schedule._validate_and_set_stage_mapping(schedule.pipeline_order)
        schedule.step(x, target=target)
        torch.testing.assert_close(gradients(blocks), grads)
    runtime = make_runtime(blocks)
    runtime.pipeline_order = {0: parse(*TWO_ON_ONE)}
    blocks.zero_grad()
    runtime.step(x, target=target)
    torch.testing.assert_close(gradients(blocks), grads)


@pytest.mark.usefixtures("alone")
def test_functions_of_the_user_replace_kinds_of_action() -> None:
    blocks = make_blocks(2)
    output, _, grads = reference(nn.Sequential(*blocks), 4)
    schedule = make_runtime(blocks)
    order = parse("0F0", "0F1", "1F0", "(1F1;1B0)OVERLAP_F_B", "1B1", "0B0", "0B1")
    schedule._prepare_schedule_with_comms({0: order})
    seen: list[str] = []

    def forward(action: _Action, ctx: _PipelineContext) -> None:
        seen.append(str(action))
        owner = ctx.schedule_ref
        assert isinstance(owner, _PipelineScheduleRuntime)
        assert ctx.arg_mbs is not None
        assert ctx.kwarg_mbs is not None
        stage, microbatch = owner._stages[action.stage_index], action.microbatch_index
        assert microbatch is not None
        args, kwargs = ctx.arg_mbs[microbatch], ctx.kwarg_mbs[microbatch]
        result = stage.forward_one_chunk(microbatch, args, kwargs)
        owner._maybe_compute_loss(stage, result, ctx.target_mbs, microbatch)
        if action.stage_index == 0:
            owner._stages[1].set_local_fwd_input(result, microbatch)

    def overlap(action: _Action, ctx: _PipelineContext) -> None:
        seen.append("overlap")
        owner: Any = ctx.schedule_ref
        assert action.sub_actions is not None
        forward(action.sub_actions[0], ctx)
        backward = action.sub_actions[1]
        stage, microbatch = owner._stages[backward.stage_index], backward.microbatch_index
        owner.backward_counter[stage.stage_index] += 1
        stage.backward_one_chunk(microbatch, loss=owner._maybe_get_loss(stage, microbatch))
        owner._stages[0].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    schedule.register_custom_function(FORWARD, forward)
    schedule.register_custom_function(OVERLAP_F_B, overlap)
    x, target = make_batch(4)
    found = schedule.step(x, target=target)
    torch.testing.assert_close((found, gradients(blocks)), (output, grads))
    assert seen == ["0F0", "0F1", "1F0", "overlap", "1F1"]
    assert (schedule.fwd_recv_ops, schedule.bwd_recv_ops) == ({}, {})
    with pytest.raises(ValueError, match="cannot be replaced"):
        schedule.register_custom_function(SEND_F, forward)


@pytest.mark.usefixtures("alone")
def test_a_failing_action_is_named_and_the_next_step_works() -> None:
    class Moody(nn.Module):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("not today")
            return 2 * x

    module = Moody()
    schedule = make_schedule(ScheduleGPipe, module, 2, loss_fn=None)
    with pytest.raises(RuntimeError, match="not today") as caught:
        schedule.step(torch.ones(2, 1))
    assert caught.value.__notes__ == ["while running 0F0, at position 1 of its rank"]
    module.fails = False
    torch.testing.assert_close(schedule.step(torch.ones(2, 1)), torch.full((2, 1), 2.0))


@pytest.mark.usefixtures("alone")
def test_a_profile_shows_actions_under_their_names() -> None:
    schedule = make_schedule(ScheduleGPipe, Block().double(), 2)
    x, target = make_batch(4)
    schedule.step(x, target=target)
    with torch.profiler.profile(acc_events=True) as profile:
        schedule.step(x, target=target)
    names = [event.name for event in profile.events() if event.name.startswith("PP:")]
    expected = ["UNSHARD", "F0", "F1", "B0", "B1", "REDUCE_GRAD", "RESHARD"]
    assert sorted(names) == sorted(f"PP:0{name}" for name in expected)


@pytest.mark.parametrize(
    ("stage", "stages", "sources", "sinks"), [(0, 3, [], [2]), (3, 4, [0], []), (1, 3, [1], [2])]
)
def test_values_that_skip_stages_are_refused(
    stage: int, stages: int, sources: list[int], sinks: list[int]
) -> None:
    schedule: Any = PipelineScheduleMulti(
        [Talker(stage, stages, sources, sinks)], n_microbatches=1
    )
    schedule.pipeline_order = {rank: [None] for rank in range(stages)}
    with pytest.raises(RuntimeError, match="adjacent-stage communication"):
        schedule.step()


@pytest.mark.parametrize(("sources", "sinks"), [([], [2]), ([0], [2]), ([], [])])
def test_values_for_neighbours_are_not(sources: list[int], sinks: list[int]) -> None:
    schedule: Any = PipelineScheduleMulti([Talker(1, 3, sources, sinks)], n_microbatches=1)
    schedule.pipeline_order = {rank: [None] for rank in range(3)}
    assert schedule.step(return_outputs=False) is None


class Operation:
    """Looks like one of torch's, with a function that notes its calls."""

    def __init__(self, op: Any, peer: int) -> None:
        self.op, self.peer, self.group_peer = op, peer, peer
        self.tensor, self.group, self.tag = torch.zeros(1), None, 0


def test_messages_one_way_start_alone_and_mixed_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def isend(tensor: Any, *, group: Any, tag: int, group_dst: int) -> Any:
        calls.append(("isend", tensor, group, tag, group_dst))
        return "sent"

    def irecv(tensor: Any, *, group: Any, tag: int, group_src: int) -> Any:
        calls.append(("irecv", tensor, group, tag, group_src))
        return "received"

    def batch_isend_irecv(operations: list[Any]) -> list[str]:
        calls.append(("batch", operations))
        return ["both"]

    for function in (isend, irecv, batch_isend_irecv):
        monkeypatch.setattr(schedules.dist, function.__name__, function)
    sends: list[Any] = [Operation(isend, peer) for peer in (1, 0)]
    receive: Any = Operation(irecv, 0)
    assert _batch_p2p([]) == []
    assert _batch_p2p(sends) == ["sent", "sent"]
    assert _batch_p2p([receive], desc="fwd_recv") == ["received"]
    assert _batch_p2p([receive, *sends]) == ["both"]
    assert _sorted_batch_p2p([*sends, receive]) == {0: ["both"], 1: ["sent"]}
    assert [call[0] for call in calls] == ["isend", "isend", "irecv", "batch", "batch", "isend"]
    assert schedules.dist is dist


def test_works_are_waited_for_in_turn() -> None:
    waited: list[int] = []

    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    _wait_batch_p2p([Work(1), Work(2)])
    assert waited == [1, 2]

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock.dropin._utils import PipeliningMetadataError, _StageMeta, extract_tensor_meta
from penstock.dropin.stage import PipelineStage, _PipelineStageBase, _RecvInfo
from tests.dropin.scripts import WIDTH, Block, make_blocks

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")


def make_stage(index: int = 0, stages: int = 3, module: nn.Module | None = None) -> PipelineStage:
    stage = PipelineStage(module or Block().double(), index, stages, CPU)
    stage.has_backward = True
    stage.chunks = 4
    return stage


def rows(number: int = 2) -> torch.Tensor:
    return torch.randn(number, WIDTH, dtype=torch.float64)


def receive(stage: PipelineStage, microbatch: int, value: torch.Tensor) -> None:
    stage.set_local_fwd_input(value.requires_grad_(), microbatch)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [weight.grad for weight in module.parameters()]


def test_a_stage_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 3 is out of range for 3 stages"):
        PipelineStage(nn.Identity(), 3, 3, CPU)


def test_stages_know_their_place_and_hold_nothing_yet() -> None:
    stage = PipelineStage(nn.Identity(), 2, 3, CPU)
    assert (stage.is_first, stage.is_last, stage.has_backward) == (False, True, False)
    assert (stage.output_chunks, stage.fwd_cache, stage.bwd_cache) == ([], {}, {})
    assert (stage.group_rank, stage.group_size, stage.chunks) == (0, 1, None)
    assert stage.stage_index_to_group_rank == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("is_split", [False, True])
def test_stages_of_one_rank_hand_over_and_give_the_gradients_of_the_whole(is_split: bool) -> None:
    blocks = make_blocks(3)
    model = nn.Sequential(*copy.deepcopy(blocks))
    stages = [make_stage(index, 3, block) for index, block in enumerate(blocks)]
    for microbatch in range(4):
        x = rows()
        model(x).sum().backward()
        output: Any = None
        for stage in stages:
            if not stage.is_first:
                stage.set_local_fwd_input(output, microbatch)
            output = stage.forward_one_chunk(microbatch, (x,))
        loss = output.sum()
        for stage in reversed(stages):
            if not stage.is_last:
                grads = stages[stage.stage_index + 1].get_local_bwd_output(microbatch)
                stage.set_local_bwd_input(grads, microbatch)
            stage.backward_one_chunk(microbatch, loss=loss, full_backward=not is_split)
            loss = None
        for stage in stages if is_split else ():
            stage.backward_weight_one_chunk(bwd_chunk_id=microbatch)
    torch.testing.assert_close(
        [gradients(block) for block in blocks], [gradients(part) for part in model]
    )
    assert [(stage.fwd_cache, stage.dw_runner) for stage in stages] == [({}, {})] * 3


def test_halves_leave_linear_weights_for_the_second_half() -> None:
    stage = make_stage(2, 3)
    block = stage.submod
    for microbatch in range(2):
        receive(stage, microbatch, rows())
        output = stage.forward_one_chunk(microbatch, ())
        stage.backward_one_chunk(microbatch, loss=output.sum(), full_backward=False)
        stage.backward_weight_one_chunk(microbatch)
        block.zero_grad()
    receive(stage, 2, rows())
    stage.backward_one_chunk(2, loss=stage.forward_one_chunk(2, ()).sum(), full_backward=False)
    assert isinstance(block, Block)
    assert (block.up.weight.grad, block.norm.weight.grad is None) == (None, False)
    stage.backward_weight_one_chunk(2)
    assert block.up.weight.grad is not None


def test_weight_work_comes_after_the_first_half_only() -> None:
    stage = PipelineStage(Block(), 0, 1, CPU, dw_builder=lambda: lambda: None)
    stage._has_backward = True
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        stage.backward_weight_one_chunk(bwd_chunk_id=0)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_builder_gives_the_weight_work_of_each_backward(is_split: bool) -> None:
    done: list[int] = []
    built = iter(range(10))

    def build() -> Any:
        number = next(built)
        return lambda: done.append(number)

    stage = PipelineStage(nn.Identity(), 1, 2, CPU, dw_builder=build)
    stage.has_backward, stage.chunks = True, 2
    for microbatch in range(2):
        receive(stage, microbatch, rows())
        loss = stage.forward_one_chunk(microbatch, ()).sum()
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=not is_split)
    assert done == ([] if is_split else [0, 1])
    for microbatch in (1, 0) if is_split else ():
        stage.backward_weight_one_chunk(microbatch)
    assert done == ([1, 0] if is_split else [0, 1])


def test_without_backward_nothing_is_kept() -> None:
    stage = make_stage(2, 3)
    stage.has_backward = False
    receive(stage, 0, rows())
    output = stage.forward_one_chunk(0, ())
    stage.backward_one_chunk(0, loss=None)
    stage.backward_weight_one_chunk(0)
    assert (stage.fwd_cache, stage.get_bwd_recv_ops(0), stage.get_bwd_send_ops(0)) == ({}, [], [])
    assert stage.output_chunks == [output]
    first = make_stage(0, 3)
    first.has_backward = False
    first.forward_one_chunk(0, (rows(),))
    assert (first.fwd_cache, first.output_chunks) == ({}, [])


def test_outputs_are_kept_in_the_order_of_microbatches_without_their_graph() -> None:
    stage = make_stage(0, 1)
    values = [rows() for _ in range(3)]
    for microbatch in (2, 0, 1):
        stage.forward_one_chunk(microbatch, (values[microbatch],))
    expected = [stage.submod(value).detach() for value in values]
    torch.testing.assert_close(stage.output_chunks, expected)
    assert not any(chunk.requires_grad for chunk in stage.output_chunks)
    stage.forward_one_chunk(3, (rows(),), save_forward_output=False)
    assert len(stage.output_chunks) == 3
    stage.clear_runtime_states()
    assert (stage.output_chunks, stage.fwd_cache) == ([], {})


def test_another_module_may_be_put_into_a_stage() -> None:
    stage = make_stage(0, 1)
    stage.submod = nn.Linear(WIDTH, 1).double()
    stage.backward_one_chunk(0, loss=stage.forward_one_chunk(0, (rows(),)).sum())
    assert stage.submod.weight.grad is not None


def test_a_failing_forward_says_where_and_on_what() -> None:
    stage = make_stage(0, 1, nn.Linear(3, 3))
    text = r"\[Stage 0\] failed to run forward for microbatch 1 .*torch.Size\(\[2, 6\]\)"
    with pytest.raises(RuntimeError, match=text):
        stage.forward_one_chunk(1, (rows(),))


def test_only_tensors_go_between_stages() -> None:
    stage = make_stage(1, 3)
    with pytest.raises(AssertionError, match="expected tensor values"):
        stage.set_local_fwd_input((torch.ones(2), "text"), 0)
    with pytest.raises(AssertionError, match="expected tensor values"):
        stage.set_local_bwd_input((torch.ones(2), "text"), 0)  # type: ignore[arg-type]  # wrong
    with pytest.raises(AssertionError, match="in a tuple"):
        stage.set_local_bwd_input([torch.ones(2)], 0)  # type: ignore[arg-type]  # wrong


def test_gradients_are_asked_for_in_the_right_direction() -> None:
    first, last = make_stage(0, 3), make_stage(2, 3)
    with pytest.raises(AssertionError, match="no gradients for a stage before"):
        first.get_local_bwd_output(0)
    with pytest.raises(AssertionError, match="takes no gradients from a stage after"):
        last.set_local_bwd_input((), 0)
    with pytest.raises(RuntimeError, match="microbatch 9 is out of range for 4"):
        last.backward_one_chunk(9)
    last.chunks = None
    with pytest.raises(RuntimeError, match="no number of microbatches"):
        last.get_local_bwd_output(0)


def test_gradients_are_divided_on_request() -> None:
    stage = make_stage()
    for weight in stage.submod.parameters():
        weight.grad = torch.full_like(weight, 6.0)
    stage.scale_grads(3)
    assert all(bool((grad == 2).all()) for grad in gradients(stage.submod) if grad is not None)


def test_what_was_received_by_hand_is_used() -> None:
    stage = make_stage(1, 3, nn.Linear(WIDTH, WIDTH).double())
    value, grad = rows().requires_grad_(), rows()
    stage.args_recv_info = {0: (_RecvInfo("x", 0, value, extract_tensor_meta(value)),)}
    output = stage.forward_one_chunk(0, ())
    stage.grad_recv_info = {0: (_RecvInfo("grad", 2, grad, extract_tensor_meta(grad)),)}
    stage.backward_one_chunk(0)
    expected = torch.autograd.grad(stage.submod(value), value, grad)
    torch.testing.assert_close(stage.get_local_bwd_output(0), expected)
    assert output.shape == value.shape


def test_a_gradient_that_is_counted_on_but_missing_is_sent_as_zeros() -> None:
    stage = make_stage(1, 3)
    stage.chunks, stage.grad_send_info = 1, [0]
    meta = extract_tensor_meta(torch.ones(2, 3))
    stage._stage_meta = _StageMeta(input_grads=(meta,))
    stage.bwd_cache[0] = (None,)
    (operation,) = stage.get_bwd_send_ops(0)
    torch.testing.assert_close(operation.tensor, torch.zeros(2, 3))
    stage._stage_meta = _StageMeta(input_grads=(None,))
    stage.bwd_cache[0] = (None,)
    assert stage.get_bwd_send_ops(0) == []
    stage._stage_meta = _StageMeta(inputs=(meta,))
    stage.bwd_cache[0] = (torch.ones(2, 3),)
    assert [operation.tensor.shape for operation in stage.get_bwd_send_ops(0)] == [(2, 3)]


def test_receives_get_buffers_when_they_are_posted() -> None:
    stage = make_stage(1, 3)
    meta = extract_tensor_meta(torch.ones(2, 3).t())
    info, missing = _RecvInfo("x", 0, None, meta), _RecvInfo("y", source=0)
    root = _RecvInfo("z", is_root_arg=True)
    (operation,) = stage._get_recv_ops((info, missing, root))
    assert operation.tensor is info.buffer
    assert (operation.tensor.shape, operation.tensor.is_contiguous()) == ((3, 2), True)
    assert (operation.op, operation.peer) == (dist.irecv, 0)
    text = [repr(item) for item in (missing, root)]
    assert text == ["_RecvInfo(y, from stage 0, None)", "_RecvInfo(z, given by the user)"]


def test_a_forward_before_its_receive_is_refused() -> None:
    stage = make_stage(1, 3)
    stage.args_recv_info = {0: (_RecvInfo("x", source=0, buffer=None, tensor_meta=None),)}
    with pytest.raises(PipeliningMetadataError, match=r"microbatch 0: .* has not come"):
        stage.forward_one_chunk(0, ())


def test_a_stage_that_insists_on_its_first_shapes_refuses_others() -> None:
    stage = make_stage(0, 2, nn.Linear(WIDTH, WIDTH).double())
    stage._runtime_validate = True
    stage.forward_one_chunk(0, (rows(2),))
    with pytest.raises(PipeliningMetadataError, match=r"Stage 0 inputs.*shape mismatch"):
        stage.forward_one_chunk(1, (rows(3),))
    with pytest.raises(PipeliningMetadataError, match=r"Stage 0 inputs.*dtype mismatch"):
        stage.forward_one_chunk(1, (rows(2).int(),))
    stage.submod.register_forward_hook(lambda _module, _args, output: output.flatten())
    with pytest.raises(PipeliningMetadataError, match=r"Stage 0 outputs.*shape mismatch"):
        stage.forward_one_chunk(1, (rows(2),))


def test_wrong_examples_are_warned_of_and_not_used() -> None:
    stage = PipelineStage(
        nn.Identity(), 0, 2, CPU, input_args=torch.ones(1, 3), output_args=(torch.ones(2, 4),)
    )
    with pytest.warns(UserWarning, match=r"Stage 0 outputs\[0\]: Metadata mismatch: shape"):
        stage.forward_one_chunk(0, (torch.ones(1, 3),))
    with pytest.raises(PipeliningMetadataError, match="not a tensor"):
        PipelineStage(nn.Identity(), 0, 2, CPU, input_args=(torch.ones(1), 3))  # type: ignore[arg-type]  # wrong


class StandIn(_PipelineStageBase):
    """What tests of schedules put in place of a stage."""

    def __init__(self) -> None:
        self.submod = None  # type: ignore[assignment]  # a stand-in has no module

    def _create_grad_recv_info(self, *_: Any) -> Any:
        return None

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None


def test_a_placeholder_stage_needs_no_more_than_torch_asks_for() -> None:
    assert StandIn().submod is None

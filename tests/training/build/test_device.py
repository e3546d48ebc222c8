"""The device of a pipeline: that of its stages, and one that is there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock as ps
from penstock.errors import ArgumentError, PenstockError
from penstock.training.build.device import find_device, require_carrier
from tests.processes import Processes

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
X = torch.ones(4, 2)


def build(stages: list[nn.Module], **settings: object) -> ps.Pipeline:
    return ps.Pipeline(stages, "1F1B", microbatches=2, loss=nn.MSELoss(), **settings)  # type: ignore[arg-type]  # any of its settings


def refusal(stages: list[nn.Module], **settings: object) -> str:
    with pytest.raises(ArgumentError) as caught:
        build(stages, **settings)
    return str(caught.value)


def on(device: str) -> nn.Module:
    """Return a module whose parameter says it is on a device that need not be there."""
    module = nn.Module()
    with FakeTensorMode():
        module.weight = nn.Parameter(torch.empty(2, device=device))
    return module


# The device was noted and never used in one process, and failed inside the step with a group.
def test_missing_device_is_refused_when_the_pipeline_is_built() -> None:
    assert refusal([nn.Linear(2, 2)], device="cuda:99") == (
        f"device must be one that this process has (got 'cuda:99', CUDA devices here: "
        f"{torch.cuda.device_count()}); give another, or leave device out to run where the stages "
        "are"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without CUDA")
def test_cuda_is_refused_without_a_cuda_device() -> None:
    assert refusal([nn.Linear(2, 2)], device="cuda") == (
        "device must be one that this process has (got 'cuda', CUDA devices here: 0); give "
        "another, or leave device out to run where the stages are"
    )


def test_unknown_device_is_refused() -> None:
    assert refusal([nn.Linear(2, 2)], device="gpu").startswith(
        "device must be one that torch knows (got 'gpu'): "
    )


def test_the_meta_device_has_no_memory_to_run_in() -> None:
    assert refusal([nn.ReLU()], device="meta") == (
        "device must have memory (got 'meta'); give the device that the stages run on, or leave "
        "device out"
    )
    assert refusal([nn.ReLU(), nn.Linear(2, 2, device="meta")]) == (
        "parameter 'weight' of stage 1 must have memory (it is on the meta device); call "
        "pipe.materialize or stage.to_empty first"
    )


def test_without_a_device_the_pipeline_is_where_its_stages_are() -> None:
    pipeline = build([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert pipeline.device == torch.device("cpu")
    assert repr(pipeline) == (
        "<Pipeline 1F1B, 2 microbatches: stages [0, 1] of 2 as ranks [0, 1] of 2 on cpu>"
    )


def test_parameters_come_before_buffers_and_stages_without_either_do_not_count() -> None:
    layer = on("cuda:3")
    layer.register_buffer("seen", torch.zeros(()))
    assert find_device(None, {0: nn.ReLU(), 1: layer}) == torch.device("cuda:3")
    norm = nn.BatchNorm1d(2, affine=False)
    assert find_device(None, {0: norm}) == torch.device("cpu")
    assert find_device(None, {0: nn.ReLU()}) == torch.device("cpu")


def test_stages_on_several_devices_ask_for_one() -> None:
    with pytest.raises(ArgumentError) as caught:
        find_device(None, {0: nn.Linear(2, 2), 2: on("cuda:3")})
    assert str(caught.value) == (
        "the stages of this process must be on one device (parameter 'weight' of stage 0 on cpu, "
        "parameter 'weight' of stage 2 on cuda:3); give device= to say where values enter and "
        "leave them"
    )


def test_stage_on_another_device_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        find_device("cpu", {0: nn.Linear(2, 2), 1: on("cuda:3")})
    assert str(caught.value) == (
        "parameter 'weight' of stage 1 is on cuda:3, but device is cpu; move the stage with "
        ".to('cpu'), or leave device out to run where it is"
    )
    # A stage that keeps some of its parameters elsewhere moves values itself.
    mixed = nn.ModuleDict({"table": on("cuda:3"), "head": nn.Linear(2, 2)})
    assert find_device("cpu", {0: mixed}) == torch.device("cpu")


def test_backend_must_support_the_device() -> None:
    require_carrier("gloo", torch.device("cpu"))
    require_carrier("gloo", torch.device("cuda:0"))
    require_carrier("nccl", torch.device("cuda:0"))
    with pytest.raises(ArgumentError) as caught:
        require_carrier("nccl", torch.device("cpu"))
    assert str(caught.value) == (
        "stages must be on a CUDA device with backend 'nccl' (got cpu); move them with "
        "stage.to('cuda'), or give a group made with backend 'gloo'"
    )


def build_on_a_missing_device(rank: int) -> str:
    try:
        build(
            [nn.Linear(2, 2), nn.Linear(2, 2)],
            group=dist.group.WORLD,
            device="cuda:99" if rank else None,
        )
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_all_ranks_fail_if_one_of_them_lacks_the_device(two_processes: Processes) -> None:
    other, mine = two_processes.run(build_on_a_missing_device)
    reason = mine.removeprefix("ArgumentError: ")
    assert reason.startswith("device must be one that this process has (got 'cuda:99', ")
    assert other == f"PipelineError: rank 1 cannot build its part of the pipeline: {reason}"


# The default was the CPU, whatever the stages were on: random numbers, autocast, clocks and what
# came from other ranks were on the wrong device.
@needs_cuda
def test_stages_on_a_gpu_run_there_by_default() -> None:
    stages: list[nn.Module] = [nn.Linear(2, 2, device="cuda"), nn.Linear(2, 2, device="cuda")]
    pipeline = build(stages, seed=3)
    assert pipeline.device == torch.device("cuda", torch.cuda.current_device())
    x = X.cuda()
    expected = nn.functional.mse_loss(stages[1](stages[0](x)), x)
    assert pipeline.step(x, target=x).loss == pytest.approx(expected.item(), rel=1e-6)


@needs_cuda
def test_a_device_without_a_number_is_the_current_one() -> None:
    pipeline = build([nn.Linear(2, 2, device="cuda")], device="cuda")
    assert pipeline.device == torch.device("cuda", torch.cuda.current_device())


@needs_cuda
def test_stages_on_the_cpu_are_refused_on_a_gpu() -> None:
    assert "parameter 'weight' of stage 0 is on cpu, but device is cuda:0" in refusal(
        [nn.Linear(2, 2)], device="cuda:0"
    )

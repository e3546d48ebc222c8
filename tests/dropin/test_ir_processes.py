"""Traced pipes on ranks of their own: the same script on torch's package and on ours."""

import importlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.dropin.cut_models import CASES, SIZE
from tests.dropin.scripts import OURS, THEIRS
from tests.processes import Processes

CPU = torch.device("cpu")
MICROBATCHES = 4
# Every process loads the tracer, on a machine that may have few cores.
SECONDS = 180.0


@dataclass
class Run:
    """What a rank has after some steps."""

    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def measure(output: Any, target: torch.Tensor) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple | list) else output
    return nn.functional.mse_loss(first, target)


def train(rank: int, package: str, name: str, schedule_name: str) -> Run:
    """Two steps of a pipe with a stage per rank; each rank gives the arguments of its stage."""
    with warnings.catch_warnings():
        if package == THEIRS:
            warnings.simplefilter("ignore")
        return run_steps(rank, package, name, schedule_name)


def run_steps(rank: int, package: str, name: str, schedule_name: str) -> Run:
    ir: Any = importlib.import_module(f"{package}._IR")
    schedules: Any = importlib.import_module(f"{package}.schedules")
    case = CASES[name]
    pipe = case.cut(ir, case.make(), ir.SplitPoint)
    stage = pipe.build_stage(rank, CPU)
    schedule = schedules.get_schedule_class(schedule_name)(stage, MICROBATCHES, loss_fn=measure)
    run = Run()
    for step in range(2):
        stage.submod.zero_grad()
        args, kwargs = case.example(3 * MICROBATCHES)
        given: dict[str, Any] = dict(kwargs) if rank == 0 else {}
        if stage.is_last:
            torch.manual_seed(step)
            target = torch.randn(3 * MICROBATCHES, SIZE, dtype=torch.float64)
            given |= {"target": target, "losses": run.losses}
        run.outputs.append(schedule.step(*(args if rank == 0 else ()), **given))
    run.losses = [loss.detach() for loss in run.losses]
    run.gradients = {
        parameter: weight.grad
        for parameter, weight in stage.submod.named_parameters()
        if weight.grad is not None
    }
    return run


def compare(processes: Processes, name: str, schedule_name: str) -> None:
    ours = processes.run(train, OURS, name, schedule_name, seconds=SECONDS)
    theirs = processes.run(train, THEIRS, name, schedule_name, seconds=SECONDS)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.losses, other.losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.gradients, other.gradients, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.outputs, other.outputs, rtol=0, atol=1e-12)
    assert all(run.gradients for run in ours)


@pytest.mark.parametrize("schedule_name", ["GPipe", "1F1B"])
@pytest.mark.parametrize("name", ["inside", "keywords", "statistics"])
def test_two_ranks_train_as_with_torch(
    two_processes: Processes, name: str, schedule_name: str
) -> None:
    compare(two_processes, name, schedule_name)


@pytest.mark.slow
@pytest.mark.parametrize("schedule_name", ["GPipe", "1F1B"])
def test_values_that_skip_stages_train_as_with_torch(
    four_processes: Processes, schedule_name: str
) -> None:
    compare(four_processes, "skip", schedule_name)


def train_ours(rank: int, name: str, config: str) -> dict[str, torch.Tensor | None]:
    ir: Any = importlib.import_module(f"{OURS}._IR")
    stages: Any = importlib.import_module(f"{OURS}.stage")
    schedules: Any = importlib.import_module(f"{OURS}.schedules")
    case = CASES[name]
    args, _ = case.example()
    wish = ir.MultiUseParameterConfig[config]
    pipe = ir.Pipe.from_tracing(case.make(), args, multi_use_param_spec=wish)
    stage = stages.build_stage(pipe.get_stage_module(rank), rank, pipe.info(), CPU)
    schedule = schedules.ScheduleGPipe(stage, 2, loss_fn=measure)
    args, target = make_step(name)
    given: dict[str, Any] = {"target": target} if stage.is_last else {}
    if name == "late argument":
        args, scale = args[:1], args[1]
        given |= {"scale": scale} if stage.is_last else {}
    schedule.step(*(args if rank == 0 else ()), **given)
    return {name: weight.grad for name, weight in stage.submod.named_parameters()}


def make_step(name: str) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    args, _ = CASES[name].example(6)
    return args, torch.ones(6, SIZE, dtype=torch.float64)


def compare_with_model(processes: Processes, name: str, config: str) -> None:
    found: dict[str, torch.Tensor | None] = {}
    for gradients in processes.run(train_ours, name, config, seconds=SECONDS):
        found |= gradients
    model = CASES[name].make()
    args, target = make_step(name)
    torch.autograd.backward(measure(model(*args), target))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_transmitted_parameter_has_the_gradient_of_all_its_uses(
    four_processes: Processes,
) -> None:
    compare_with_model(four_processes, "skip", "TRANSMIT")


def test_an_argument_may_be_given_by_name_where_it_is_used(two_processes: Processes) -> None:
    compare_with_model(two_processes, "late argument", "REPLICATE")

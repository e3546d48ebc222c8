"""Checkpoints in one process: saved by one layout, loaded by another, kept and refused."""

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.checkpoint.jobs import (
    Training,
    make_model,
    train_alone,
    train_plain,
    whole_state,
)
from tests.models import differences

LAYOUTS = (
    ("GPipe", 1),
    ("1F1B", 4),
    ("Interleaved1F1B", 2),
    ("ZBV", 2),
    ("DualPipeV", 2),
    ("DualPipe", 4),
    ("LoopedBFS", 4),
    ("GPipe", 1),
)
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


def names_in(folder: Path) -> list[str]:
    """Return what is in a folder, but for our own."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".penstock")


def job_in(folder: Path) -> str:
    """Return the job that holds the lease of a folder."""
    job: str = json.loads((folder / ".penstock" / "lease.json").read_text())["job"]
    return job


def state_of(training: Training) -> dict[str, torch.Tensor]:
    return whole_state(training.pipeline.state_dict())


def save_once(folder: Path, step: int = 3, family: str = "1F1B") -> Training:
    training = train_alone(family, 2)
    for number in range(step):
        training.step(number)
    ps.Checkpoints(folder).save(step, training.pipeline, training.optimizer, wait=True)
    return training


@pytest.mark.parametrize(("saver", "loader"), list(pairwise(LAYOUTS)))
def test_next_step_equals_plain_torch_whatever_layout_saves_and_loads(
    saver: tuple[str, int], loader: tuple[str, int], tmp_path: Path
) -> None:
    training = train_alone(*saver)
    for step in range(2):
        training.step(step)
    with ps.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, training.pipeline, training.optimizer, data={"rows": 32})
    other = train_alone(*loader, seed=9)
    restored = ps.Checkpoints(tmp_path).load(other.pipeline, other.optimizer)
    assert restored == ps.checkpoint.Restored(2, {"rows": 32}, has_generator_states=True)
    other.step(2)
    assert differences(state_of(other), whole_state(train_plain(3).model.state_dict())) == {}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_continues_as_if_it_had_not_been_saved(name: str, tmp_path: Path) -> None:
    def make(parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](list(parameters.values()))

    training = train_alone("1F1B", 4, make=make)
    for step in range(2):
        training.step(step)
    ps.Checkpoints(tmp_path).save(2, training.pipeline, training.optimizer, wait=True)
    other = train_alone("ZBV", 2, seed=9, make=make)
    ps.Checkpoints(tmp_path).load(other.pipeline, other.optimizer)
    training.step(2)
    other.step(2)
    assert differences(state_of(other), state_of(training)) == {}


def test_settings_of_groups_are_saved_by_parameter(tmp_path: Path) -> None:
    training = save_once(tmp_path)
    parameters = dict(training.pipeline.named_parameters())
    # One group per parameter, in reverse: not the groups that were saved.
    other = torch.optim.Adam([{"params": [p]} for p in reversed(parameters.values())], lr=7.0)
    ps.Checkpoints(tmp_path).load(training.pipeline, other)
    found = {
        name: (group["lr"], group["weight_decay"], group["betas"])
        for name, p in parameters.items()
        for group in other.param_groups
        if group["params"][0] is p
    }
    assert found == {
        name: (1e-3, 0.1, (0.9, 0.999)) if p.dim() > 1 else (2e-3, 0, (0.9, 0.999))
        for name, p in parameters.items()
    }


def test_parameters_of_one_group_must_be_saved_with_the_same_settings(
    tmp_path: Path,
) -> None:
    training = save_once(tmp_path)
    other = torch.optim.Adam(training.pipeline.parameters())
    with pytest.raises(ps.errors.CheckpointError) as caught:
        ps.Checkpoints(tmp_path).load(training.pipeline, other)
    assert str(caught.value) == (
        "cannot load step 3: parameters of one group must be saved with the same 'lr' "
        "('embed.weight': 0.001, 'layers.0.0.bias': 0.002); put them in different groups; no "
        "other step"
    )


def test_learning_rate_scheduler_is_saved_with_the_data(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, step_size=1)
    training.step(0)
    scheduler.step()
    checkpoints = ps.Checkpoints(tmp_path)
    data = {"scheduler": scheduler.state_dict()}
    checkpoints.save(1, training.pipeline, training.optimizer, data=data, wait=True)
    restored = checkpoints.load(training.pipeline, training.optimizer)
    assert restored is not None
    assert restored.data == data


def test_random_numbers_and_the_seeded_step_are_restored(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    training.pipeline.random_step = 41
    torch.manual_seed(3)
    ps.Checkpoints(tmp_path).save(1, training.pipeline, wait=True)
    expected = torch.rand(4)
    torch.manual_seed(4)
    training.pipeline.random_step = 0
    ps.Checkpoints(tmp_path).load(training.pipeline)
    assert torch.equal(torch.rand(4), expected)
    assert training.pipeline.random_step == 41


def test_changes_while_a_step_is_written_are_not_saved(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    training.step(0)
    expected = state_of(training)
    with ps.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, training.pipeline, training.optimizer)
        for tensor in training.pipeline.state_dict().values():
            tensor.fill_(0)
    ps.Checkpoints(tmp_path).load(training.pipeline, training.optimizer)
    assert differences(state_of(training), expected, limit=0) == {}


def test_newest_steps_are_kept_and_any_of_them_can_be_loaded(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    states = {}
    with ps.Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.load(training.pipeline) is None
        for step in (0, 1, 2, 10, 100):
            training.step(step)
            states[step] = state_of(training)
            checkpoints.save(step, training.pipeline, training.optimizer)
    assert checkpoints.steps() == (2, 10, 100)
    assert names_in(tmp_path) == ["step-00000002", "step-00000010", "step-00000100"]
    for step in checkpoints.steps():
        checkpoints.load(training.pipeline, training.optimizer, step=step)
        assert differences(state_of(training), states[step], limit=0) == {}


def test_wrong_names_and_shapes_are_named_and_change_nothing(
    tmp_path: Path,
) -> None:
    save_once(tmp_path)
    model = make_model(1)
    pipes = {
        "fewer": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        "other": make_model(1),
        "less": make_model(1),
    }
    pipes["other"].norm = nn.LayerNorm((3, 6)).double()
    pipes["less"].layers = nn.ModuleList(list(model.layers)[:6])  # type: ignore[arg-type]  # it is a list of modules
    messages = {}
    for name, other in pipes.items():
        pipe = (
            ps.split(other, at=[1])
            if name == "fewer"
            else ps.split(other, layers="layers", stages=2)
        )
        pipeline = ps.Pipeline(pipe, "1F1B", microbatches=4, loss=nn.functional.cross_entropy)
        before = whole_state(pipeline.state_dict())
        with pytest.raises(ps.errors.CheckpointError) as caught:
            ps.Checkpoints(tmp_path).load(pipeline)
        messages[name] = str(caught.value)
        assert differences(whole_state(pipeline.state_dict()), before, limit=0) == {}
    assert messages == {
        "fewer": "cannot load step 3: the checkpoint must have 0.weight of shape [2, 2] (it has "
        "'embed.weight', 'gain', 'layers.0.0.bias', 'layers.0.0.weight', 'layers.1.0.bias' and "
        "15 more); load it into the model that saved it; no other step",
        "other": "cannot load step 3: norm.weight must have the shape [6] that was saved (got "
        "[3, 6]); no other step",
        "less": "cannot load step 3: the model must have every name of the checkpoint (it lacks "
        "'layers.6.0.bias', 'layers.6.0.weight', 'layers.7.0.bias', 'layers.7.0.weight'; there "
        "are 20 parameters and buffers in it); no other step",
    }


@contextmanager
def files_up_to(length: int) -> Iterator[None]:
    """Let no file grow longer, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_write_is_raised_and_leaves_the_last_complete_step(
    tmp_path: Path,
) -> None:
    training = train_alone("1F1B", 2)
    checkpoints = ps.Checkpoints(tmp_path)
    checkpoints.save(1, training.pipeline, wait=True)
    checkpoints.save(2, training.pipeline)
    checkpoints.finish()
    with files_up_to(1000), pytest.raises(ps.errors.CheckpointError) as caught:
        checkpoints.save(3, training.pipeline, wait=True)
    assert str(caught.value) == (
        f"step 3 was not saved: rank 0: cannot write {tmp_path}/.penstock/step-00000003-"
        f"{job_in(tmp_path)}/__0_0.distcp: the file is longer than this system allows; raise the "
        "limit (ulimit -f); complete steps: [1, 2]"
    )
    # A save that fails frees its space at once, and the next one starts afresh.
    assert [name for name in names_in(tmp_path / ".penstock") if "step" in name] == []
    checkpoints.save(4, training.pipeline, wait=True)
    assert names_in(tmp_path) == ["step-00000002", "step-00000004"]


def test_invalid_saves_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    checkpoints = ps.Checkpoints(tmp_path)
    pipeline, optimizer = training.pipeline, training.optimizer
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))], lr=1.0)
    unsorted: Any = {"place": 1, 2: 3}
    cases: dict[str, Callable[[], None]] = {
        "data must be what JSON can hold: Object of type Tensor is not JSON serializable": (
            lambda: checkpoints.save(1, pipeline, data={"place": torch.zeros(1)})
        ),
        "data must be what JSON can hold: '<' not supported between instances of 'int' and "
        "'str'": (lambda: checkpoints.save(1, pipeline, data=unsorted)),
        "step must be 0 or more (got -1)": lambda: checkpoints.save(-1, pipeline),
        "the optimizer must hold parameters of the pipeline only (group 0 has another one of "
        "shape [2, 3]); make the optimizer for pipeline.parameters()": (
            lambda: checkpoints.save(1, pipeline, foreign)
        ),
    }
    for message, save in cases.items():
        with pytest.raises(ps.errors.CheckpointError) as caught:
            save()
        assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(5, pipeline, optimizer, wait=True)
    with pytest.raises(ps.errors.CheckpointError) as caught:
        checkpoints.save(5, pipeline, optimizer)
    assert str(caught.value) == (
        f"step 5 cannot be saved: step must be newer than the last step in {tmp_path} (got 5, "
        "last step 5); save to another folder, or remove the later steps from this one"
    )


def test_loading_an_optimizer_needs_one_in_the_checkpoint(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    checkpoints = ps.Checkpoints(tmp_path)
    checkpoints.save(1, training.pipeline, wait=True)
    with pytest.raises(ps.errors.CheckpointError) as caught:
        checkpoints.load(training.pipeline, training.optimizer)
    assert str(caught.value) == (
        "cannot load step 1: the checkpoint must have the state of an optimizer (it was saved "
        "without one); load it without the optimizer; no other step"
    )
    with pytest.raises(ps.errors.ArgumentError, match="keep must be at least 1"):
        ps.Checkpoints(tmp_path, keep=0)

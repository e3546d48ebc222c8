"""Lightning's Trainer with all ranks in this process: what is exact, and what is refused."""

import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from penstock.errors import ArgumentError, PipelineError
from penstock.integrations.layout import Layout


@pytest.fixture
def lit() -> Iterator[Any]:
    """Return the modules of these tests, loaded where they run, because that takes seconds."""
    with warnings.catch_warnings():
        # What Lightning says of loaders, loggers and its own use of torch.
        warnings.simplefilter("ignore")
        yield import_module("tests.integrations.lightning.modules")


# Gradients were reset before the step, as if the module did not decide about that. All parts of a
# model got its mode, so that a dropout dropped which was frozen in evaluation mode.
@pytest.mark.parametrize(
    "name", ["Fits", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Keeps", "Frozen"))]
)
def test_a_loss_beside_the_model_trains_it(lit: Any, name: str) -> None:
    kind = getattr(lit, name)
    torch.testing.assert_close(lit.trained_in_pipelines(kind), lit.trained_alone(kind))


def test_gradients_follow_what_a_step_makes_of_the_loss(lit: Any) -> None:
    found = lit.trained_in_pipelines(lit.Halves)
    torch.testing.assert_close(found, lit.trained_alone(lit.Halves))


@pytest.mark.slow
def test_predictions_are_those_of_the_model(lit: Any) -> None:
    module = lit.Fits()
    with torch.no_grad():
        expected = module.model(lit.ROWS)
    trainer = lit.make_trainer(lit.make_strategy(share_outputs=True))
    found = trainer.predict(module, lit.DataLoader(lit.ROWS, 4))
    torch.testing.assert_close(torch.cat(found), expected)
    with pytest.raises(PipelineError, match="give share_outputs=True"):
        lit.make_trainer().predict(lit.Fits(), lit.DataLoader(lit.ROWS, 4))


WORDS = {
    "manual": "Manual optimizes manually",
    "fp16": "does not scale gradients",
    "parameters elsewhere": r"the children \['model', 'head'\]",
    "a backward": "Own has a backward of its own",
    "LBFGS": "LBFGS computes with all parameters at once",
}


@pytest.mark.parametrize("name", WORDS)
def test_what_would_train_something_else_is_refused(lit: Any, name: str) -> None:
    kind, settings = lit.REFUSED[name]
    with pytest.raises(ArgumentError, match=WORDS[name]):
        lit.fit(lit.make_trainer(**settings), kind())


def test_a_missing_child_is_refused(lit: Any) -> None:
    with pytest.raises(ArgumentError, match=r"got 'net', and these have some: \['model'\]"):
        lit.fit(lit.make_trainer(lit.make_strategy(model="net")), lit.Fits())


@pytest.mark.slow
def test_clipping_is_by_the_norm_of_all_ranks_or_refused(lit: Any) -> None:
    # Each process has a part of the gradients, so that a module that clips by itself is wrong.
    with pytest.raises(PipelineError, match=r"call self\.clip_gradients in it"):
        lit.fit(lit.make_trainer(), lit.Clips())
    module = lit.Asks()
    lit.fit(lit.make_trainer(), module)
    assert module.norms == pytest.approx([0.01, 0.01], rel=1e-4)


@pytest.mark.slow
def test_a_trainer_may_fit_again_and_another_module(lit: Any) -> None:
    trainer, module = lit.make_trainer(), lit.Fits()
    lit.fit(trainer, module)
    first = trainer.strategy.pipeline
    trainer.fit_loop.max_epochs = 2
    lit.fit(trainer, module)
    assert trainer.strategy.pipeline is first
    trainer.fit_loop.max_epochs = 3
    lit.fit(trainer, lit.Fits())
    assert trainer.strategy.pipeline is not first


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_averages_of_a_part_are_not_saved(lit: Any, name: str) -> None:
    # The averages of the first process were saved as if they were those of the whole model.
    module = import_module("penstock.integrations.lightning.module")
    callbacks = import_module("lightning.pytorch.callbacks")
    given = {"swa_lrs": 0.1} if name.startswith("Stochastic") else {}
    trainer = lit.make_trainer(callbacks=[getattr(callbacks, name)(**given)])
    module.refuse_averages(trainer, Layout(2, 1, 0, None))
    mesh: Any = "of two processes"
    with pytest.raises(ArgumentError, match=f"{name} keeps averages on every process"):
        module.refuse_averages(trainer, Layout(2, 1, 0, mesh))

"""That a router's loss is one of microbatches is said once, at the split."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ModelError

LOGGER = "penstock.splitting.router_losses"


def model(**settings: object) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made.config = SimpleNamespace(**settings)  # type: ignore[assignment]  # as transformers has it
    return made


def said(given: nn.Module, caplog: pytest.LogCaptureFixture, **kwargs: object) -> list[str]:
    with caplog.at_level(logging.WARNING, LOGGER):
        if kwargs:
            with pytest.raises(ModelError):  # a Sequential takes no such input
                ps.split(given, stages=2, example=[torch.ones(1, 2)], example_kwargs=kwargs)
        else:
            ps.split(given, layers="", stages=2)
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_a_routers_loss_is_said_to_be_of_microbatches(caplog: pytest.LogCaptureFixture) -> None:
    # It was written in the pages alone, and a step's loss differed a little from the model's.
    experts = model(output_router_logits=True, router_aux_loss_coef=0.02)
    assert said(experts, caplog) == [
        "the loss of the model's routers (router_aux_loss_coef=0.02) is computed for each "
        "microbatch: with several, that of a step is their mean, as with gradient accumulation, "
        "and not that of the whole batch (set output_router_logits=False to train without it)"
    ]


def test_nothing_is_said_of_routers_without_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    assert said(model(output_router_logits=False, router_aux_loss_coef=0.02), caplog) == []
    assert said(model(output_router_logits=True, router_aux_loss_coef=0.0), caplog) == []
    assert said(model(), caplog) == []


def test_an_example_may_ask_for_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    experts = model(output_router_logits=False, router_aux_loss_coef=0.02)
    assert len(said(experts, caplog, output_router_logits=True)) == 1

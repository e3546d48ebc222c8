"""Memory for a model on the meta device must be filled before the first run."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import penstock as ps
from penstock.errors import ModelError, PipelineError
from penstock.splitting.materialize import give_memory, unfilled_names
from penstock.splitting.pipe import Pipe
from tests.splitting.zoo import SIZES

IDS = torch.arange(32).reshape(4, 8) % 19


class Rotary(nn.Module):
    """A module with a table that is not in checkpoints, and a counter that is."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) * 0.5, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.table
        return result


def nothing(_module: nn.Module) -> None:
    pass


def on_meta() -> Pipe:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    return ps.split(model, at=[1])


def state() -> dict[str, Any]:
    return dict(nn.Sequential(Rotary(), Rotary()).state_dict())


def test_unfilled_buffers_that_are_not_in_checkpoints_are_found_before_the_first_step() -> None:
    # They stayed whatever was in memory, and the numbers were garbage without an error.
    pipe = on_meta()
    pipe.materialize([0, 1], "cpu", nothing)
    for stage in pipe.stages:
        stage.load_state_dict({n: v for n, v in state().items() if n in stage.state_dict()})
    with pytest.raises(ModelError) as caught:
        pipe(torch.ones(2, 3))
    assert str(caught.value) == (
        "every tensor must be filled before the first step (never filled: 0.table); no checkpoint "
        "holds 0.table, so compute that in initialize, which materialize calls with every module"
    )
    pipeline = ps.Pipeline(pipe, "GPipe", microbatches=2, loss=lambda out: out.mean())
    with pytest.raises(PipelineError, match=r"never filled: 0\.table"):
        pipeline.step(torch.ones(2, 3))
    for index, stage in enumerate(pipe.stages):
        stage.get_buffer(f"{index}.table").copy_(torch.arange(3) * 0.5)
    pipeline.step(torch.ones(2, 3))
    assert pipe(torch.ones(2, 3)).isfinite().all()


def test_unfilled_parameters_and_saved_buffers_are_found() -> None:
    pipe = on_meta()
    pipe.materialize([0, 1], "cpu", nothing)
    with pytest.raises(
        ModelError, match=r"0\.linear\.weight, 0\.linear\.bias, 0\.table, 0\.count"
    ):
        pipe(torch.ones(2, 3))
    found = state()
    found.pop("0.linear.bias")
    pipe.stages[0].load_state_dict(found, strict=False)
    with pytest.raises(ModelError, match=r"never filled: 0\.linear\.bias, 0\.table\)"):
        pipe(torch.ones(2, 3))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool],
)
def test_partly_filled_tensors_are_found(dtype: torch.dtype) -> None:
    stage = nn.Module()
    stage.register_buffer("table", torch.empty(4, dtype=dtype, device="meta"))
    names = give_memory(stage, "cpu")
    table = stage.get_buffer("table")
    versions = {"table": table._version}
    assert unfilled_names(stage, names, versions) == ["table"]
    table[:3] = 0
    assert unfilled_names(stage, names, versions) == ([] if dtype is torch.bool else ["table"])
    table[3] = 0
    assert unfilled_names(stage, names, versions) == []


def test_real_tensors_of_a_model_on_meta_are_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Rotary(), Rotary())
    for module in model:
        module.table = torch.arange(3) * 0.5
    pipe = ps.split(model, at=[1])
    pipe.materialize([0, 1], "cpu", nothing)
    for stage in pipe.stages:
        stage.load_state_dict({n: v for n, v in state().items() if n in stage.state_dict()})
    assert pipe(torch.ones(2, 3)).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**SIZES, use_cache=False)),
        (
            hf.Gemma3ForCausalLM,
            lambda: hf.Gemma3TextConfig(
                **SIZES, num_key_value_heads=2, head_dim=8, use_cache=False
            ),
        ),
    ],
)
def test_models_of_transformers_compute_such_buffers(kind: Any, config: Any) -> None:
    torch.manual_seed(0)
    model = kind(config())
    with torch.device("meta"):
        empty = kind(config())
    pipe = ps.split(empty, layers="model.layers", stages=2)
    pipe.materialize([0, 1], "cpu", nothing)
    saved = model.state_dict()
    with pytest.raises(ModelError, match=r"never filled: model\.embed_tokens\.weight"):
        pipe(IDS)
    for stage in pipe.stages:
        stage.load_state_dict({name: saved[name] for name in stage.state_dict()})
    with torch.no_grad():
        assert torch.equal(pipe(IDS).logits, model(IDS).logits)

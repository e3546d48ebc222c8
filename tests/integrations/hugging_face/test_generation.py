"""A pipeline generates what the unsplit model does, token by token."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError
from penstock.integrations.hugging_face.generation import generate
from tests.processes import Processes
from tests.splitting.zoo import GROUPED, ZOO, hf

PROMPTS = torch.arange(20).reshape(4, 5) % 60
LENGTH = 64
# Prompts and what follows are longer than GPT-2 of the zoo is by default.
LLAMA_WITH_WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    if name == "Qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, **LLAMA_WITH_WINDOWS)).double()
    else:
        model = ZOO[name].build().model
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as they are initialized repeat one token for ever.
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.eval()


def make_pipeline(model: nn.Module, schedule: str, **settings: Any) -> ps.Pipeline:
    stages = 4 if schedule == "ZBV" else 2
    return ps.Pipeline(
        ps.split(model, stages=stages), schedule, microbatches=2, loss=ps.find_loss, **settings
    )


def expected_of(model: Any, length: int) -> torch.Tensor:
    # The sequences end by their length alone.
    found: torch.Tensor = model.generate(
        PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found


def generate_over_ranks(_rank: int, name: str, schedule: str) -> list[list[int]]:
    model = make_model(name)
    config = model.config
    with make_pipeline(model, schedule, group=dist.group.WORLD) as pipeline:
        found = generate(pipeline, config, PROMPTS, max_new_tokens=LENGTH)
    return [list(map(int, row)) for row in found]


@pytest.mark.parametrize(
    ("name", "schedule"), [("Llama", "ZBV"), ("GPT-2", "1F1B"), ("Qwen2", "1F1B")]
)
def test_two_ranks_generate_what_the_model_does(
    name: str, schedule: str, two_processes: Processes
) -> None:
    expected = expected_of(make_model(name), LENGTH)
    assert len(expected[:, 5:].unique()) > 8
    first, second = two_processes.run(generate_over_ranks, name, schedule)
    assert first == expected.tolist()
    assert second == first


def test_sequences_end_with_their_token_and_training_continues() -> None:
    model = make_model("Llama")
    free = expected_of(model, 12)
    end = int(free[0, 8])
    with make_pipeline(model, "1F1B") as pipeline:
        pipeline.train()
        found = generate(pipeline, model.config, PROMPTS, max_new_tokens=12, eos_token_id=end)
        assert all(module.training for module in pipeline.modules.values())
        assert pipeline.step(PROMPTS, labels=PROMPTS).loss is not None
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        length = whole.index(end, 5) + 1 if end in whole[5:] else len(row)
        assert row == (whole[:length] + [0] * len(row))[: len(row)]


def test_traced_stages_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = ps.split(model, stages=2, example=[torch.ones(4, 2)])
    with (
        ps.Pipeline(pipe, "1F1B", microbatches=2) as pipeline,
        pytest.raises(ArgumentError, match="must come from a split by layers"),
    ):
        generate(pipeline, None, PROMPTS, max_new_tokens=1)

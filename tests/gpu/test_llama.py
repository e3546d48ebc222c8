"""A Llama of Hugging Face by layers over NCCL: gradients, clipping and evaluation."""

import os
from copy import deepcopy
from typing import Any

# Said once and for all, before the library is loaded and looks.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import torch.distributed as dist
import transformers

import penstock as ps
from tests.gpu.problems import closing
from tests.models import differences
from tests.processes import Processes

pytestmark = pytest.mark.gpu

# Configurations take more than their types say.
hf: Any = transformers
WORDS, MOST = 64, 0.5
# Its norms are in single precision, whatever the rest is in.
LIMIT = 1e-5


def make_llama(device: torch.device, *, is_tied: bool) -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=is_tied,
    )
    return hf.LlamaForCausalLM(config).double().to(device)


def train_llama(
    rank: int, device: torch.device, family: str, stages: int, is_tied: bool
) -> dict[str, dict[str, float]]:
    """Three steps with clipping and an evaluation after each, the last ones on longer texts."""
    del rank
    model = make_llama(device, is_tied=is_tied)
    copy = deepcopy(model)
    pipe = ps.split(model, layers="model.layers", stages=stages)
    pipeline = ps.Pipeline(
        pipe, family, microbatches=4, loss=ps.find_loss, group=dist.group.WORLD, device=device
    )
    wrong: dict[str, dict[str, float]] = {}
    with closing(pipeline):
        optimizers = [torch.optim.SGD(of.parameters(), lr=0.1) for of in (pipeline, copy)]
        for step, length in enumerate([8, 8, 12]):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(WORDS, (8, length), generator=generator).to(device)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = pipeline.step(tokens, labels=tokens).loss
            expected = copy(tokens, labels=tokens).loss
            expected.backward()
            norm = pipeline.clip_grad_norm_(MOST)
            whole = torch.nn.utils.clip_grad_norm_(copy.parameters(), MOST)
            far = compare(pipeline, copy)
            for optimizer in optimizers:
                optimizer.step()
            evaluated = pipeline.evaluate(tokens, labels=tokens, return_outputs=False).loss
            with torch.no_grad():
                after = copy(tokens, labels=tokens).loss
            numbers = {
                "loss": (loss, expected.item()),
                "norm": (norm, whole.item()),
                "loss of evaluation": (evaluated, after.item()),
            }
            for name, (found, right) in numbers.items():
                if found is None or not abs(found - right) < LIMIT:
                    far[name] = float("nan") if found is None else found - right
            if far:
                wrong[f"step {step}"] = far
    return wrong


def compare(pipeline: ps.Pipeline, copy: Any) -> dict[str, float]:
    """Where this rank's gradients are not those of the unsplit model."""
    found = {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}
    whole = dict(copy.named_parameters())
    # A tied parameter may go by its other name.
    first = pipeline.shared_names
    expected = {n: whole[n if n in whole else first.get(n, n)].grad for n in found}
    assert len(found) == len(list(pipeline.parameters()))
    return differences(found, expected, LIMIT)


@pytest.mark.parametrize(
    ("family", "stages", "is_tied"),
    [("1F1B", 2, False), ("ZBV", 4, False), ("1F1B", 2, True), ("ZBV", 4, True)],
)
def test_a_llama_by_layers_trains_as_the_unsplit_model(
    two_ranks: Processes, accelerator: torch.device, family: str, stages: int, is_tied: bool
) -> None:
    # With ZBV the first step ended with "message truncated": activations and gradients of other
    # sizes had changed places.
    job = (accelerator, family, stages, is_tied)
    assert two_ranks.run(train_llama, *job, seconds=120.0) == [{}] * 2

"""A model of ten times what one rank may hold is loaded, trained and saved by ten ranks."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import penstock as ps
from penstock.integrations.pretrained import load_pretrained, save_pretrained
from tests.processes import Processes

RANKS = 10
WORDS = torch.arange(8).reshape(2, 4)


def make_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # untyped upstream


def peak_bytes(recorded: Any) -> int:
    """Return the most bytes of tensors that were there at once, by torch's own accounts."""
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def load_train_and_save(rank: int, start: Path, end: Path, layers: int) -> tuple[int, int]:
    """Return the bytes of this rank's parameters, and the most that it has held in all."""
    size = dist.get_world_size()
    with torch.device("meta"):
        model = make_model(layers)
    pipe = ps.split(model, stages=size)
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        pipe.materialize([rank], "cpu", lambda _module: None)
        pipeline = ps.Pipeline(
            pipe, "1F1B", microbatches=2, loss=ps.find_loss, group=dist.group.WORLD
        )
        load_pretrained(pipeline, start)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3, foreach=False)
        for _ in range(2):
            pipeline.step(WORDS, labels=WORDS)
            optimizer.step()
            optimizer.zero_grad()
        save_pretrained(pipeline, end, model=model, shard_bytes=500_000)
    beside = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = sum(p.numel() * p.element_size() for p in pipeline.parameters())
    pipeline.close()
    # The program itself and its messages take memory too, which is not counted.
    return share, peak_bytes(recorded) + max(0, beside - 2**23)


def check(processes: Processes, folder: Path, layers: int) -> None:
    model = make_model(layers)
    model.save_pretrained(folder / "start", max_shard_size="500KB")
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    job = load_train_and_save, folder / "start", folder / "end", layers
    found = processes.run(*job, seconds=400)
    for share, most in found:
        assert share <= whole / processes.num_ranks * 1.02
        # Parameters, gradients and both moments of the optimizer.
        assert 4 * share <= most <= 1.1 * 4 * share
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        torch.autograd.backward(model(WORDS, labels=WORDS).loss)
        optimizer.step()
        optimizer.zero_grad()
    saved: dict[str, torch.Tensor] = {}
    for file in (folder / "end").glob("*.safetensors"):
        saved |= load_file(file)
    assert saved.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_no_rank_holds_more_than_its_share_of_a_model_of_ten_budgets(tmp_path: Path) -> None:
    with Processes(RANKS) as processes:
        check(processes, tmp_path, 3 * RANKS)


@pytest.mark.slow
def test_no_rank_of_two_holds_more_than_its_share(
    tmp_path: Path, two_processes: Processes
) -> None:
    check(two_processes, tmp_path, 6)

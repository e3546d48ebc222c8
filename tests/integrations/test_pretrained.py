"""Folders of safetensors are written and read by all ranks, each its own part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

import penstock as ps
from penstock.errors import ModelError, PipelineError
from penstock.integrations.pretrained import load_pretrained, save_pretrained
from tests.forked import run_forked
from tests.processes import Processes
from tests.splitting.zoo import ZOO


def make_model() -> Any:
    return ZOO["Llama, tied head"].build().model


def make_pipeline(model: nn.Module, stages: int, schedule: str, **settings: Any) -> ps.Pipeline:
    pipe = ps.split(model, stages=stages)
    return ps.Pipeline(pipe, schedule, microbatches=4, loss=squares, reduction="mean", **settings)


def squares(output: Any, _target: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = output.logits.square().mean()
    return result


WORDS = torch.arange(32).reshape(4, 8) % 60


def train(pipeline: ps.Pipeline) -> None:
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(WORDS, target=torch.zeros(4))
    optimizer.step()


def trained_alone() -> dict[str, torch.Tensor]:
    model = make_model()
    loss = model(WORDS).logits.square().mean()
    torch.autograd.backward(loss)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def assert_same(found: Any, expected: dict[str, torch.Tensor], limit: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=limit, atol=limit)


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000])
def test_a_saved_folder_is_that_of_the_library(tmp_path: Path, shard_bytes: int) -> None:
    model = make_model()
    save_pretrained(
        make_pipeline(model, 2, "1F1B"), tmp_path, model=model, shard_bytes=shard_bytes
    )
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(again.state_dict(), model.state_dict(), limit=0)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.config.architectures == ["LlamaForCausalLM"]
    is_one = shard_bytes == 2**30
    assert (tmp_path / "model.safetensors").exists() is is_one
    assert (tmp_path / "model.safetensors.index.json").exists() is not is_one


@pytest.mark.parametrize("shard_bytes", ["5GB", "20KB"])
def test_a_folder_of_the_library_is_loaded(tmp_path: Path, shard_bytes: str) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size=shard_bytes)
    other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_pretrained(make_pipeline(other, 4, "ZBV"), tmp_path)
    assert_same(other.state_dict(), model.state_dict(), limit=0)


def load_train_and_save(rank: int, start: Path, end: Path) -> list[str]:
    """Read, train and write this rank's part of a model that never has memory as a whole."""
    with torch.device("meta"):
        model = make_model()
    pipe = ps.split(model, stages=2)
    pipe.materialize([rank], "cpu", lambda _module: None)
    pipeline = ps.Pipeline(
        pipe,
        "1F1B",
        microbatches=4,
        loss=squares,
        reduction="mean",
        group=dist.group.WORLD,
    )
    load_pretrained(pipeline, start)
    train(pipeline)
    save_pretrained(pipeline, end, model=model, shard_bytes=20_000)
    pipeline.close()
    return [name for name, tensor in pipe.stages[rank].named_parameters() if tensor.is_meta]


def test_ranks_load_train_and_save_a_model_that_none_has_whole(
    tmp_path: Path, two_processes: Processes
) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "start", max_shard_size="20KB")
    assert two_processes.run(load_train_and_save, tmp_path / "start", tmp_path / "end") == [[], []]
    again = type(model).from_pretrained(tmp_path / "end", dtype=torch.float64)
    assert_same(again.state_dict(), trained_alone())
    where = json.loads((tmp_path / "end" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in where["weight_map"]
    for file in set(where["weight_map"].values()):
        with safe_open(tmp_path / "end" / file, framework="pt") as stored:
            layers = {key.split(".")[2] for key in stored.keys() if ".layers." in key}  # noqa: SIM118  # not a dict
        assert not (layers & {"0", "1"} and layers & {"2", "3"})


def save_on_one_rank_only(rank: int, file: Path) -> str:
    pipeline = make_pipeline(make_model(), 2, "1F1B", group=dist.group.WORLD)
    with pytest.raises((OSError, PipelineError)) as caught:
        save_pretrained(pipeline, file if rank == 0 else file.parent / "fine")
    return type(caught.value).__name__


def test_files_of_an_earlier_save_hide_nothing(tmp_path: Path) -> None:
    # The library reads a whole file before it looks for shards, so it gave the old weights.
    model = make_model()
    pipeline = make_pipeline(model, 2, "1F1B")
    for shard_bytes in (2**30, 20_000, 60_000):
        train(pipeline)
        save_pretrained(pipeline, tmp_path, model=model, shard_bytes=shard_bytes)
        assert_same(type(model).from_pretrained(tmp_path).state_dict(), model.state_dict())
        stored = {file.name for file in tmp_path.glob("*.safetensors")}
        index = tmp_path / "model.safetensors.index.json"
        named = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
        assert stored == set(named or ["model.safetensors"])


def test_a_rank_that_cannot_save_fails_on_all(tmp_path: Path, two_processes: Processes) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert two_processes.run(save_on_one_rank_only, file) == ["FileExistsError", "PipelineError"]


def gather(rank: int) -> int:
    pipeline = make_pipeline(make_model(), 2, "1F1B", group=dist.group.WORLD)
    state = pipeline.full_state_dict(ranks=[0, 1])
    assert_same(state, make_model().state_dict(), limit=0)
    last = pipeline.full_state_dict(ranks=[1])
    with pytest.raises(PipelineError, match="every rank must name the same ranks"):
        pipeline.full_state_dict(ranks=[rank])
    return len(last)


def test_the_whole_state_is_gathered_on_the_ranks_that_are_named(
    two_processes: Processes,
) -> None:
    assert two_processes.run(gather) == [0, len(make_model().state_dict())]


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    pipeline = make_pipeline(make_model(), 2, "1F1B")
    with pytest.raises(ModelError, match=r"must have model.safetensors or model.safetensors.ind"):
        load_pretrained(pipeline, tmp_path)
    ZOO["GPT-2"].build().model.save_pretrained(tmp_path)  # type: ignore[operator]  # the library's method
    with pytest.raises(ModelError, match=r"missing: 'model.embed_tokens.weight'"):
        load_pretrained(pipeline, tmp_path)


@pytest.mark.parametrize(
    ("library", "statement", "by", "extra"),
    [
        (
            "safetensors",
            "import penstock.integrations.pretrained",
            "penstock.integrations.pretrained",
            "hugging-face",
        ),
        (
            "transformers",
            "from penstock.integrations.hugging_face import PipelineTrainer",
            "penstock.integrations.hugging_face",
            "hugging-face",
        ),
        (
            "accelerate",
            "from penstock.integrations.hugging_face import PipelineAccelerator",
            "penstock.integrations.hugging_face",
            "hugging-face",
        ),
        # transformers said of its Trainer that it could not be imported, and not why.
        pytest.param(
            "accelerate",
            "from penstock.integrations.hugging_face import PipelineTrainer",
            "penstock.integrations.hugging_face",
            "hugging-face",
            marks=pytest.mark.slow,
        ),
        (
            "transformers",
            "import penstock.integrations.hugging_face.generation",
            "penstock.integrations.hugging_face.generation",
            "hugging-face",
        ),
        (
            "torch",
            "from penstock.integrations.lightning import PipelineStrategy",
            "penstock.integrations.lightning",
            "torch",
        ),
        (
            "lightning",
            "from penstock.integrations.lightning import PipelineStrategy",
            "penstock.integrations.lightning",
            "lightning",
        ),
        (
            "lightning",
            "from penstock.integrations.lightning import PipelineFabricStrategy",
            "penstock.integrations.lightning",
            "lightning",
        ),
    ],
)
def test_a_missing_library_gives_one_line(
    library: str, statement: str, by: str, extra: str
) -> None:
    code = (
        f"import sys; sys.modules['{library}'] = None\n"
        f"try:\n    {statement}\n"
        "except ImportError as error:\n    print(type(error).__name__, error)"
    )
    found = run_forked(code)
    assert (found.returncode, found.stdout) == (
        0,
        f"MissingDependencyError {by} needs {library}, which is not installed; run "
        f"pip install 'penstock[{extra}]'\n",
    )

"""The task: the same model for every cut, and the same batches for every rank."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.tools.demo.task import Task, draw_batches, make_stages, make_task


@pytest.mark.parametrize("sizes", [(8,), (5, 3), (3, 2, 2, 1), (1,) * 8])
def test_model_is_the_same_for_every_cut(sizes: tuple[int, ...]) -> None:
    task = Task(ranks=2, steps=1)
    tokens = next(draw_batches(task, torch.device("cpu"))).tokens[:2]
    whole, stages = make_stages(task, (8,)), make_stages(task, sizes)
    assert [len(stage) for stage in stages if isinstance(stage, nn.Sequential)] == list(sizes)
    assert torch.equal(nn.Sequential(*stages)(tokens), whole[0](tokens))


def test_embedding_holds_more_than_a_layer_and_the_head_computes_more() -> None:
    embedding, layer, *_, head = make_stages(Task(ranks=2, steps=1), (1,) * 8)

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(embedding) > count(layer)
    # One multiplication per weight and word; neither has other large products.
    assert count(head) > count(layer)


def test_every_step_has_its_own_batch() -> None:
    task = Task(ranks=2, steps=3)
    batches = [batch.tokens for batch in draw_batches(task, torch.device("cpu"))]
    assert {tuple(tokens.shape) for tokens in batches} == {(task.rows, task.length)}
    assert len({tuple(tokens.flatten().tolist()) for tokens in batches}) == 3
    assert task.tokens_per_step == batches[0].numel()


@pytest.mark.parametrize("ranks", range(1, 9))
def test_as_many_ranks_as_pieces_can_train(ranks: int) -> None:
    assert make_task(ranks=ranks, steps=1).ranks == ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused_before_anything_starts() -> None:
    assert make_task(ranks=2, steps=3).device == "cpu"
    with pytest.raises(PipelineError, match="choose cpu"):
        make_task(ranks=2, steps=3, device="cuda")

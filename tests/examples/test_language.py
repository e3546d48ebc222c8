"""Lessons: what the demo trains. The training itself is tested with the demo."""

import pytest

pytest.importorskip("torch")

import torch

from penstock.errors import PipelineError
from penstock.examples.language import plan_lesson


@pytest.mark.parametrize(
    ("family", "ranks", "layers"),
    [("1F1B", 2, 4), ("ZBV", 2, 4), ("ZBV", 4, 8), ("DualPipe", 2, 4)],
)
def test_every_stage_has_a_layer(family: str, ranks: int, layers: int) -> None:
    lesson = plan_lesson(family, ranks=ranks, steps=3, device="cpu")
    assert lesson.layers == layers
    assert lesson.tokens_per_step == 2048
    assert lesson.schedule.num_ranks == ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_told_before_anything_starts() -> None:
    with pytest.raises(PipelineError, match="choose cpu"):
        plan_lesson("1F1B", ranks=2, steps=3, device="cuda")

"""Marks are calls in a model, or paths of its modules."""

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ModelError
from penstock.splitting.marks import SplitPoint, find_module, is_mark, mark_modules, pipe_split
from tests.splitting.traced_models import SIZE, Layers


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_mark_does_nothing_in_a_model_that_is_run() -> None:
    assert pipe_split() is None  # type: ignore[func-returns-value]  # that is the point
    with torch.no_grad():
        Layers(2)(torch.ones(1, SIZE))


def test_modules_are_marked_only_while_tracing() -> None:
    model = Layers(3)
    with mark_modules(model, {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.END}):
        assert hooks_of(model) == 2
        program = torch.export.export(model, (torch.ones(2, SIZE),), strict=False)
    assert hooks_of(model) == 0
    assert sum(is_mark(node) for node in program.graph.nodes) == 2


def test_marks_are_removed_if_one_of_them_is_wrong() -> None:
    model = Layers(3)
    wrong: Any = "before"
    for at in ({"layers.1": SplitPoint.END, "layers.9": SplitPoint.END}, {"layers.1": wrong}):
        with pytest.raises(ModelError), mark_modules(model, at):
            pass
        assert hooks_of(model) == 0


def test_an_unknown_path_is_refused_with_the_most_similar_one() -> None:
    model = Layers(3)
    assert find_module(model, "layers.1") is model.layers[1]
    with pytest.raises(ModelError, match=r"no module 'layer.1'; did you mean 'layers\.1'\?"):
        find_module(model, "layer.1")
    with pytest.raises(ModelError, match=r"no module 'encoder'$"):
        find_module(model, "encoder")

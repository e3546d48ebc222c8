"""The small models: any number of stages, the same numbers every time, the right shapes."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from penstock.errors import SizeError
from penstock.tools.verify.case import in_double
from penstock.tools.verify.gpt import Block, gpt_stages, next_token_loss
from penstock.tools.verify.models import MODELS, load_case


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_case_runs_unsplit(name: str, stages: int) -> None:
    case = load_case(name, stages, microbatches=3, rows=None)
    loss = case.loss(nn.Sequential(*case.stages)(*case.args), case.target)
    assert len(case.stages) == stages
    assert loss.dim() == 0
    assert len(case.args[0]) == len(case.target) == 6


@pytest.mark.parametrize("name", MODELS)
def test_case_is_the_same_every_time(name: str) -> None:
    one, other = (load_case(name, 2, microbatches=2, rows=5) for _ in range(2))
    assert torch.equal(one.args[0], other.args[0])
    for mine, theirs in zip(one.stages, other.stages, strict=True):
        assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


def test_double_copy_keeps_integer_tokens() -> None:
    case = load_case("gpt", 2, microbatches=2, rows=None)
    wide = in_double(case)
    assert {p.dtype for stage in wide.stages for p in stage.parameters()} == {torch.float64}
    assert {p.dtype for stage in case.stages for p in stage.parameters()} == {torch.float32}
    assert wide.args[0].dtype == wide.target.dtype == torch.int64


@pytest.mark.parametrize(("layers", "stages"), [(4, 2), (5, 2), (7, 3), (4, 4)])
def test_every_layer_is_in_one_stage_and_stages_are_nearly_equal(layers: int, stages: int) -> None:
    found = gpt_stages(stages, vocabulary=9, length=8, layers=layers)
    counts = [sum(isinstance(m, Block) for m in stage.modules()) for stage in found]
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1


def test_cut_does_not_change_the_model() -> None:
    tokens = torch.randint(9, (2, 8))
    losses = []
    for stages in (1, 2, 4):
        torch.manual_seed(0)
        model = nn.Sequential(*gpt_stages(stages, vocabulary=9, length=8, layers=4))
        losses.append(next_token_loss(model(tokens), tokens).item())
    assert losses[0] == losses[1] == losses[2]


def test_no_token_sees_those_that_follow() -> None:
    model = nn.Sequential(*gpt_stages(2, vocabulary=9, length=8))
    tokens = torch.randint(9, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 9
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(SizeError, match=r"at least the number of stages, 4 \(got 3\)"):
        gpt_stages(4, vocabulary=9, length=8, layers=3)

"""A weight that two stages use, on different ranks and on one, in processes and in one process."""

from copy import deepcopy
from dataclasses import dataclass
from math import isclose
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import BatchError, ModelError, PipelineError
from penstock.training.shared_parameters import SharedParameter, declared_ties, find_ties
from tests.covering import all_but_slow
from tests.models import cut, differences, gradients_of, make_blocks, mean_loss
from tests.processes import Processes

TOKENS, WIDTH = 11, 16
MICROBATCHES = 4
STEPS = 5


class Reuse(nn.Module):
    """Uses the embedding's weight a second time."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (hidden @ self.weight.T).softmax(-1) @ self.weight


def make_tied_stages(num_stages: int, second: int) -> list[nn.Module]:
    """Return the embedding in stage 0, its second use at the end of stage `second`."""
    embedding = nn.Embedding(TOKENS, WIDTH).double()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        embedding.weight.normal_(generator=generator)
    stages: list[nn.Module] = [*cut(make_blocks(num_stages), num_stages)]
    stages[second] = nn.Sequential(stages[second], Reuse(embedding.weight))
    stages[0] = nn.Sequential(embedding, stages[0])
    return stages


def make_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (8, 3), generator=generator)
    return tokens, torch.randn(8, 3, WIDTH, generator=generator, dtype=torch.float64)


@dataclass
class Outcome:
    """What a rank saw: norms, the tied weight after every step, and where it was wrong."""

    norms: list[float]
    weights: list[torch.Tensor]
    differences: list[dict[str, float]]


def train(rank: int, schedule: ps.Schedule, second: int, with_group: bool = True) -> Outcome:
    """Optimizer steps of two pipeline steps each, beside the unsplit model."""
    del rank
    stages = make_tied_stages(schedule.num_stages, second)
    whole = deepcopy(nn.Sequential(*stages))
    pipeline = ps.Pipeline(
        stages,
        schedule,
        microbatches=schedule.microbatches,
        loss=mean_loss,
        group=dist.group.WORLD if with_group else None,
    )
    ours = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    theirs = torch.optim.Adam(whole.parameters(), lr=0.01)
    outcome = Outcome([], [], [])
    for step in range(STEPS):
        for half in range(2):
            tokens, target = make_tokens(2 * step + half)
            pipeline.step(tokens, target=target)
            torch.autograd.backward(mean_loss(whole(tokens), target))
        norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        found = pipeline.clip_grad_norm_(0.5)
        outcome.norms.append(found if isclose(found, norm, rel_tol=1e-10) else float("nan"))
        outcome.differences.append(_differences(pipeline, whole))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        weights = [p for p in pipeline.parameters() if p.shape == (TOKENS, WIDTH)]
        outcome.weights += [weight.detach().clone() for weight in weights]
    return outcome


def _differences(pipeline: ps.Pipeline, whole: nn.Module) -> dict[str, float]:
    expected = gradients_of(whole.named_parameters(remove_duplicate=False))
    own = gradients_of(pipeline.named_parameters())
    return differences(own, {name: expected[name] for name in own}, limit=1e-10)


TIED = [
    ("1F1B", 4, 3, (0, 3)),
    ("Interleaved1F1B", 4, 7, (0, 3)),
    ("ZBV", 4, 4, (0, 3)),
    ("ZBV", 4, 7, (0,)),
]


@pytest.mark.parametrize(
    ("family", "ranks", "second", "holders"), all_but_slow(TIED, [TIED[0], TIED[3]])
)
def test_a_tied_weight_is_bit_equal_on_its_ranks_after_every_optimizer_step(
    family: str, ranks: int, second: int, holders: tuple[int, ...], four_processes: Processes
) -> None:
    schedule = ps.build(family, ranks=ranks, microbatches=MICROBATCHES)
    outcomes: list[Outcome] = four_processes.run(train, schedule, second)
    assert [outcome.differences for outcome in outcomes] == [[{}] * STEPS] * ranks
    assert [outcome.norms for outcome in outcomes] == [outcomes[0].norms] * ranks
    assert [len(outcome.weights) for outcome in outcomes] == [
        STEPS if rank in holders else 0 for rank in range(ranks)
    ]
    for rank in holders:
        pairs = zip(outcomes[0].weights, outcomes[rank].weights, strict=True)
        assert all(torch.equal(first, other) for first, other in pairs)


@pytest.mark.parametrize(("family", "second"), [("1F1B", 3), ("Interleaved1F1B", 7), ("ZBV", 4)])
def test_a_tied_weight_has_the_sum_of_its_gradients_in_one_process(
    family: str, second: int
) -> None:
    schedule = ps.build(family, ranks=4, microbatches=MICROBATCHES)
    outcome = train(0, schedule, second, with_group=False)
    assert outcome.differences == [{}] * STEPS
    assert all(norm > 0 for norm in outcome.norms)


def test_ties_are_parameters_that_stages_of_several_ranks_share() -> None:
    schedule = ps.build("1F1B", ranks=4, microbatches=1)
    stages = make_tied_stages(4, 3)
    embedding = next(stages[0].parameters())
    assert find_ties(stages, schedule.placement) == [SharedParameter(embedding, (0, 3))]


def test_a_parameter_that_only_one_rank_uses_is_not_tied() -> None:
    schedule = ps.build("ZBV", ranks=2, microbatches=2)
    assert find_ties(make_tied_stages(4, 3), schedule.placement) == []


class Refuse(nn.Module):
    """Fails while it is asked to."""

    is_refusing = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_refusing:
            raise ValueError("refused")
        return hidden


def fail_with_gradients(rank: int) -> float:
    del rank
    stages = make_tied_stages(2, 1)
    pipeline = ps.Pipeline(
        [stages[0], nn.Sequential(stages[1], Refuse())],
        "1F1B",
        microbatches=2,
        loss=mean_loss,
        group=dist.group.WORLD,
    )
    weight = next(p for p in pipeline.parameters() if p.shape == (TOKENS, WIDTH))
    weight.grad = torch.full_like(weight, 3.0)
    tokens, target = make_tokens(0)
    with pytest.raises(PipelineError, match="refused"):
        pipeline.step(tokens, target=target)
    return float(weight.grad.max())


def test_failed_step_restores_the_gradient_of_a_tied_weight(
    two_processes: Processes,
) -> None:
    assert two_processes.run(fail_with_gradients) == [3.0, 3.0]


def train_with_declared_tie(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train with a separate weight on each rank, tied by name only."""
    stages = make_tied_stages(2, 1)
    own = {rank: deepcopy(stages[rank])}
    name = {0: "0.0.weight", 1: "1.1.weight"}
    pipe = ps.Pipeline(
        own,
        "1F1B",
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        ties=[(name[0], name[1])],
    )
    tokens, target = make_tokens(0)
    pipe.step(tokens, target=target)
    found = dict(pipe.named_parameters())[name[rank]].grad
    model = nn.Sequential(*make_tied_stages(2, 1))
    torch.autograd.backward(mean_loss(model(tokens), target))
    expected = dict(model.named_parameters())[name[0]].grad
    assert found is not None
    assert expected is not None
    return found, expected


def test_a_tie_declared_by_name_has_the_sum_of_the_gradients(two_processes: Processes) -> None:
    (first, expected), (second, _) = two_processes.run(train_with_declared_tie)
    assert torch.equal(first, second)
    assert torch.allclose(first, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("0.a", "x.b"),
            "a tied name must begin with the number of its stage, below 2 (got 'x.b'); write it "
            "as in '0.embedding.weight'",
        ),
        (
            ("0.a", "7.b"),
            "a tied name must begin with the number of its stage, below 2 (got '7.b'); write it "
            "as in '0.embedding.weight'",
        ),
        (
            ("0.c", "1.b"),
            "ties must name parameters of the stages (rank 0 has no '0.c'); names are stage, dot, "
            "name in the stage",
        ),
        (
            ("0.a", "0.b", "1.b"),
            "tied names must be one parameter within a rank (rank 0 has two: '0.a' and '0.b'); "
            "assign one to the other before building the pipeline",
        ),
    ],
)
def test_invalid_tie_is_refused(names: tuple[str, ...], message: str) -> None:
    parameters = {name: nn.Parameter(torch.zeros(1)) for name in ("0.a", "0.b")}
    with pytest.raises(ModelError) as caught:
        declared_ties([names], parameters, ps.Placement.loop(2), 0)
    assert str(caught.value) == message


def train_with_overlapping_ties(_: int) -> dict[str, float]:
    """Stage 1 shares one weight with the stage before it and another with the one after."""
    torch.manual_seed(0)
    first, second, third, fourth, last = (
        nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(5)
    )
    first.weight, fourth.weight = second.weight, third.weight
    stages = [first, nn.Sequential(second, third), fourth, last]
    batch, target = torch.randn(2, 4, 3, dtype=torch.float64)
    whole = deepcopy(nn.Sequential(*stages))
    torch.autograd.backward(mean_loss(whole(batch), target))
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss, group=dist.group.WORLD)
    pipeline.step(batch, target=target)
    expected = gradients_of(whole.named_parameters(remove_duplicate=False))
    found = gradients_of(pipeline.named_parameters())
    return differences(found, {name: expected[name] for name in found})


def test_a_rank_may_share_weights_with_two_others(four_processes: Processes) -> None:
    # Groups were named by how many a rank has made, which differs between members of two ties:
    # ranks 0 and 1 met, then ranks 1 and 2 waited for each other under different names.
    assert four_processes.run(train_with_overlapping_ties) == [{}] * 4


def edit_tied_weights(rank: int, edit: str) -> list[Any]:
    """Run a step, change something about the tied weight, run another; what became of its grad."""
    torch.manual_seed(0)
    shared, unused = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.shared, self.unused = nn.Linear(4, 4).double(), shared, unused

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.shared(self.own(x))
            return result

    stages = [Stage(), Stage()]
    pipeline = ps.Pipeline(
        stages, "1F1B", microbatches=2, loss=nn.functional.mse_loss, group=dist.group.WORLD
    )
    x = torch.ones(4, 4, dtype=torch.float64)
    pipeline.step(x, target=2 * x)
    assert shared.weight.grad is not None
    before = shared.weight.grad.clone()
    if edit == "freeze":
        shared.requires_grad_(False)
        pipeline.step(x, target=2 * x)
        return [torch.equal(shared.weight.grad, before)]
    if edit == "unused":
        return [unused.weight.grad is None]
    if edit == "freeze on one rank":
        shared.requires_grad_(rank == 0)
        with pytest.raises(BatchError, match=r"frozen on rank 1, trained on rank 0"):
            pipeline.step(x, target=2 * x)
        return [True]
    for stage in stages:
        stage.shared.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    with pytest.raises(BatchError, match=r"'[01]\.shared\.weight' is shared with another rank"):
        pipeline.step(x, target=2 * x)
    return [True]


@pytest.mark.parametrize("edit", ["freeze", "unused", "replace", "freeze on one rank"])
def test_tied_weights_may_be_frozen_and_unused_but_not_replaced(
    two_processes: Processes, edit: str
) -> None:
    # Freezing lost what the gradient held, a weight that no rank used got zeros, and one that was
    # replaced after the build had only this rank's part of its gradient. One that was frozen on
    # one rank alone made the others wait for ever.
    assert two_processes.run(edit_tied_weights, edit) == [[True], [True]]


def test_a_shared_parameter_without_a_shape_is_refused() -> None:
    stage = nn.LazyLinear(4)
    with pytest.raises(ModelError, match="call the model once"):
        find_ties([stage, stage], ps.Placement.loop(2))

"""Gradients of a step in one process: those of the unsplit model, under every order of work."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.ir.graph import build_graph
from tests.covering import all_but_slow
from tests.models import (
    WIDTH,
    copy_blocks,
    differences,
    gradients_of,
    make_batch,
    make_blocks,
    make_stages,
    mean_loss,
    run_reference,
    sum_loss,
)
from tests.strategies import FAMILY_NAMES, dag_schedules, examples, schedules

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
BLOCKS = make_blocks()
BATCH, TARGET = make_batch()
# What a family's smallest size is, where it is not one rank and one microbatch.
LEAST = {"DualPipe": (2, 2)}
SIZES = [
    (family, ranks, microbatches)
    for family in TRAINING_FAMILIES
    for ranks in (1, 2, 4)
    for microbatches in (1, 2, 3, 4, 5, 7, 8)
]


def exists(family: str, ranks: int, microbatches: int) -> bool:
    least_ranks, least_microbatches = LEAST.get(family, (1, 1))
    return ranks >= least_ranks and microbatches >= least_microbatches


def make_pipeline(
    family: str, ranks: int, microbatches: int, **settings: Any
) -> tuple[ps.Pipeline, nn.Sequential]:
    """Return a pipeline over fresh blocks, and the same blocks as one model."""
    blocks = copy_blocks(BLOCKS)
    stages = make_stages(family, ranks, blocks)
    settings = {"loss": mean_loss, **settings}
    pipeline = ps.Pipeline(stages, family, ranks=ranks, microbatches=microbatches, **settings)
    return pipeline, nn.Sequential(*blocks)


@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"),
    all_but_slow(
        [size for size in SIZES if exists(*size)],
        [size for size in SIZES if size[2] not in (3, 7)],
    ),
)
def test_gradients_and_loss_equal_those_of_the_unsplit_model(
    family: str, ranks: int, microbatches: int
) -> None:
    pipeline, model = make_pipeline(family, ranks, microbatches)
    result = pipeline.step(BATCH, target=TARGET)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)
    assert result.outputs is None
    assert result.timeline is None


@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"), [size for size in SIZES if not exists(*size)]
)
def test_sizes_that_a_family_does_not_have_are_refused_at_build(
    family: str, ranks: int, microbatches: int
) -> None:
    with pytest.raises(ps.errors.SizeError):
        make_pipeline(family, ranks, microbatches)


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_gradients_are_added_to_what_was_there_before(family: str) -> None:
    pipeline, model = make_pipeline(family, 2, 4)
    expected = run_reference(BLOCKS, BATCH, TARGET).gradients
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
        expected[name] += 0.25
    pipeline.step(BATCH, target=TARGET)
    assert differences(gradients_of(model.named_parameters()), expected) == {}


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_several_steps_before_the_optimizer_sum_their_gradients(family: str) -> None:
    pipeline, model = make_pipeline(family, 4, 4)
    batches = [make_batch(rows, seed=rows) for rows in (16, 10, 7)]
    for batch, target in batches:
        pipeline.step(batch, target=target)
    references = [run_reference(BLOCKS, batch, target).gradients for batch, target in batches]
    expected = {
        name: sum((r[name] for r in references), torch.zeros(())) for name in references[0]
    }
    assert differences(gradients_of(model.named_parameters()), expected) == {}


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_twenty_steps_of_sgd_on_four_ranks_end_at_the_same_parameters(family: str) -> None:
    pipeline, model = make_pipeline(family, 4, 5)
    plain = nn.Sequential(*copy_blocks(BLOCKS))
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (pipeline.parameters(), plain.parameters())]
    for number in range(20):
        batch, target = make_batch(seed=number)
        pipeline.step(batch, target=target)
        torch.autograd.backward(mean_loss(plain(batch), target))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert differences(model.state_dict(), plain.state_dict()) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_sum_of_losses_is_exact(family: str) -> None:
    pipeline, model = make_pipeline(family, 2, 3, loss=sum_loss, reduction="sum")
    result = pipeline.step(BATCH, target=TARGET)
    expected = run_reference(BLOCKS, BATCH, TARGET, sum_loss)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


# How many of eight tokens in a row are valid, one row per microbatch.
def make_tokens(valid: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    batch = torch.randn(len(valid), 8, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(WIDTH, (len(valid), 8), generator=generator)
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return batch, labels


def token_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def count_valid(labels: torch.Tensor) -> float:
    return float((labels != -100).sum())


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_mean_over_tokens_is_exact_with_one_to_seven_valid_ones_per_microbatch(
    family: str,
) -> None:
    batch, labels = make_tokens([1, 2, 3, 4, 5, 6, 7])
    pipeline, model = make_pipeline(family, 2, 7, loss=token_loss, reduction=count_valid)
    result = pipeline.step(batch, target=labels)
    expected = run_reference(BLOCKS, batch, labels, token_loss)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_sum_over_tokens_divided_by_the_global_count_is_exact(family: str) -> None:
    batch, labels = make_tokens([1, 2, 3, 4, 5, 6, 7])
    total = count_valid(labels)

    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = output.flatten(0, 1), labels.flatten()
        return functional.cross_entropy(*flat, reduction="sum") / total

    pipeline, model = make_pipeline(family, 2, 7, loss=loss, reduction="sum")
    result = pipeline.step(batch, target=labels)
    expected = run_reference(BLOCKS, batch, labels, token_loss)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_microbatch_without_a_valid_token_counts_for_nothing(family: str) -> None:
    batch, labels = make_tokens([3, 0, 5, 1])
    pipeline, model = make_pipeline(family, 2, 4, loss=token_loss, reduction=count_valid)
    result = pipeline.step(batch, target=labels)
    expected = run_reference(BLOCKS, batch, labels, token_loss)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_batch_that_does_not_divide_evenly_is_weighed_by_its_rows(family: str) -> None:
    pipeline, model = make_pipeline(family, 2, 4)
    batch, target = make_batch(10)
    result = pipeline.step(batch, target=target)
    expected = run_reference(BLOCKS, batch, target)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


@pytest.mark.parametrize("family", [name for name in TRAINING_FAMILIES if name not in LEAST])
def test_last_batch_of_one_row_runs_as_one_microbatch(family: str) -> None:
    pipeline, model = make_pipeline(family, 2, 4)
    batch, target = make_batch(1)
    result = pipeline.step(batch, target=target)
    expected = run_reference(BLOCKS, batch, target)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


def test_gradient_scale_multiplies_the_gradients_and_not_the_loss() -> None:
    pipeline, model = make_pipeline("ZBV", 2, 4)
    result = pipeline.step(BATCH, target=TARGET, gradient_scale=1024.0)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    scaled = {name: gradient * 1024 for name, gradient in expected.gradients.items()}
    assert differences(gradients_of(model.named_parameters()), scaled, limit=1e-9) == {}
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)


def shuffle(schedule: ps.Schedule, random: Random) -> ps.Schedule:
    """Draw an order of the same work that keeps all waits: weight work may come late."""
    rows, graph = schedule.rows, build_graph(schedule)
    needs = {
        row: set(graph.need[graph.first[row] : graph.first[row + 1]].tolist())
        for row in range(len(rows))
    }
    orders: list[list[ps.Action]] = [[] for _ in range(schedule.num_ranks)]
    done: set[int] = set()
    while needs:
        row = random.choice([row for row, before in needs.items() if before <= done])
        orders[rows.rank(row)].append(rows.action(row))
        done.add(row)
        del needs[row]
    return ps.Schedule.from_orders(orders, dataflow=schedule.dataflow)


def has_backwards(schedule: ps.Schedule) -> bool:
    return not schedule.is_forward_only


class Join(nn.Module):
    """One linear layer over the sum of all that comes in."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.layer.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(sum(values[1:], values[0])))


def run_dag(parts: Sequence[nn.Module], flow: ps.Dataflow, batch: torch.Tensor) -> torch.Tensor:
    """Return the unsplit model: every part once, each over what its producers gave."""
    outputs: list[torch.Tensor] = []
    for part in range(flow.num_parts):
        producers = flow.producers(part)
        outputs.append(parts[part](*([outputs[p] for p in producers] or [batch])))
    return outputs[-1]


def assert_exact(schedule: ps.Schedule) -> None:
    """Run a schedule with one small layer per part, and compare with the unsplit model."""
    flow = schedule.dataflow
    parts, twins = ([Join(part) for part in range(flow.num_parts)] for _ in range(2))
    batch, target = make_batch(schedule.microbatches + 1, width=4)
    pipeline = ps.Pipeline(
        [parts[part] for part in flow.parts],
        schedule,
        microbatches=schedule.microbatches,
        loss=mean_loss,
    )
    result = pipeline.step(batch, target=target)
    loss = mean_loss(run_dag(twins, flow, batch), target)
    torch.autograd.backward(loss)
    found, expected = (
        gradients_of(nn.ModuleList(modules).named_parameters()) for modules in (parts, twins)
    )
    assert differences(found, expected) == {}
    assert result.loss == pytest.approx(loss.item(), abs=1e-12)


@settings(max_examples=examples(80))
@given(schedules(max_ranks=4, max_microbatches=6).filter(has_backwards), st.randoms())
def test_any_order_that_keeps_the_waits_gives_exact_gradients(
    schedule: ps.Schedule, random: Random
) -> None:
    shuffled = shuffle(ps.passes.split_backward(schedule), random)
    ps.check(shuffled)
    assert_exact(shuffled)


@settings(max_examples=examples(80))
@given(dag_schedules(max_ranks=4, max_microbatches=5).filter(has_backwards), st.randoms())
def test_any_order_over_skips_gives_exact_gradients(schedule: ps.Schedule, random: Random) -> None:
    shuffled = shuffle(ps.passes.split_backward(schedule), random)
    ps.check(shuffled)
    assert_exact(shuffled)


@settings(max_examples=examples(40))
@given(schedules(max_ranks=4, max_microbatches=6).filter(has_backwards))
def test_family_in_any_size_gives_exact_gradients(schedule: ps.Schedule) -> None:
    assert_exact(schedule)


def test_weight_work_may_wait_until_the_end_of_the_step() -> None:
    schedule = ps.Schedule.from_orders(
        [
            ["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"],
            ["1F0", "1I0", "1F1", "1I1", "1W1", "1W0"],
        ]
    )
    assert_exact(schedule)


def test_schedule_that_lists_its_communication_runs_unchanged() -> None:
    schedule = ps.lower(ps.build("ZBV", ranks=2, microbatches=4), receives="late")
    assert_exact(schedule)


def test_stages_may_lie_on_any_rank() -> None:
    schedule = ps.Schedule.from_orders(
        [
            ["1F0", "2F0", "2B0", "1B0"],
            ["0F0", "3F0", "3B0", "0B0"],
        ]
    )
    assert schedule.placement == ps.Placement((1, 0, 0, 1))
    assert_exact(schedule)


def test_schedule_given_for_more_microbatches_runs_with_fewer() -> None:
    schedule = ps.build("Interleaved1F1B", ranks=2, microbatches=8)
    blocks = copy_blocks(BLOCKS)
    pipeline = ps.Pipeline(
        make_stages("Interleaved1F1B", 2, blocks), schedule, microbatches=8, loss=mean_loss
    )
    batch, target = make_batch(3)
    pipeline.step(batch, target=target)
    expected = run_reference(BLOCKS, batch, target)
    found = gradients_of(nn.Sequential(*blocks).named_parameters())
    assert differences(found, expected.gradients) == {}


def test_names_of_families_are_taken_in_any_spelling() -> None:
    pipeline, model = make_pipeline("schedulezbvzerobubble", 2, 4)
    pipeline.step(BATCH, target=TARGET)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert differences(gradients_of(model.named_parameters()), expected.gradients) == {}
    assert pipeline.schedule == ps.build("ZBV", ranks=2, microbatches=4)

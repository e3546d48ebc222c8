"""Training in real processes over gloo: what holds in one process holds between them.

Each job of a test runs on every rank; what the ranks return is compared here, with the unsplit
model and with one another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import penstock as ps
from penstock.measuring.live_memory import LiveMemory
from tests.covering import all_but_slow
from tests.models import (
    WIDTH,
    differences,
    gradients_of,
    make_batch,
    make_blocks,
    make_stages,
    mean_loss,
    run_reference,
)
from tests.processes import JobFailedError, Processes
from tests.strategies import FAMILY_NAMES
from tests.tables import orders_of, read_schedule
from tests.training.test_pipeline import (
    LENGTHS,
    BreakInBackward,
    BreakInForward,
    Masked,
    Scaled,
    make_ready,
    ready_reference,
)

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
Gradients = dict[str, torch.Tensor]


class Trainer:
    """A pipeline over all processes, with its blocks as one model."""

    def __init__(self, family: str, microbatches: int = 4, **settings: Any) -> None:
        blocks = make_blocks()
        self.model = nn.Sequential(*blocks)
        group = settings.pop("group", dist.group.WORLD)
        size = group.size() if group is not None else 1
        stages = make_stages(family, size, blocks)
        settings = {"loss": mean_loss, **settings}
        self.pipeline = ps.Pipeline(
            stages, family, microbatches=microbatches, group=group, **settings
        )

    def gradients(self) -> Gradients:
        """Return this rank's gradients by the names of the model; they are taken away."""
        found = gradients_of(self.model.named_parameters())
        self.model.zero_grad()
        return found


def assert_reference(
    everyone: Sequence[Gradients], expected: Gradients, *, is_shared: bool = False
) -> None:
    """Assert that every parameter has its gradient on one rank, or on all that share it."""
    names = [name for gradients in everyone for name in gradients]
    assert is_shared or len(names) == len(set(names))
    assert set(names) == set(expected)
    for gradients in everyone:
        assert differences(gradients, {name: expected[name] for name in gradients}) == {}


# ---- gradients, over families and numbers of microbatches


def train_families(
    rank: int, families: Sequence[str], counts: Sequence[int]
) -> dict[tuple[str, int], list[tuple[float | None, Gradients]]]:
    """Two steps each: the first gives every rank only what it needs, the second everything."""
    batch, target = make_batch()
    results = {}
    for family in families:
        for count in counts:
            trainer = Trainer(family, count)
            flow, own = trainer.pipeline.schedule.dataflow, trainer.pipeline.modules
            args = (batch,) if any(not flow.producers(stage) for stage in own) else ()
            is_last = any(not flow.consumers(stage) for stage in own)
            first = trainer.pipeline.step(*args, target=target if is_last else None)
            after_first = first.loss, trainer.gradients()
            second = trainer.pipeline.step(batch, target=target)
            results[family, count] = [after_first, (second.loss, trainer.gradients())]
    del rank
    return results


def assert_families(
    processes: Processes, families: Sequence[str], counts: Sequence[int], *, is_shared: bool
) -> None:
    everyone = processes.run(train_families, families, counts, seconds=120)
    expected = run_reference(make_blocks(), *make_batch())
    for case in everyone[0]:
        for step in range(2):
            losses = [rank[case][step][0] for rank in everyone]
            assert losses == [pytest.approx(expected.loss, abs=1e-12)] * len(everyone), case
            gradients = [rank[case][step][1] for rank in everyone]
            assert_reference(gradients, expected.gradients, is_shared=is_shared)


WITHOUT_COPIES = [name for name in TRAINING_FAMILIES if name != "DualPipe"]


@pytest.mark.slow
def test_every_family_on_two_ranks_has_the_gradients_of_the_unsplit_model(
    two_processes: Processes,
) -> None:
    assert_families(two_processes, WITHOUT_COPIES, [1, 3, 8], is_shared=False)


@pytest.mark.parametrize("count", [7, pytest.param(2, marks=pytest.mark.slow)])
def test_every_family_on_four_ranks_has_the_gradients_of_the_unsplit_model(
    count: int, four_processes: Processes
) -> None:
    assert_families(four_processes, WITHOUT_COPIES, [count], is_shared=False)


def test_dualpipe_has_the_gradients_of_the_unsplit_model_on_both_ranks_of_a_part(
    two_processes: Processes, four_processes: Processes
) -> None:
    assert_families(two_processes, ["DualPipe"], [2, 5, 8], is_shared=True)
    assert_families(four_processes, ["DualPipe"], [4, 7], is_shared=True)


@pytest.mark.slow
def test_every_family_and_number_of_microbatches_on_two_and_four_ranks(
    two_processes: Processes, four_processes: Processes
) -> None:
    for processes in (two_processes, four_processes):
        counts = [1, 2, 3, 4, 5, 7, 8]
        assert_families(processes, WITHOUT_COPIES, counts, is_shared=False)


def train_with_sgd(rank: int, family: str) -> Gradients:
    """Twenty steps; the parameters that this rank holds."""
    del rank
    trainer = Trainer(family, 5)
    optimizer = torch.optim.SGD(trainer.pipeline.parameters(), lr=0.1)
    for number in range(20):
        batch, target = make_batch(rows=17 if number % 2 else 10, seed=number)
        trainer.pipeline.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()
    own = {id(parameter) for parameter in trainer.pipeline.parameters()}
    named = trainer.model.named_parameters()
    return {name: parameter.detach() for name, parameter in named if id(parameter) in own}


@pytest.mark.parametrize("family", all_but_slow(["1F1B", "ZBV"], ["ZBV"]))
def test_twenty_steps_of_sgd_on_four_ranks_end_at_the_same_parameters(
    family: str, four_processes: Processes
) -> None:
    plain = nn.Sequential(*make_blocks())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(20):
        batch, target = make_batch(rows=17 if number % 2 else 10, seed=number)
        torch.autograd.backward(mean_loss(plain(batch), target))
        optimizer.step()
        optimizer.zero_grad()
    assert_reference(four_processes.run(train_with_sgd, family), dict(plain.state_dict()))


# ---- groups that are not the whole world


def train_in_subgroup(rank: int, members: Sequence[int]) -> tuple[float | None, Gradients] | None:
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    assert isinstance(group, dist.ProcessGroup)
    trainer = Trainer("ZBV", group=group)
    loss = trainer.pipeline.step(*make_batch()[:1], target=make_batch()[1]).loss
    return loss, trainer.gradients()


@pytest.mark.parametrize("members", [[1, 3], [3, 1], [0, 2], [2, 3]])
def test_pipeline_may_span_any_ranks_of_the_world(
    members: list[int], four_processes: Processes
) -> None:
    everyone = four_processes.run(train_in_subgroup, members)
    expected = run_reference(make_blocks(), *make_batch())
    inside = [everyone[rank] for rank in sorted(members)]
    assert [everyone[rank] for rank in range(4) if rank not in members] == [None, None]
    assert [loss for loss, _ in inside] == [pytest.approx(expected.loss, abs=1e-12)] * 2
    assert_reference([gradients for _, gradients in inside], expected.gradients)


def train_on_mesh(rank: int, dimension: str) -> tuple[float | None, Gradients]:
    """Two pipelines side by side, each over one dimension of a mesh, on batches of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    blocks = make_blocks()
    pipeline = ps.Pipeline(
        make_stages("Interleaved1F1B", 2, blocks),
        "Interleaved1F1B",
        microbatches=4,
        loss=mean_loss,
        group=mesh[dimension],
    )
    other = rank // 2 if dimension == "inner" else rank % 2
    batch, target = make_batch(seed=other)
    loss = pipeline.step(batch, target=target).loss
    return loss, gradients_of(nn.Sequential(*blocks).named_parameters())


@pytest.mark.parametrize(
    ("dimension", "pairs"), [("inner", [(0, 1), (2, 3)]), ("outer", [(0, 2), (1, 3)])]
)
def test_pipeline_may_span_a_dimension_of_a_device_mesh(
    dimension: str, pairs: list[tuple[int, int]], four_processes: Processes
) -> None:
    everyone = four_processes.run(train_on_mesh, dimension)
    for number, pair in enumerate(pairs):
        expected = run_reference(make_blocks(), *make_batch(seed=number))
        assert [everyone[r][0] for r in pair] == [pytest.approx(expected.loss, abs=1e-12)] * 2
        assert_reference([everyone[rank][1] for rank in pair], expected.gradients)


def train_with_own_modules(rank: int) -> Gradients:
    """Train with just the stages that each rank holds."""
    stages = make_stages("ZBV", 2, make_blocks())
    own = {0: [0, 3], 1: [1, 2]}[rank]
    pipeline = ps.Pipeline(
        {stage: stages[stage] for stage in own},
        "ZBV",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    return gradients_of(pipeline.named_parameters())


def test_rank_may_hold_only_the_modules_of_its_own_stages(two_processes: Processes) -> None:
    expected = run_reference(make_blocks(), *make_batch()).gradients
    # Two blocks to a stage: block 5 of the model is block 1 of stage 2.
    by_stage = {
        f"{int(name[0]) // 2}.{int(name[0]) % 2}{name[1:]}": gradient
        for name, gradient in expected.items()
    }
    assert_reference(two_processes.run(train_with_own_modules), by_stage)


# ---- shapes


def train_with_changing_shapes(rank: int, families: Sequence[str]) -> dict[str, list[Gradients]]:
    del rank
    results: dict[str, list[Gradients]] = {}
    for family in families:
        trainer = Trainer(family, reduction=torch.Tensor.numel)
        results[family] = []
        for number, lengths in enumerate([LENGTHS, LENGTHS[::-1], [1, 2, 3, 4], LENGTHS]):
            batch, target = make_ready(lengths, number)
            trainer.pipeline.step(batch, target=target)
            results[family].append(trainer.gradients())
    return results


def test_shapes_may_change_with_every_microbatch_and_every_step(
    two_processes: Processes, four_processes: Processes
) -> None:
    for processes, families in ((two_processes, TRAINING_FAMILIES), (four_processes, ["ZBV"])):
        everyone = processes.run(train_with_changing_shapes, families)
        for number, lengths in enumerate([LENGTHS, LENGTHS[::-1], [1, 2, 3, 4], LENGTHS]):
            expected = ready_reference(*make_ready(lengths, number))
            for family in families:
                gradients = [rank[family][number] for rank in everyone]
                assert_reference(gradients, expected, is_shared=family == "DualPipe")


def count_sends(work: Callable[[], object]) -> int:
    """Return the messages that gloo sends meanwhile, headers and tensors alike."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        work()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None
    return sum(event.name() == "gloo:send" for event in results.events())


def count_messages(rank: int, family: str) -> tuple[int, list[int], list[int]]:
    """Sends in the schedule of this rank; in the first steps; in steps that alternate."""
    trainer = Trainer(family)
    batch, target = make_batch()
    train = partial(trainer.pipeline.step, batch, target=target)
    evaluate = partial(trainer.pipeline.evaluate, batch, microbatches=2)
    lowered = ps.lower(trainer.pipeline.schedule)
    kinds = [action.kind for action in lowered.order(rank) if isinstance(action, ps.Action)]
    sends = kinds.count(ps.Kind.SEND_F) + kinds.count(ps.Kind.SEND_B)
    steady = [count_sends(train) for _ in range(3)]
    alternating = [count_sends(work) for _ in range(3) for work in (train, evaluate)]
    return sends, steady, alternating


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_headers_are_sent_only_with_the_first_batch_of_a_form(
    family: str, two_processes: Processes
) -> None:
    for rank, (sends, steady, alternating) in enumerate(two_processes.run(count_messages, family)):
        # A header is two messages: its length, and its text. Rank 1 sends activations in ZBV too.
        evaluated = {("1F1B", 0): 2, ("1F1B", 1): 0, ("ZBV", 0): 2, ("ZBV", 1): 2}[family, rank]
        headers = 2 * 2 * evaluated
        assert steady == [sends + headers, sends, sends]
        assert alternating == [
            *(sends, 3 * evaluated),
            *(sends, evaluated),
            *(sends, evaluated),
        ]


def count_many_steps(rank: int) -> tuple[int, int]:
    del rank
    trainer = Trainer("ZBV")
    batch, target = make_batch()
    step = partial(trainer.pipeline.step, batch, target=target)
    step()
    return count_sends(step), count_sends(lambda: [step() for _ in range(20)])


def test_steady_steps_send_no_header(two_processes: Processes) -> None:
    assert two_processes.run(count_many_steps) == [(8, 160), (8, 160)]


def freeze_between_steps(rank: int, family: str) -> list[Gradients]:
    """Gradients with all blocks trained, with the first two frozen, and with all trained again."""
    del rank
    trainer = Trainer(family)
    batch, target = make_batch()
    results = []
    for is_trained in (True, False, True):
        for block in (trainer.model[0], trainer.model[1]):
            block.requires_grad_(is_trained)
        trainer.pipeline.step(batch, target=target)
        results.append(trainer.gradients())
    return results


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
def test_stage_may_be_frozen_and_trained_again_between_steps(
    family: str, two_processes: Processes
) -> None:
    # What a stage sends needs a gradient or not, and the receiver must know, with no new shapes.
    everyone = two_processes.run(freeze_between_steps, family)
    whole = run_reference(make_blocks(), *make_batch()).gradients
    rest = {name: gradient for name, gradient in whole.items() if name[0] not in "01"}
    for step, expected in enumerate([whole, rest, whole]):
        assert_reference([results[step] for results in everyone], expected)


def cast_between_steps(rank: int) -> list[str]:
    """Return the dtype that the second stage gets: without autocast, with it, without it again."""
    seen: list[str] = []
    stages = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    stages[1].register_forward_pre_hook(lambda _, args: seen.append(str(args[0].dtype)))
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=1, loss=mean_loss, group=dist.group.WORLD)
    batch = torch.ones(2, WIDTH)
    for is_cast in (False, True, False):
        with torch.autocast("cpu", enabled=is_cast):
            pipeline.step(batch, target=batch)
    return seen if rank == 1 else []


def test_autocast_may_be_switched_between_steps(two_processes: Processes) -> None:
    seen = ["torch.float32", "torch.bfloat16", "torch.float32"]
    assert two_processes.run(cast_between_steps) == [[], seen]


class KeepPositive(nn.Module):
    """Keeps only the rows whose sum is positive: the shape depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value[value.sum(1) > 0] * self.scale


def change_form_with_the_numbers(rank: int) -> list[str]:
    """Three steps with as many rows each, of which the second has other numbers."""
    del rank
    pipeline = ps.Pipeline(
        [KeepPositive(), nn.Linear(WIDTH, WIDTH).double()],
        "1F1B",
        microbatches=2,
        loss=lambda output, _: output.mean(),
        group=dist.group.WORLD,
    )
    ends = []
    for batch in (torch.ones(4, WIDTH), torch.eye(4, WIDTH) - 0.1, torch.eye(4, WIDTH) - 0.1):
        try:
            pipeline.step(batch.double(), target=batch)
            ends.append("ended well")
        except ps.errors.PipelineError as error:
            ends.append(str(error).partition(" (")[0].partition(": Format")[0])
    return ends


def test_form_that_changes_with_the_numbers_fails_one_step_and_is_learned_in_the_next(
    two_processes: Processes,
) -> None:
    message = (
        "rank 0, stage 0, microbatch 0, 0SEND_F0: BoundaryError: what edge 0 carries has changed "
        "its form, though the batch has not"
    )
    expected = ["ended well", message, "ended well"]
    assert two_processes.run(change_form_with_the_numbers) == [expected, expected]


# ---- arguments


def train_with_keywords(rank: int) -> Gradients:
    blocks = make_blocks()[:4]
    stages = [Masked(blocks[0]), Scaled(blocks[1]), Masked(blocks[2]), Scaled(blocks[3])]
    pipeline = ps.Pipeline(stages, "ZBV", microbatches=3, loss=mean_loss, group=dist.group.WORLD)
    batch, target = make_batch()
    mask = torch.arange(16 * WIDTH).reshape(16, WIDTH) % 3 / 2
    keywords: dict[str, Any] = {
        "mask": mask,
        "bias": ps.Shared(torch.arange(float(WIDTH))),
        "scale": 0.5,
    }
    pipeline.step(batch, target=target, **keywords)
    del rank
    return gradients_of(pipeline.named_parameters())


def test_every_rank_may_pass_keywords_masks_and_labels(two_processes: Processes) -> None:
    blocks = make_blocks()[:4]
    stages = [Masked(blocks[0]), Scaled(blocks[1]), Masked(blocks[2]), Scaled(blocks[3])]
    value, target = make_batch()
    mask = torch.arange(16 * WIDTH).reshape(16, WIDTH) % 3 / 2
    for stage in stages:
        masked = {"mask": mask, "bias": torch.arange(float(WIDTH))}
        value = stage(value, **(masked if isinstance(stage, Masked) else {"scale": 0.5}))
    torch.autograd.backward(mean_loss(value, target))
    expected = gradients_of(nn.ModuleList(stages).named_parameters())
    assert_reference(two_processes.run(train_with_keywords), expected)


def refuse_batches(rank: int, family: str) -> tuple[list[str], Gradients]:
    """Return the message of every refusal, and the gradients of the step after them."""
    trainer = Trainer(family)
    step, evaluate = trainer.pipeline.step, trainer.pipeline.evaluate
    batch, target = make_batch()
    half = [batch, batch[:8]][rank % 2]
    unknown: dict[str, Any] = {"colour": 3} if rank == 1 else {}
    wrong: list[Callable[[], object]] = [
        lambda: step(batch, target=None if rank else target),
        lambda: step(*((batch,) if rank else ()), target=target),
        lambda: step(batch, target=target[:8] if rank == 1 else target),
        lambda: step(half, target=target[: len(half)]),
        lambda: step(batch, target=target, **unknown),
        lambda: step(batch, target=target) if rank else evaluate(batch, target=target),
        lambda: step({"a": batch, "b": batch[rank:]}, target=target),
    ]
    messages = []
    for call in wrong:
        with pytest.raises(ps.errors.BatchError) as caught:
            call()
        messages.append(str(caught.value))
    assert trainer.gradients() == {}
    step(batch, target=target)
    return messages, trainer.gradients()


def test_batch_that_does_not_fit_is_refused_on_every_rank(two_processes: Processes) -> None:
    everyone = two_processes.run(refuse_batches, "1F1B")
    message = [
        "rank 1 must be given a target (it holds the last stage 1)",
        "rank 0 must be given a batch (it holds the first stage 0)",
        "rank 1: all arguments that are split must have the same number of rows (argument 0 has "
        "16, target has 8); wrap what is not split by rows in Shared, Along or Ready",
        "all arguments that are split must have the same number of rows (rank 0: argument 0 has "
        "16, rank 1: argument 0 has 8); wrap what is not split by rows in Shared, Along or Ready",
        "keywords must be taken by some stage's forward (rank 1 passes 'colour'); leave it out",
        "all ranks must call the same method (rank 0 calls evaluate, rank 1 calls step)",
        "rank 1: tensors of shapes (16, 16) and (15, 16) would be split together, but have 16 and "
        "15 rows; wrap what is not split by rows in Shared or Along",
    ]
    assert [messages for messages, _ in everyone] == [message, message]
    expected = run_reference(make_blocks(), *make_batch()).gradients
    assert_reference([gradients for _, gradients in everyone], expected)


def build_with_different_schedules(rank: int) -> list[str]:
    messages = []
    wrong: list[Callable[[], object]] = [
        lambda: Trainer("1F1B" if rank else "GPipe"),
        lambda: Trainer("1F1B", 4 + rank),
        lambda: Trainer("1F1B", loss=mean_loss if rank else None),
    ]
    for call in wrong:
        with pytest.raises(ps.errors.PipelineError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_ranks_that_differ_in_what_they_run_are_refused_on_every_rank(
    two_processes: Processes,
) -> None:
    sizes = "for 2 stages on 2 ranks"
    messages = [
        f"the ranks do not agree: rank 0 has schedule GPipe {sizes}, 4 microbatches, "
        f"rank 1 has 1F1B {sizes}, 4 microbatches; give all ranks the same",
        "the ranks do not agree: rank 0 has microbatches 4, rank 1 has 5 (and they differ in "
        "schedule); give all ranks the same",
        "the ranks do not agree: rank 0 has loss none, rank 1 has given; give all ranks the same",
    ]
    assert two_processes.run(build_with_different_schedules) == [messages, messages]


# ---- evaluation


def evaluate_between(rank: int, family: str) -> tuple[list[float | None], list[Any], Gradients]:
    """Losses, outputs and last gradients of: train, evaluate twice, train."""
    del rank
    trainer = Trainer(family)
    batch, target = make_batch()
    trainer.pipeline.step(batch, target=target)
    trainer.gradients()
    results = [
        trainer.pipeline.evaluate(batch, microbatches=3),
        trainer.pipeline.evaluate(batch, target=target, microbatches=8),
        trainer.pipeline.step(batch, target=target, return_outputs=True),
    ]
    return [r.loss for r in results], [r.outputs for r in results], trainer.gradients()


@pytest.mark.parametrize(("family", "last_rank"), [("1F1B", 1), ("ZBV", 0)])
def test_evaluation_gives_outputs_in_order_and_changes_no_training(
    family: str, last_rank: int, two_processes: Processes
) -> None:
    everyone = two_processes.run(evaluate_between, family)
    expected = run_reference(make_blocks(), *make_batch())
    loss = pytest.approx(expected.loss, abs=1e-12)
    assert [losses for losses, _, _ in everyone] == [[None, loss, loss]] * 2
    assert everyone[1 - last_rank][1] == [None] * 3
    for outputs in everyone[last_rank][1]:
        assert differences({"": outputs}, {"": expected.output}) == {}
    assert_reference([gradients for *_, gradients in everyone], expected.gradients)


# ---- errors


def break_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if torch.equal(target, make_batch()[1][12:]):
        raise ValueError("broken on purpose")
    return mean_loss(output, target)


def count_or_fail(target: torch.Tensor) -> float:
    if torch.equal(target, make_batch()[1][12:]):
        raise ValueError("broken on purpose")
    return len(target)


# How to break a step: in a forward, in a backward, in a loss, in the counting of a target.
BREAKS = ("F", "B", "loss", "count")


def break_step(rank: int, family: str, kind: str, steps_before: int) -> tuple[str, str, Gradients]:
    """Return the error of a broken step, its cause, and the gradients of the step after it."""
    blocks = make_blocks()
    model = nn.Sequential(*blocks)
    stages = make_stages(family, dist.get_world_size(), blocks)
    call = 4 + 4 * steps_before
    if kind in ("F", "B"):
        stages[2] = (BreakInForward if kind == "F" else BreakInBackward)(stages[2], call)
    pipeline = ps.Pipeline(
        stages,
        family,
        microbatches=4,
        loss=break_loss if kind == "loss" else mean_loss,
        reduction=count_or_fail if kind == "count" else "mean",
        group=dist.group.WORLD,
    )
    batch, target = make_batch()
    harmless = make_batch(seed=2)[1] if kind in ("loss", "count") else target
    # Only who holds the last stage counts targets; two that fail at once would both be right.
    is_last = rank == pipeline.schedule.placement.rank_of_stage[-1]
    for _ in range(steps_before):
        pipeline.step(batch, target=harmless if is_last else None)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(batch, target=target if is_last else None)
    model.zero_grad()
    pipeline.step(batch, target=harmless if is_last else None)
    cause = repr(caught.value.__cause__)
    return str(caught.value), cause, gradients_of(model.named_parameters())


def assert_breaks(processes: Processes, family: str, kind: str, place: str) -> None:
    for steps_before in (0, 2):
        everyone = processes.run(break_step, family, kind, steps_before)
        message = f"{place}: ValueError: broken on purpose"
        assert [error.splitlines()[0] for error, _, _ in everyone] == [message] * len(everyone)
        broken = int(place.removeprefix("rank ")[0])
        for rank, (error, cause, _) in enumerate(everyone):
            if rank == broken:
                assert cause == "ValueError('broken on purpose')"
            else:
                opening, _, trace = error.partition("\n\nas reported by that rank:\n")
                assert opening == message
                assert trace.startswith("Traceback (most recent call last):\n")
                assert trace.endswith(
                    '    raise ValueError("broken on purpose")\nValueError: broken on purpose\n'
                )
        batch, target = make_batch()
        target = make_batch(seed=2)[1] if kind in ("loss", "count") else target
        expected = run_reference(make_blocks(), batch, target).gradients
        assert_reference([gradients for *_, gradients in everyone], expected)


@pytest.mark.parametrize(
    ("family", "kind", "place"),
    [
        ("Interleaved1F1B", "F", "rank 0, stage 2, microbatch 3, 2F3"),
        ("Interleaved1F1B", "B", "rank 0, stage 2, microbatch 3, 2B3"),
        ("1F1B", "loss", "rank 1, stage 1, microbatch 3, 1F3"),
        ("1F1B", "count", "rank 1"),
        ("ZBV", "F", "rank 1, stage 2, microbatch 3, 2F3"),
        ("ZBV", "B", "rank 1, stage 2, microbatch 3, 2I3"),
        ("ZBV", "loss", "rank 0, stage 3, microbatch 3, 3F3"),
        ("ZBV", "count", "rank 0"),
    ],
)
def test_error_reaches_both_ranks_with_its_place_and_the_pipeline_works_again(
    family: str, kind: str, place: str, two_processes: Processes
) -> None:
    assert_breaks(two_processes, family, kind, place)


@pytest.mark.parametrize(
    ("family", "kind", "place"),
    all_but_slow(
        [
            ("1F1B", "F", "rank 2, stage 2, microbatch 3, 2F3"),
            ("1F1B", "B", "rank 2, stage 2, microbatch 3, 2B3"),
            ("1F1B", "loss", "rank 3, stage 3, microbatch 3, 3F3"),
            ("ZBV", "F", "rank 2, stage 2, microbatch 3, 2F3"),
            ("ZBV", "B", "rank 2, stage 2, microbatch 3, 2I3"),
            ("ZBV", "loss", "rank 0, stage 7, microbatch 3, 7F3"),
        ],
        [
            ("1F1B", "F", "rank 2, stage 2, microbatch 3, 2F3"),
            ("ZBV", "B", "rank 2, stage 2, microbatch 3, 2I3"),
        ],
    ),
)
def test_error_reaches_all_four_ranks_with_its_place_and_the_pipeline_works_again(
    family: str, kind: str, place: str, four_processes: Processes
) -> None:
    assert_breaks(four_processes, family, kind, place)


# ---- recording


def record_step(rank: int, family: str) -> tuple[Any, ...]:
    del rank
    trainer = Trainer(family)
    batch, target = make_batch()
    trainer.pipeline.step(batch, target=target)
    timeline = trainer.pipeline.step(batch, target=target, record=True).timeline
    assert timeline is not None
    expected = ps.lower(trainer.pipeline.schedule)
    assert orders_of(timeline.schedule) == orders_of(expected)
    return timeline.start.tolist(), timeline.end.tolist(), timeline.memory.tolist()


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_every_rank_gets_the_same_timeline_with_the_rows_of_all(
    family: str, two_processes: Processes
) -> None:
    mine, theirs = two_processes.run(record_step, family)
    assert mine == theirs
    start, end, _ = mine
    schedule = ps.lower(ps.build(family, ranks=2, microbatches=4))
    assert len(start) == len(schedule.rows)
    assert min(start) == 0.0
    assert all(a <= b for a, b in zip(start, end, strict=True))
    for rank in range(2):
        own = start[schedule.rows.first[rank] : schedule.rows.first[rank + 1]]
        assert own == sorted(own)


def record_on_one_rank(rank: int) -> str:
    trainer = Trainer("1F1B")
    batch, target = make_batch()
    with pytest.raises(ps.errors.PipelineError) as caught:
        trainer.pipeline.step(batch, target=target, record=rank == 0)
    trainer.pipeline.step(batch, target=target)
    return str(caught.value)


def test_step_that_only_some_ranks_record_is_refused(two_processes: Processes) -> None:
    message = (
        "all ranks must record a step, or none (rank 0 does, rank 1 does not); give record alike"
    )
    assert two_processes.run(record_on_one_rank) == [message, message]


# ---- memory


def measure_memory(rank: int, family: str, microbatches: int) -> tuple[int, int]:
    """Peak bytes of a steady step; the bytes that are alive after it beside the gradients."""
    peaks: list[int] = []

    def measure(_: ps.Action, work: Callable[[], None]) -> None:
        work()
        peaks.append(memory.bytes())

    batch, target = make_batch(4 * microbatches)
    trainer = Trainer(
        family, microbatches, options=ps.RunOptions(around=dict.fromkeys(ps.Kind, measure))
    )
    with LiveMemory() as memory:
        # Outputs are kept in the first two steps, to compare their loss with that of all together.
        for _ in range(3):
            peaks.clear()
            trainer.pipeline.step(batch, target=target)
    del rank
    gradients = [p.grad.nbytes for p in trainer.model.parameters() if p.grad is not None]
    return max(peaks), memory.bytes() - sum(gradients)


@pytest.mark.parametrize("family", all_but_slow(["1F1B", "ZBV"], ["ZBV"]))
def test_peak_memory_of_a_process_does_not_grow_with_the_number_of_microbatches(
    family: str, two_processes: Processes
) -> None:
    few, many = (two_processes.run(measure_memory, family, count) for count in (8, 32))
    one_activation = 4 * WIDTH * 8
    for rank in range(2):
        assert abs(many[rank][0] - few[rank][0]) <= one_activation
        # Gloo holds on to the small message with which the ranks ended the step.
        assert few[rank][1] <= 64
        assert many[rank][1] <= 64


# ---- the processes themselves


LAST_COMES_FIRST = """
    0F0 0SEND_F0 0F3 0F1 0SEND_F1 0F2 0SEND_F2 0SEND_F3 0RECV_B3 0B3 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2
    1RECV_F0 1RECV_F1 1RECV_F2 1RECV_F3 1F3 1B3 1SEND_B3 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2
"""  # noqa: E501  # one line per rank


def break_before_what_is_taken(_: int) -> tuple[str, Gradients]:
    """Return the error of a step in which two messages fail before the first that is needed."""
    blocks = make_blocks()
    model = nn.Sequential(*blocks)
    first, second = make_stages("1F1B", 2, blocks)
    pipeline = ps.Pipeline(
        [BreakInForward(first, 3), second],
        read_schedule(LAST_COMES_FIRST),
        loss=mean_loss,
        group=dist.group.WORLD,
    )
    batch, target = make_batch()
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(batch, target=target)
    model.zero_grad()
    pipeline.step(batch, target=target)
    return str(caught.value).splitlines()[0], gradients_of(model.named_parameters())


def test_failed_message_does_not_delay_the_one_after_it(
    two_processes: Processes,
) -> None:
    # Letting go of a message stopped at an older one that had failed, and never came to the one
    # that was meant: it stayed unread, and its sender waited for that until it was given up.
    everyone = two_processes.run(break_before_what_is_taken)
    message = "rank 0, stage 0, microbatch 1, 0F1: ValueError: broken on purpose"
    assert [error for error, _ in everyone] == [message] * 2
    expected = run_reference(make_blocks(), *make_batch()).gradients
    assert_reference([gradients for _, gradients in everyone], expected)


def fail_on_one_rank(rank: int) -> None:
    if rank == 1:
        raise ValueError("only here")


def name_rank(rank: int) -> int:
    return rank


@pytest.mark.slow  # it starts processes of its own
def test_job_that_fails_shows_the_traceback_of_its_rank_and_the_next_one_runs() -> None:
    with Processes(2) as processes:
        with pytest.raises(JobFailedError, match=r"(?s)rank 0.*rank 1: Traceback.*only here"):
            processes.run(fail_on_one_rank)
        assert processes.run(name_rank) == [0, 1]

"""The user's object, with every rank in one process: arguments, evaluation, errors, recording."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import penstock as ps
from penstock.view.text.timeline import plain_timeline
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
)
from tests.strategies import FAMILY_NAMES
from tests.tables import orders_of

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]
BLOCKS = make_blocks()
BATCH, TARGET = make_batch()
LENGTHS = [5, 17, 3, 11]


def make_pipeline(
    family: str = "1F1B", *, ranks: int = 2, microbatches: int = 4, **settings: Any
) -> ps.Pipeline:
    settings = {"loss": mean_loss, **settings}
    stages = make_stages(family, ranks, copy_blocks(BLOCKS))
    return ps.Pipeline(stages, family, ranks=ranks, microbatches=microbatches, **settings)


def make_ready(lengths: list[int], seed: int) -> tuple[ps.Ready, ps.Ready]:
    """Return one item of two rows per length, and its target."""
    generator = torch.Generator().manual_seed(seed)
    items = [
        torch.randn(2, 2, length, WIDTH, generator=generator, dtype=torch.float64)
        for length in lengths
    ]
    return ps.Ready([item[0] for item in items]), ps.Ready([item[1] for item in items])


def ready_reference(batch: ps.Ready, target: ps.Ready) -> dict[str, torch.Tensor]:
    """Return the mean over all numbers of the batch, on the unsplit model."""
    model = nn.Sequential(*copy_blocks(BLOCKS))
    total = sum(item.numel() for item in target.items)
    for item, wanted in zip(batch.items, target.items, strict=True):
        torch.autograd.backward(mean_loss(model(item), wanted) * (wanted.numel() / total))
    return gradients_of(model.named_parameters())


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_shapes_may_change_with_every_microbatch_and_every_step(family: str) -> None:
    blocks = copy_blocks(BLOCKS)
    pipeline = ps.Pipeline(
        make_stages(family, 2, blocks),
        family,
        ranks=2,
        microbatches=4,
        loss=mean_loss,
        reduction=torch.Tensor.numel,
    )
    for number, lengths in enumerate([LENGTHS, LENGTHS[::-1], [1, 2, 3, 4], LENGTHS]):
        batch, target = make_ready(lengths, number)
        pipeline.step(batch, target=target)
        found = gradients_of(nn.Sequential(*blocks).named_parameters())
        assert differences(found, ready_reference(batch, target)) == {}
        nn.Sequential(*blocks).zero_grad()


def test_ready_microbatches_set_how_many_a_step_has() -> None:
    blocks = copy_blocks(BLOCKS)
    pipeline = ps.Pipeline(make_stages("1F1B", 2, blocks), "1F1B", microbatches=4, loss=mean_loss)
    pipeline.step(ps.Ready([BATCH[:8], BATCH[8:]]), target=ps.Ready([TARGET[:8], TARGET[8:]]))
    found = gradients_of(nn.Sequential(*blocks).named_parameters())
    assert differences(found, run_reference(BLOCKS, BATCH, TARGET).gradients) == {}


class Masked(nn.Module):
    """Takes a mask, and a scale that only some stages take."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(
        self, value: torch.Tensor, mask: torch.Tensor, *, bias: torch.Tensor
    ) -> torch.Tensor:
        output: torch.Tensor = self.block(value) * mask + bias
        return output


class Scaled(nn.Module):
    """Takes a scale only."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, value: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = self.block(value) * scale
        return output


@pytest.mark.parametrize("family", ["1F1B", "Interleaved1F1B", "ZBV"])
def test_keywords_go_to_the_stages_that_take_them_row_by_row(family: str) -> None:
    stages = [Masked(BLOCKS[0]), Scaled(BLOCKS[1]), Masked(BLOCKS[2]), Scaled(BLOCKS[3])]
    twins = deepcopy(stages)
    mask = torch.arange(16 * WIDTH).reshape(16, WIDTH) % 3 / 2
    bias = torch.arange(float(WIDTH))
    pipeline = ps.Pipeline(deepcopy(stages), family, microbatches=3, loss=mean_loss)
    pipeline.step(BATCH, target=TARGET, mask=mask, bias=ps.Shared(bias), scale=0.5)
    value = BATCH
    for stage in twins:
        keywords = {"mask": mask, "bias": bias} if isinstance(stage, Masked) else {"scale": 0.5}
        value = stage(value, **keywords)
    torch.autograd.backward(mean_loss(value, TARGET))
    expected = gradients_of(nn.ModuleList(twins).named_parameters())
    assert differences(gradients_of(pipeline.named_parameters()), expected) == {}


def test_first_stage_may_take_keywords_only() -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * self.scale

    pipeline = ps.Pipeline([Embed(), BLOCKS[0]], "1F1B", microbatches=2, loss=mean_loss)
    outputs = pipeline.evaluate(hidden=BATCH).outputs
    assert differences({"": outputs}, {"": BLOCKS[0](BATCH).detach()}) == {}


class Pair(nn.Module):
    """Takes two inputs and gives two outputs."""

    def forward(
        self, left: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        return left + right, {"difference": left - right, "name": "pair"}


def test_batch_may_be_split_along_another_dimension_and_outputs_are_merged_in_order() -> None:
    pipeline = ps.Pipeline([Pair()], "1F1B", microbatches=4)
    total, rest = pipeline.evaluate(ps.Along(BATCH, 1), ps.Along(TARGET, 1)).outputs
    assert torch.equal(total, torch.cat((BATCH + TARGET).tensor_split(4, 1)))
    assert torch.equal(rest["difference"], torch.cat((BATCH - TARGET).tensor_split(4, 1)))
    assert rest["name"] == "pair"


@pytest.mark.parametrize(
    ("args", "keywords", "message"),
    [
        ((BATCH,), {}, "rank 1 must be given a target (it holds the last stage 1)"),
        ((), {"target": TARGET}, "rank 0 must be given a batch (it holds the first stage 0)"),
        (
            (BATCH,),
            {"target": TARGET[:8]},
            "rank 0: all arguments that are split must have the same number of rows (argument 0 "
            "has 16, target has 8); wrap what is not split by rows in Shared, Along or Ready",
        ),
        (
            (BATCH,),
            {"target": TARGET, "colour": 3},
            "keywords must be taken by some stage's forward (rank 0 passes 'colour'); leave it "
            "out",
        ),
        (
            (BATCH[:0],),
            {"target": TARGET[:0]},
            "rank 0: argument 0 must have at least one row (got 0)",
        ),
    ],
)
def test_batch_that_does_not_fit_is_refused(
    args: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    pipeline = make_pipeline()
    with pytest.raises(ps.errors.BatchError) as caught:
        pipeline.step(*args, **keywords)
    assert str(caught.value) == message
    assert gradients_of(pipeline.named_parameters()) == {}


def test_training_step_without_a_loss_is_refused() -> None:
    pipeline = make_pipeline(loss=None)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(BATCH, target=TARGET)
    assert str(caught.value) == "a training step needs a loss; give Pipeline(loss=...)"


def test_training_step_of_a_schedule_without_backwards_is_refused() -> None:
    pipeline = make_pipeline("ForwardOnly")
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(BATCH, target=TARGET)
    assert str(caught.value) == (
        "ForwardOnly has no backwards to train with; call evaluate, or use another schedule"
    )
    assert pipeline.evaluate(BATCH, target=TARGET).loss == pytest.approx(
        run_reference(BLOCKS, BATCH, TARGET).loss, abs=1e-12
    )


def test_number_of_stages_must_fit_the_schedule() -> None:
    with pytest.raises(ps.errors.SizeError) as caught:
        ps.Pipeline(BLOCKS[:3], "ZBV", ranks=2, microbatches=4)
    assert str(caught.value) == (
        "stages must be a multiple of ranks (got 3 stages, 2 ranks); give a Schedule with a "
        "placement of its own"
    )
    with pytest.raises(ps.errors.SizeError) as caught:
        ps.Pipeline(BLOCKS[:3], ps.build("1F1B", ranks=2, microbatches=4), microbatches=4)
    assert str(caught.value) == (
        "the schedule must fit the stages and ranks (schedule: 2 stages on 2 ranks, here: 3 on "
        "2); build it for these, or change the stages or ranks"
    )


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_evaluation_with_other_microbatches_changes_no_training(family: str) -> None:
    pipeline, twin = make_pipeline(family), make_pipeline(family)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    for each in (pipeline, twin):
        each.step(BATCH, target=TARGET)
    for microbatches in (2, 3, 16):
        result = pipeline.evaluate(BATCH, microbatches=microbatches)
        assert result.loss is None
        assert not result.outputs.requires_grad
        assert differences({"": result.outputs}, {"": expected.output}) == {}
    assert pipeline.evaluate(BATCH, target=TARGET).loss == pytest.approx(expected.loss, abs=1e-12)
    for each in (pipeline, twin):
        each.step(BATCH, target=TARGET)
    found, wanted = (gradients_of(each.named_parameters()) for each in (pipeline, twin))
    assert differences(found, wanted, limit=0.0) == {}


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return value


@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_building_and_stepping_change_no_random_state_and_each_buffer_once_per_microbatch(
    family: str,
) -> None:
    stages = make_stages(family, 2, copy_blocks(BLOCKS))
    counters = [Counter() for _ in stages]
    state = torch.get_rng_state()
    pipeline = ps.Pipeline(
        [nn.Sequential(*pair) for pair in zip(stages, counters, strict=True)],
        family,
        microbatches=4,
        loss=mean_loss,
    )
    assert [int(counter.calls) for counter in counters] == [0] * len(stages)
    assert gradients_of(pipeline.named_parameters()) == {}
    for calls in (4, 8):
        pipeline.step(BATCH, target=TARGET)
        assert [int(counter.calls) for counter in counters] == [calls] * len(stages)
    pipeline.evaluate(BATCH, microbatches=2)
    assert [int(counter.calls) for counter in counters] == [10] * len(stages)
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_of_a_training_step_are_merged_in_the_order_of_the_batch() -> None:
    for family in TRAINING_FAMILIES:
        outputs = make_pipeline(family).step(BATCH, target=TARGET, return_outputs=True).outputs
        expected = run_reference(BLOCKS, BATCH, TARGET).output
        assert differences({family: outputs}, {family: expected}) == {}


def test_parameters_and_state_have_the_names_of_a_sequential_of_all_stages() -> None:
    stages = make_stages("ZBV", 2, copy_blocks(BLOCKS))
    pipeline = ps.Pipeline(stages, "ZBV", microbatches=4, loss=mean_loss)
    whole = nn.Sequential(*stages)
    assert dict(pipeline.named_parameters()) == dict(whole.named_parameters())
    assert list(pipeline.parameters()) == [*whole.parameters()]
    assert pipeline.state_dict().keys() == whole.state_dict().keys()
    assert pipeline.modules == dict(enumerate(stages))


class BreakInForward(nn.Module):
    """Raises in one of its calls."""

    def __init__(self, block: nn.Module, call: int) -> None:
        super().__init__()
        self.block = block
        self._calls_left = call

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._calls_left -= 1
        if self._calls_left == 0:
            raise ValueError("broken on purpose")
        output: torch.Tensor = self.block(value)
        return output


class _Break(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, is_broken: bool) -> torch.Tensor:
        ctx.is_broken = is_broken
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.is_broken:
            raise ValueError("broken on purpose")
        return gradient, None


class BreakInBackward(BreakInForward):
    """Raises in the backward of one of its calls."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._calls_left -= 1
        output: torch.Tensor = _Break.apply(self.block(value), self._calls_left == 0)  # type: ignore[no-untyped-call]  # untyped upstream
        return output


# The break, the family, and the place where it shows; stage 2, microbatch 3.
BREAKS: list[tuple[type[BreakInForward], str, str]] = [
    (BreakInForward, "1F1B", "rank 2, stage 2, microbatch 3, 2F3"),
    (BreakInForward, "ZBV", "rank 1, stage 2, microbatch 3, 2F3"),
    (BreakInBackward, "1F1B", "rank 2, stage 2, microbatch 3, 2B3"),
    (BreakInBackward, "ZBV", "rank 1, stage 2, microbatch 3, 2I3"),
]


@pytest.mark.parametrize(("kind", "family", "place"), BREAKS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_error_in_a_stage_names_its_place_and_the_pipeline_works_again_afterwards(
    kind: type[BreakInForward], family: str, place: str, steps_before: int
) -> None:
    blocks = copy_blocks(BLOCKS)[:4]
    stages = [*blocks]
    stages[2] = kind(blocks[2], 4 + 4 * steps_before)
    pipeline = ps.Pipeline(stages, family, microbatches=4, loss=mean_loss)
    for _ in range(steps_before):
        pipeline.step(BATCH, target=TARGET)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(BATCH, target=TARGET)
    assert str(caught.value) == f"{place}: ValueError: broken on purpose"
    assert repr(caught.value.__cause__) == "ValueError('broken on purpose')"
    nn.Sequential(*blocks).zero_grad()
    pipeline.step(BATCH, target=TARGET)
    found = gradients_of(nn.Sequential(*blocks).named_parameters())
    assert differences(found, run_reference(BLOCKS[:4], BATCH, TARGET).gradients) == {}


def test_error_in_the_loss_names_the_last_stage() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if torch.equal(target, TARGET[8:12]):
            raise ValueError("no loss for this")
        return mean_loss(output, target)

    with pytest.raises(ps.errors.PipelineError) as caught:
        make_pipeline("ZBV", loss=loss).step(BATCH, target=TARGET)
    place = "rank 0, stage 3, microbatch 2, 3F2"
    assert str(caught.value) == f"{place}: ValueError: no loss for this"


def test_error_in_the_counting_of_a_target_fails_the_step() -> None:
    pipeline = make_pipeline(reduction=lambda _: 0.0)
    with pytest.raises(ps.errors.PipelineError) as caught:
        pipeline.step(BATCH, target=TARGET)
    assert str(caught.value) == (
        "rank 0: BatchError: the counts of the microbatches must be finite, none negative and not "
        "all of them zero (got [0.0, 0.0, 0.0, 0.0]); leave out a batch that has nothing to count"
    )


def test_wrapper_of_a_kind_sees_every_action_of_it_in_order() -> None:
    seen: list[str] = []

    def note(action: ps.Action, work: Callable[[], None]) -> None:
        seen.append(str(action))
        work()

    around = dict.fromkeys([ps.Kind.FORWARD, ps.Kind.SEND_B, ps.Kind.REDUCE_GRAD], note)
    schedule = ps.Schedule.from_orders(
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    )
    pipeline = ps.Pipeline(
        make_stages("1F1B", 2, copy_blocks(BLOCKS)),
        schedule,
        microbatches=2,
        loss=mean_loss,
        options=ps.RunOptions(around=around),
    )
    pipeline.step(BATCH, target=TARGET)
    by_stage = [[text for text in seen if text[0] == stage] for stage in "01"]
    assert by_stage == [
        ["0F0", "0F1", "0REDUCE_GRAD"],
        ["1F0", "1F1", "1SEND_B0", "1SEND_B1", "1REDUCE_GRAD"],
    ]


def test_wrapper_of_a_kind_may_replace_its_actions() -> None:
    blocks = copy_blocks(BLOCKS)
    stages = make_stages("1F1B", 2, blocks)

    def halve(action: ps.Action, _: Callable[[], None]) -> None:
        for parameter in stages[action.stage].parameters():
            assert parameter.grad is not None
            parameter.grad /= 2

    around = {ps.Kind.REDUCE_GRAD: halve}
    ps.Pipeline(
        stages, "1F1B", microbatches=4, loss=mean_loss, options=ps.RunOptions(around=around)
    ).step(BATCH, target=TARGET)
    expected = run_reference(BLOCKS, BATCH, TARGET).gradients
    halves = {name: gradient / 2 for name, gradient in expected.items()}
    assert differences(gradients_of(nn.Sequential(*blocks).named_parameters()), halves) == {}


@pytest.mark.parametrize("family", ["1F1B", "ZBV", "DualPipeV"])
def test_profiler_shows_every_action_under_its_text(family: str, tmp_path: Path) -> None:
    pipeline = make_pipeline(family)
    pipeline.step(BATCH, target=TARGET)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        pipeline.step(BATCH, target=TARGET)
    # In its table, torch takes "2F0" for a C++ symbol and shows "F0"; its trace has the text.
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    shown = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    rows = ps.lower(pipeline.schedule).rows
    actions = sorted(str(rows.action(row)) for row in range(len(rows)))
    assert sorted(name for name in shown if name in actions) == actions


@pytest.mark.parametrize("family", TRAINING_FAMILIES)
def test_recorded_timeline_has_the_rows_of_the_schedule_each_rank_in_its_order(
    family: str,
) -> None:
    pipeline = make_pipeline(family)
    timeline = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert timeline is not None
    assert orders_of(timeline.schedule) == orders_of(ps.lower(pipeline.schedule))
    assert bool((timeline.start <= timeline.end).all())
    assert float(timeline.start.min()) == 0.0
    for rank in range(2):
        starts = [span.start for span in timeline.spans(rank)]
        assert starts == sorted(starts)


def test_recorded_and_simulated_timelines_are_drawn_by_the_same_view() -> None:
    pipeline = make_pipeline("ZBV")
    recorded = pipeline.step(BATCH, target=TARGET, record=True).timeline
    assert recorded is not None
    for timeline in (recorded, ps.simulate(ps.lower(pipeline.schedule))):
        drawn = plain_timeline(timeline, width=100)
        assert "rank 0" in drawn
        assert "rank 1" in drawn


def test_recorded_step_gives_the_same_gradients() -> None:
    pipeline = make_pipeline("DualPipeV")
    result = pipeline.step(BATCH, target=TARGET, record=True, return_outputs=True)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert result.loss == pytest.approx(expected.loss, abs=1e-12)
    assert differences({"": result.outputs}, {"": expected.output}) == {}


def test_recorded_evaluation_is_a_timeline_of_forwards() -> None:
    pipeline = make_pipeline("1F1B")
    timeline = pipeline.evaluate(BATCH, record=True, microbatches=2).timeline
    assert timeline is not None
    computes = [
        [str(span.action) for span in timeline.spans(rank) if span.action.kind.is_compute]
        for rank in range(2)
    ]
    assert computes == [["0F0", "0F1"], ["1F0", "1F1"]]


def test_outputs_are_merged_as_asked() -> None:
    x, _ = make_batch()
    pipe = ps.Pipeline(
        [nn.Identity(), nn.Identity()],
        "1F1B",
        microbatches=4,
        merge=lambda parts: torch.stack(parts).sum(0),
    )
    assert torch.equal(pipe.evaluate(x).outputs, x.view(4, 4, -1).sum(0))

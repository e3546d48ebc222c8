"""Losses written by hand equal those of the unsplit model, or are refused.

Any loss that was not one of torch's was assumed to be a mean over rows, and nothing checked
whether the losses of microbatches add up to that of the batch.
"""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

import penstock as ps
from tests.processes import Processes

WIDTH, ROWS, MICROBATCHES = 6, 8, 4
Loss = Callable[..., torch.Tensor]
REFUSED = "the losses of microbatches must make up that of their rows together"


def make_stages(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2)]


def make_batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def make_mask() -> torch.Tensor:
    return torch.tensor([1, 1, 1, 0, 1, 1, 0, 1], dtype=torch.float64)


def make_pipeline(
    loss: Loss, stages: list[nn.Module] | None = None, **settings: Any
) -> ps.Pipeline:
    return ps.Pipeline(
        stages or make_stages(), "1F1B", microbatches=MICROBATCHES, loss=loss, **settings
    )


def assert_like_unsplit(loss: Loss, target: Any, dtype: torch.dtype = torch.float64) -> None:
    """Compare steps and evaluations with the unsplit model, in observed steps and in others."""
    stages, (x, _) = make_stages(dtype), make_batch(dtype)
    plain = nn.Sequential(*deepcopy(stages))
    expected = loss(plain(x), target)
    torch.autograd.backward(expected)
    pipeline = make_pipeline(loss, stages)
    for _ in range(5):
        for parameter in pipeline.parameters():
            parameter.grad = None
        found = pipeline.step(x, target=target)
        assert found.loss == pytest.approx(
            expected.item(), rel=1e-12 if x.dtype.itemsize == 8 else 1e-2
        )
        if dtype is torch.float64:
            torch.testing.assert_close(
                [p.grad for p in pipeline.parameters()], [p.grad for p in plain.parameters()]
            )
        assert pipeline.evaluate(x, target=target).loss == pytest.approx(found.loss, rel=1e-6)


def masked_mean(output: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    values, mask = target
    return ((output - values).square().mean(-1) * mask).sum() / mask.sum()


def weighted_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    weight = target.abs()
    return ((output - target).square() * weight).sum() / weight.sum()


def divided_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / 100


def root(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean().sqrt()


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores)))


def contrast_by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(output @ target.T).log_softmax(-1).diagonal().mean()


def spread(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return (output - output.mean(0)).square().mean()


def normalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output / output.std(), target)


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(
    "loss", [weighted_mean, divided_sum, root, contrast, contrast_by_hand, spread, normalized]
)
def test_a_loss_that_does_not_add_up_by_rows_is_refused(loss: Loss, call: str) -> None:
    x, y = make_batch()
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        getattr(make_pipeline(loss), call)(x, target=y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_masked_mean_is_refused_if_the_mask_is_uneven(dtype: torch.dtype) -> None:
    x, y = make_batch(dtype)
    pipeline = make_pipeline(masked_mean, make_stages(dtype))
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        pipeline.step(x, target=(y, make_mask().to(dtype)))
    assert_like_unsplit(masked_mean, (y, torch.ones(ROWS, dtype=dtype)), dtype)


def test_refused_losses_work_with_an_explicit_reduction() -> None:
    (x, y), mask, stages = make_batch(), make_mask(), make_stages()
    expected = masked_mean(nn.Sequential(*stages)(x), (y, mask)).item()
    pipeline = make_pipeline(masked_mean, stages, reduction=lambda target: float(target[1].sum()))
    assert pipeline.step(x, target=(y, mask)).loss == pytest.approx(expected, rel=1e-12)
    total = make_pipeline(divided_sum, stages, reduction="sum").step(x, target=y).loss
    assert total == pytest.approx(divided_sum(nn.Sequential(*stages)(x), y).item(), rel=1e-12)
    assert make_pipeline(contrast, stages, reduction="mean").step(x, target=y).loss is not None


def sum_by_rows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum() / output.shape[0]


def absolute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.3 * (output - target).abs().mean() + 0.1 * output.square().sum(-1).mean()


def of_output(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [sum_by_rows, absolute])
def test_a_mean_over_rows_by_hand_is_exact(loss: Loss, dtype: torch.dtype) -> None:
    assert_like_unsplit(loss, make_batch(dtype)[1], dtype)


def test_a_loss_that_is_nearly_zero_is_not_refused_for_its_rounding() -> None:
    # The loss of a critic is a difference of numbers near 1, and here only rounding remains.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean() - target.mean()

    x, y = make_batch(torch.float32)
    stages = make_stages(torch.float32)
    with torch.no_grad():
        y += nn.Sequential(*stages)(x).mean() - y.mean()
    found = make_pipeline(loss, stages).step(x, target=y).loss
    assert found == pytest.approx(0, abs=1e-6)


def test_a_loss_of_the_output_alone_is_compared_too() -> None:
    x, _ = make_batch()
    stages = make_stages()
    expected = of_output(nn.Sequential(*stages)(x)).item()
    assert make_pipeline(of_output, stages).step(x).loss == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        make_pipeline(lambda output: output.square().mean().sqrt()).step(x)


def test_a_temperature_that_all_rows_share_is_not_joined() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.layer.bias.sum()

    def loss(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        return ((output[0] - target) * output[1]).square().mean()

    def coupled(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[0] @ target.T * output[1], torch.arange(len(target)))

    (x, y), last = make_batch(), Pair()
    stages = [make_stages()[0], last]
    expected = loss(last(stages[0](x)), y).item()
    assert make_pipeline(loss, stages).step(x, target=y).loss == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        make_pipeline(coupled, stages).step(x, target=y)


def test_rows_along_another_dimension_are_joined_there() -> None:
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean(0).sum() / target.shape[1]

    (x, y), last = make_batch(), Turned(WIDTH, WIDTH, dtype=torch.float64)
    x, y = x.repeat(3, 1, 1), y.repeat(3, 1, 1)
    expected = loss(last(x), y).item()
    found = make_pipeline(loss, [nn.Identity(), last]).step(
        ps.Along(x, dim=1), target=ps.Along(y, dim=1)
    )
    assert found.loss == pytest.approx(expected, rel=1e-12)


def test_calling_a_loss_again_draws_no_random_numbers() -> None:
    x, y = make_batch()
    drawn = []
    for reduction in ("mean", "auto"):
        torch.manual_seed(5)
        make_pipeline(absolute, reduction=reduction).step(x, target=y)
        drawn.append(torch.rand(3))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_a_loss_that_draws_random_numbers_gets_one_warning() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target + torch.randn_like(target)).square().mean()

    x, y = make_batch()
    pipeline = make_pipeline(loss)
    with pytest.warns(UserWarning, match="another number when it is called again"):
        pipeline.step(x, target=y)
    pipeline.step(x, target=y)


def test_a_gradient_penalty_is_not_refused() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        near = (output - target).square().mean()
        (found,) = torch.autograd.grad(near, output, create_graph=True)
        return near + found.square().sum()

    x, y = make_batch()
    with pytest.warns(UserWarning, match="could not be compared"):
        assert make_pipeline(loss).step(x, target=y).loss is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_pipeline(loss, reduction="mean").step(x, target=y)


def test_buffers_of_a_loss_are_changed_once_per_microbatch() -> None:
    class Moving(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return (output - target).abs().mean()

    x, y = make_batch()
    loss = Moving()
    make_pipeline(loss).step(x, target=y)
    assert int(loss.seen) == MICROBATCHES


def test_a_loss_that_changes_between_comparisons_is_compared_again() -> None:
    is_late = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        squares = (output - target).square()
        return squares.mean().sqrt() if is_late else squares.mean()

    x, y = make_batch()
    pipeline = make_pipeline(loss)
    for _ in range(5):
        pipeline.step(x, target=y)
    is_late = True
    # Both end in an operation on one number, and the old rule was kept for a step.
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        pipeline.step(x, target=y)
    is_late = False
    pipeline.step(x, target=y)


def test_a_loss_that_alternates_is_called_again_in_few_steps() -> None:
    calls = [0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[-1] += 1
        near = (output - target).abs().mean()
        return near + output.square().mean() if len(calls) % 2 else near

    x, y = make_batch()
    pipeline = make_pipeline(loss)
    for _ in range(16):
        pipeline.step(x, target=y)
        calls.append(0)
    # Each form is compared in its own steps 1, 2, 4 and 8 only.
    assert [calls[step] for step in (8, 9, 10, 11, 12, 13)] == [MICROBATCHES] * 6


def fail_in_the_loss(pipeline: ps.Pipeline, x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises(ps.errors.PipelineError, match="size"):
        pipeline.step(x, target=y[:, :-1])


def train(pipeline: ps.Pipeline, x: torch.Tensor, y: torch.Tensor) -> None:
    pipeline.step(x, target=y)


# Steps that cannot show how a loss adds up.
SHOWING_NOTHING: dict[str, Callable[[ps.Pipeline, torch.Tensor, torch.Tensor], None]] = {
    "one microbatch": lambda pipeline, x, y: train(pipeline, x[:1], y[:1]),
    "equal microbatches": lambda pipeline, x, y: train(
        pipeline, x[:2].repeat(MICROBATCHES, 1), y[:2].repeat(MICROBATCHES, 1)
    ),
    "infinite losses": lambda pipeline, x, y: train(pipeline, x, y / 0),
    "a step that failed": fail_in_the_loss,
}


@pytest.mark.parametrize(
    ("loss", "name"),
    [*((root, name) for name in SHOWING_NOTHING), (normalized, "one microbatch")],
)
def test_a_loss_is_compared_as_soon_as_there_is_something_to_compare(
    loss: Loss, name: str
) -> None:
    # Steps in which nothing could be compared were counted as comparisons, and step 3 made none.
    x, y = make_batch()
    pipeline = make_pipeline(loss)
    for _ in range(2):
        SHOWING_NOTHING[name](pipeline, x, y)
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        pipeline.step(x, target=y)


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("microbatch", [0, MICROBATCHES - 1])
def test_a_loss_that_is_a_number_for_the_batch_but_not_for_a_microbatch_is_refused(
    call: str, microbatch: int
) -> None:
    # A mean over nothing was taken for something that cannot be compared, and gave NaN.
    (x, y), mask = make_batch(), torch.ones(ROWS, dtype=torch.float64)
    mask.view(MICROBATCHES, -1)[microbatch] = 0
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        getattr(make_pipeline(masked_mean), call)(x, target=(y, mask))


def test_a_loss_is_not_compared_in_every_step() -> None:
    calls = [0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls[-1] += 1
        return (output - target).abs().mean()

    x, y = make_batch()
    pipeline = make_pipeline(loss)
    pipeline.step(x[:1], target=y[:1])
    for _ in range(7):
        calls.append(0)
        pipeline.step(x, target=y)
    # Step 1 could show nothing, so that step 2 compares instead.
    is_compared = [calls[step] > MICROBATCHES for step in range(8)]
    assert is_compared == [False, True, False, True, False, False, False, True]


def test_a_focal_loss_is_a_mean_over_rows() -> None:
    # A function of unreduced results was refused like a function of their mean.
    def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    assert_like_unsplit(focal, torch.tensor([0, 1, 2, 3, 4, 5, 0, 1]))


def test_a_target_of_booleans_need_not_be_a_mask() -> None:
    # Uneven booleans in a target were always taken for a mask, and the loss was refused.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.where(target, F.softplus(-output), F.softplus(output)).mean()

    assert_like_unsplit(loss, make_batch()[1] > 0.7)


def test_labels_that_are_equal_in_the_first_microbatch_are_not_confused() -> None:
    # Targets were found by their values alone, and the first of two arguments was taken.
    def loss(output: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.cross_entropy(output, target[1])

    labels = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    other = labels.clone()
    other[[3, 5, 6]] = -100
    assert_like_unsplit(loss, (labels, other))


def test_a_refused_step_leaves_no_gradients() -> None:
    x, y = make_batch()
    pipeline = make_pipeline(root)
    with pytest.raises(ps.errors.PipelineError, match=REFUSED):
        pipeline.step(x, target=y)
    assert [p.grad for p in pipeline.parameters()] == [None] * 4


def step_with(rank: int, loss: Loss) -> tuple[str, list[bool]]:  # noqa: ARG001  # the fixture's form
    x, y = make_batch()
    pipeline = make_pipeline(loss, group=dist.group.WORLD)
    try:
        pipeline.step(x, target=y)
    except ps.errors.PipelineError as error:
        return str(error).split(";")[0], [p.grad is None for p in pipeline.parameters()]
    return "accepted", []


def test_all_ranks_refuse_the_step_together(two_processes: Processes) -> None:
    first, second = two_processes.run(step_with, root)
    assert REFUSED in first[0]
    assert (first[0], first[1]) == (second[0], [True, True])
    assert [answer for answer, _ in two_processes.run(step_with, absolute)] == ["accepted"] * 2

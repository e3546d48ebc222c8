"""By default the loss of a batch, and its gradients, are what the unsplit model computes on it."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.overrides import TorchFunctionMode

import penstock as ps
from penstock.errors import PipelineError
from tests.processes import Processes

CLASSES = 6
LENGTH = 8
Loss = Callable[..., torch.Tensor]
# The number of labels that count in each row; the third microbatch has none.
UNEVEN = [1, 2, 8, 3, 0, 0, 7, 0]


def make_labels(valid: Sequence[int], ignored: int = -100) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(1, CLASSES, (len(valid), LENGTH), generator=generator)
    for row, count in enumerate(valid):
        labels[row, count:] = ignored
    return labels


def make_scores(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, CLASSES, generator=generator, dtype=torch.float64)


def make_stages(family: str) -> list[nn.Module]:
    torch.manual_seed(0)
    count = 4 if family == "ZBV" else 2
    return [nn.Linear(CLASSES, CLASSES, dtype=torch.float64) for _ in range(count)]


def assert_like_unsplit(
    loss: Loss, target: Any, *, family: str = "1F1B", batch: Any = None, **settings: Any
) -> None:
    """Compare three steps and evaluations with the unsplit model; steps 1 and 2 are observed."""
    stages = make_stages(family)
    plain = nn.Sequential(*deepcopy(stages))
    x = make_scores(len(UNEVEN), LENGTH) if batch is None else batch
    expected = loss(plain(x), target)
    torch.autograd.backward(expected)
    pipeline = ps.Pipeline(stages, family, ranks=2, microbatches=4, loss=loss, **settings)
    for _ in range(3):
        for parameter in pipeline.parameters():
            parameter.grad = None
        result = pipeline.step(x, target=target)
        assert result.loss == pytest.approx(expected.item(), rel=1e-12)
        found = {str(i): p.grad for i, p in enumerate(pipeline.parameters())}
        reference = {str(i): p.grad for i, p in enumerate(plain.parameters())}
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)
        assert pipeline.evaluate(x, target=target).loss == pytest.approx(
            expected.item(), rel=1e-12
        )


def flat(loss: Loss) -> Loss:
    return lambda output, target: loss(output.flatten(0, 1), target.flatten())


def weights() -> torch.Tensor:
    return torch.linspace(0.1, 2.0, CLASSES, dtype=torch.float64)


def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def by_hand(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(output, target, reduction="sum")
    return total / (target != -100).sum().clamp(min=1)


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return each.sum() / (target != -100).sum()


def picked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[target != -100], target[target != -100])


def with_penalty(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(output, target)
    loss += 0.1 * output.square().mean()
    return loss


def two_heads(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    whole = F.cross_entropy(output.flatten(0, 1), target.flatten())
    return (whole + 3 * shifted(output, target)) / 2


# Means of microbatches were averaged by rows, and a mean over no labels made the loss NaN.
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(flat(F.cross_entropy), id="function"),
        pytest.param(flat(nn.CrossEntropyLoss()), id="module"),
        pytest.param(flat(nn.CrossEntropyLoss(weight=weights())), id="class weights"),
        pytest.param(flat(nn.CrossEntropyLoss(weights(), label_smoothing=0.1)), id="smooth"),
        pytest.param(flat(lambda a, b: F.nll_loss(a.log_softmax(-1), b)), id="nll"),
        pytest.param(lambda a, b: F.cross_entropy(a.transpose(1, 2), b), id="two dimensions"),
        pytest.param(flat(lambda a, b: 0.5 * F.cross_entropy(a, b)), id="scaled"),
        pytest.param(flat(lambda a, b: F.cross_entropy(a, b).reshape(1)), id="one element"),
        pytest.param(flat(lambda a, b: F.cross_entropy(a, b, reduction="sum")), id="sum"),
        pytest.param(shifted, id="shifted"),
        pytest.param(flat(by_hand), id="divided by hand"),
        pytest.param(flat(masked), id="masked by hand"),
        pytest.param(flat(picked), id="picked"),
        pytest.param(flat(with_penalty), id="with a penalty"),
        pytest.param(two_heads, id="two means"),
    ],
)
def test_a_mean_over_labels_is_weighted_by_the_labels_that_count(loss: Loss, family: str) -> None:
    assert_like_unsplit(loss, make_labels(UNEVEN), family=family)


def test_another_index_may_be_ignored() -> None:
    loss = flat(nn.CrossEntropyLoss(ignore_index=0))
    assert_like_unsplit(loss, make_labels(UNEVEN, ignored=0))


def test_the_loss_may_replace_labels_by_the_ignored_one() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target.masked_fill(target == -1, -100))

    assert_like_unsplit(flat(loss), make_labels(UNEVEN, ignored=-1))


def test_labels_may_be_probabilities() -> None:
    target = make_scores(8).softmax(-1)
    assert_like_unsplit(nn.CrossEntropyLoss(), target, batch=make_scores(8))


def test_a_target_may_be_a_tree() -> None:
    def loss(output: torch.Tensor, target: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target["labels"][0].flatten())

    assert_like_unsplit(loss, {"weights": None, "labels": [make_labels(UNEVEN)]})


def test_a_sum_of_squares_is_a_sum() -> None:
    target = make_scores(8)
    assert_like_unsplit(nn.MSELoss(reduction="sum"), target, batch=make_scores(8) + 1)


def test_a_mean_over_elements_of_uneven_microbatches_is_the_mean_over_all_elements() -> None:
    stages = make_stages("1F1B")
    plain = nn.Sequential(*deepcopy(stages))
    lengths = [1, 5, 2]
    batches = [make_scores(2, length) for length in lengths]
    targets = [make_scores(2, length) + 1 for length in lengths]
    errors = [(plain(x) - y).flatten() for x, y in zip(batches, targets, strict=True)]
    expected = torch.cat(errors).square().mean()
    torch.autograd.backward(expected)
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=3, loss=nn.MSELoss())
    result = pipeline.step(ps.Ready(batches), target=ps.Ready(targets))
    assert result.loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(
        [p.grad for p in pipeline.parameters()],
        [p.grad for p in plain.parameters()],
        rtol=1e-12,
        atol=1e-14,
    )


def test_an_explicit_reduction_wins() -> None:
    labels, x = make_labels(UNEVEN), make_scores(8, LENGTH)
    stages = make_stages("1F1B")
    loss = flat(lambda a, b: F.cross_entropy(a, b, reduction="sum"))
    parts = zip(x.chunk(4), labels.chunk(4), strict=True)
    losses = [float(loss(nn.Sequential(*stages)(part), label).detach()) for part, label in parts]
    found = {
        reduction: ps.Pipeline(
            stages, "1F1B", microbatches=4, loss=loss, reduction=reduction
        ).evaluate(x, target=labels)
        for reduction in ("mean", "sum")
    }
    assert found["mean"].loss == pytest.approx(sum(losses) / 4)
    assert found["sum"].loss == pytest.approx(sum(losses))


def own_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    is_valid = target != -100
    scores = output.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0]
    return -(scores * is_valid).sum() / is_valid.sum().clamp(min=1)


def variational(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = F.cross_entropy(output, target, reduction="sum")
    return total + 0.5 * output.square().mean()


def masked_squares(output: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
    values, mask = target
    return F.mse_loss(output[mask], values[mask])


def random_target(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target.masked_fill(target > 3, -100))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (own_entropy, "the losses of microbatches must make up that of their rows together"),
        (variational, "a loss of several parts must be made of means (got one that is a sum"),
        (random_target, "what the loss counts must be known of all microbatches before the first"),
    ],
)
def test_an_unclear_loss_is_refused_with_advice_to_set_the_reduction(
    loss: Loss, message: str
) -> None:
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=flat(loss))
    x, labels = make_scores(8, LENGTH), make_labels([8, 1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(PipelineError) as caught:
        pipeline.step(x, target=labels)
    assert message in str(caught.value)
    assert "say what it is with Pipeline(reduction=...)" in str(caught.value)
    # A sum next to a mean is unclear even if the labels are even.
    if loss not in (random_target, variational):
        even = torch.full((8, LENGTH), 2)
        assert pipeline.step(x, target=even).loss is not None


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: F.mse_loss(output, target).sqrt(),
        lambda output, target: 1 / F.mse_loss(output, target),
        lambda output, target: F.mse_loss(output, target) * F.l1_loss(output, target),
    ],
)
def test_another_function_of_a_mean_is_refused(loss: Loss) -> None:
    # The root of a mean is not the mean of roots, however evenly the batch is split.
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=loss)
    with pytest.raises(PipelineError, match="a loss must be a sum of what is averaged"):
        pipeline.step(make_scores(8), target=make_scores(8) + 1)
    assert pipeline.step(make_scores(1), target=make_scores(1) + 1).loss is not None


def test_a_factor_may_be_trained() -> None:
    trained = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.exp(-trained) * F.cross_entropy(output, target) + trained

    labels, x = make_labels(UNEVEN), make_scores(len(UNEVEN), LENGTH)
    assert_like_unsplit(flat(loss), labels)
    # The factor gets its gradient too: weights were applied at the calls, which it does not see.
    stages = make_stages("1F1B")
    found: list[float] = []
    for microbatches in (1, 4):
        trained.grad = None
        ps.Pipeline(stages, "1F1B", microbatches=microbatches, loss=flat(loss)).step(
            x, target=labels
        )
        assert trained.grad is not None
        found.append(trained.grad.item())
    assert found[1] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_sum_by_hand_needs_a_reduction(call: str) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    x, y = make_scores(8), make_scores(8) + 1
    stages = make_stages("1F1B")
    with pytest.raises(PipelineError, match=r"a loss that ends in \.sum\(\) must say"):
        getattr(ps.Pipeline(stages, "1F1B", microbatches=4, loss=loss), call)(x, target=y)
    expected = loss(nn.Sequential(*stages)(x), y).item()
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=loss, reduction="sum")
    assert pipeline.step(x, target=y).loss == pytest.approx(expected, rel=1e-12)


def test_a_mask_that_picks_unevenly_is_refused() -> None:
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=masked_squares)
    x, values = make_scores(8), make_scores(8)
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1]).bool()
    with pytest.raises(PipelineError, match="must count what the labels of the step say"):
        pipeline.step(x, target=(values, mask))
    even = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1]).bool()
    expected = masked_squares(nn.Sequential(*make_stages("1F1B"))(x), (values, even))
    assert pipeline.step(x, target=(values, even)).loss == pytest.approx(expected.item())


def test_labels_that_only_later_microbatches_ignore_are_noticed_in_the_same_step() -> None:
    # Labels of 5 are ignored too, but the first microbatch has none of them.
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target.masked_fill(target == 5, -100))

    labels = torch.full((8, LENGTH), 2)
    labels[0, 0], labels[5, :3] = -100, 5
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=flat(loss))
    with pytest.raises(PipelineError, match="must"):
        pipeline.step(make_scores(8, LENGTH), target=labels)


def test_a_loss_that_changes_its_labels_in_a_later_step_is_refused_in_that_step() -> None:
    changes = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            output, target.masked_fill(target == 5, -100) if changes else target
        )

    x, labels = make_scores(8, LENGTH), make_labels([8, 1, 2, 3, 4, 5, 6, 7])
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=flat(loss))
    for _ in range(4):
        pipeline.step(x, target=labels)
    changes = True
    with pytest.raises(PipelineError, match="must count what the labels of the step say"):
        pipeline.step(x, target=labels)


def test_a_penalty_that_is_switched_on_later_is_weighted_by_rows() -> None:
    # Between observed steps only the last operation was compared. The first step of a change was
    # refused, or had the old weights; now such a loss is computed again and observed.
    is_on = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(output, target)
        return entropy + 0.1 * output.square().mean() if is_on else entropy

    x, labels = make_scores(8, LENGTH), make_labels(UNEVEN)
    stages = make_stages("1F1B")
    plain = deepcopy(nn.Sequential(*stages))
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=flat(loss))
    for _ in range(4):
        pipeline.step(x, target=labels)
    is_on = True
    expected = flat(loss)(plain(x), labels).item()
    assert pipeline.step(x, target=labels).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_batch_in_which_nothing_counts_is_refused(call: str) -> None:
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=flat(F.cross_entropy))
    with pytest.raises(PipelineError, match="leave out a batch that has nothing to count"):
        getattr(pipeline, call)(make_scores(8, LENGTH), target=make_labels([0] * 8))


def test_a_loss_without_a_graph_is_recognised_by_its_value() -> None:
    pipeline = ps.Pipeline(make_stages("1F1B"), "1F1B", microbatches=4, loss=flat(F.cross_entropy))
    x, labels = make_scores(8, LENGTH), make_labels(UNEVEN)
    expected = flat(F.cross_entropy)(nn.Sequential(*make_stages("1F1B"))(x), labels)
    assert pipeline.evaluate(x, target=labels).loss == pytest.approx(expected.item(), rel=1e-12)


def test_a_loss_of_several_parts_may_be_evaluated_before_it_is_trained() -> None:
    # Without a graph the factors of the parts are unknown, and those of the last training step
    # were used even if they had changed.
    factors = [0.5]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return factors[-1] * F.cross_entropy(output, target) + output.square().mean()

    stages = make_stages("1F1B")
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=flat(loss))
    x, labels = make_scores(8, LENGTH), make_labels(UNEVEN)
    for _ in range(2):
        expected = flat(loss)(nn.Sequential(*stages)(x), labels).item()
        with torch.inference_mode():
            assert pipeline.evaluate(x, target=labels).loss == pytest.approx(expected, rel=1e-12)
        assert pipeline.step(x, target=labels).loss == pytest.approx(expected, rel=1e-12)
        factors.append(3.0)


class WithLoss(nn.Module):
    """A last stage that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CLASSES, CLASSES, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x).flatten(0, 1), labels.flatten())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_a_loss_inside_of_a_checkpointed_or_compiled_stage_has_its_weights(how: str) -> None:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(CLASSES, CLASSES, dtype=torch.float64), WithLoss()]
    first, last = deepcopy(stages)
    x, labels = make_scores(8, LENGTH), make_labels(UNEVEN)
    expected = last(first(x), labels)
    torch.autograd.backward(expected)
    if how == "compiled":
        stages[1].compile(backend="aot_eager")
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=lambda output: output)
    if how == "checkpointed":
        pipeline._stages[1].checkpoint()
    for _ in range(3):
        for parameter in pipeline.parameters():
            parameter.grad = None
        assert pipeline.step(x, labels=labels).loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(
        [p.grad for p in pipeline.parameters()],
        [p.grad for p in (*first.parameters(), *last.parameters())],
        rtol=1e-12,
        atol=1e-14,
    )


def _classify_words(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[float, float]:
    """Return the loss of a step on words that look like labels, and that of the unsplit model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
    words = torch.tensor([[5, 2], [1, 6], [2, 4]])
    labels = torch.tensor([[2, 1], [2, -100], [2, -100]])
    pipeline = ps.Pipeline([model], "GPipe", microbatches=3, loss=loss)
    found = pipeline.step(words, target=labels).loss
    assert found is not None
    return found, loss(model(words), labels).item()


def _entropy(
    scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), weights)


def test_class_weights_may_be_created_in_every_call() -> None:
    # They were compared by identity, so that each microbatch found its own labels for the second
    # term: in one of them the words have the values of the labels, and were counted instead.
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(0.5, 2, 3, dtype=torch.float64)
        return _entropy(scores, labels) + 0.5 * _entropy(torch.tanh(scores), labels, weights)

    found, expected = _classify_words(loss)
    assert found == pytest.approx(expected, rel=1e-12)


def test_class_weights_that_differ_between_microbatches_are_refused() -> None:
    calls: list[float] = []

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(1.0 + len(calls))
        weights = torch.tensor([1.0, 2.0, calls[-1]], dtype=torch.float64)
        return _entropy(scores, labels, weights)

    with pytest.raises(PipelineError, match="must count alike in all microbatches"):
        _classify_words(loss)


class SortCounter(TorchFunctionMode):
    """A count of the tensors that are sorted."""

    num_sorted = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_sorted += func is torch.Tensor.sort
        return func(*args, **(kwargs or {}))


def test_a_target_that_is_given_as_it_is_is_not_sorted() -> None:
    # All ways in which a target may derive from labels were tried even after the first had fitted;
    # sorting made steps 1, 2, 4, 8 and so on of a regression twenty times as long.
    pipeline = ps.Pipeline([nn.Linear(4, 4)], "1F1B", microbatches=2, loss=nn.MSELoss())
    with SortCounter() as counter:
        for _ in range(4):
            pipeline.step(torch.ones(4, 4), target=torch.arange(16.0).view(4, 4))
    assert counter.num_sorted == 0


# Labels of each row that count, none of them in what one rank of DualPipe sees.
ON_ONE_RANK = [[0, 0, 0, 0, 1, 2, 8, 3], [1, 2, 8, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 7, 0]]
LOSSES: list[Loss] = [F.cross_entropy, nn.CrossEntropyLoss(weights()), by_hand, picked]


def train_where_ranks_may_count_nothing(_: int, losses: Sequence[Loss]) -> None:
    """Compare steps with the unsplit model."""
    for loss, valid in product(map(flat, losses), ON_ONE_RANK[: len(losses)]):
        model = nn.Sequential(*make_stages("1F1B"))
        plain, target, x = deepcopy(model), make_labels(valid), make_scores(8, LENGTH)
        expected = loss(plain(x), target)
        torch.autograd.backward(expected)
        reference = {name: parameter.grad for name, parameter in plain.named_parameters()}
        pipe = ps.split(model, stages=2)
        with ps.Pipeline(
            pipe, "DualPipe", microbatches=4, loss=loss, group=dist.group.WORLD
        ) as pipeline:
            for _ in range(3):
                pipeline.zero_grad()
                result = pipeline.step(x, target=target)
                assert result.loss == pytest.approx(expected.item(), rel=1e-12)
                own = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
                torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-14)


def test_ranks_whose_labels_count_nothing_train_with_the_others(two_processes: Processes) -> None:
    # A rank of DualPipe that saw no loss of its own took it for one that it knew nothing about.
    two_processes.run(train_where_ranks_may_count_nothing, [F.cross_entropy])


@pytest.mark.slow
def test_ranks_whose_labels_count_nothing_train_with_any_loss(two_processes: Processes) -> None:
    two_processes.run(train_where_ranks_may_count_nothing, LOSSES)

"""A trace may depend on values that are known, and is never right for others in silence."""

import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import BatchError, ModelError
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.pipe import Pipe
from tests.splitting.traced_models import SIZE

X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))
COUNTS = torch.tensor([3, 1])


class Between(nn.Module):
    """A function of a layer's output and of the other arguments, and a layer behind it."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        self.function = function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers[1](self.function(self.layers[0](x), *others))
        return result


def split(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    model = Between(function)
    return model, split_traced(model, args, stages=2)


def conditions(pipe: Pipe) -> list[str]:
    """Return what the stages require of values."""
    stages: Any = pipe.stages
    nodes = [node for stage in stages for node in stage.graph.nodes]
    return [str(n.args[1]) for n in nodes if "require_values" in str(n.target)]


# ---- random numbers


def drop(p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def skip_or_double(x: torch.Tensor) -> torch.Tensor:
        skip = torch.rand([]) < p
        return x if skip else x * 2

    return skip_or_double


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_random_number_that_decides_nothing_is_traced(p: float) -> None:
    # Half of the encoders of transformers drop layers so, with a rate of 0.
    model, pipe = split(drop(p), X)
    assert conditions(pipe) == []
    torch.testing.assert_close(pipe(X[:3]), model(X[:3]))


def test_a_random_path_is_refused_with_the_comparison() -> None:
    with pytest.raises(ModelError) as refusal:
        split(drop(0.1), X)
    line = drop.__code__.co_firstlineno + 2
    assert str(refusal.value) == (
        "the model cannot be traced: its path depends on a random number, which it compares with "
        f"0.1, in Between at test_known_values.py:{line} `skip = torch.rand([]) < p`; use 0 "
        'instead of 0.1 there, or split it by layers: split(model, layers="layers", stages=2)'
    )


def written_draw(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand([])
    drawn.sub_(1)
    return x if drawn < 0.0 else x * 2


def bernoulli(x: torch.Tensor) -> torch.Tensor:
    return x if torch.bernoulli(torch.full((), 0.5)) else x * 2


def unfilled(x: torch.Tensor) -> torch.Tensor:
    return x if torch.empty(()) else x * 2


def written(x: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(2)
    flags[:1] = x.detach().sum()
    return x if flags[0] else x * 2


def written_under_another_name(x: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(2)
    flags.data.add_(x.detach().sum())
    return x if flags[0] else x * 2


def replaced(x: torch.Tensor) -> torch.Tensor:
    flags = torch.zeros(())
    flags.data = x.detach().sum()
    return x if flags else x * 2


@pytest.mark.parametrize(
    "function",
    [written_draw, bernoulli, unfilled, written, written_under_another_name, replaced],
)
def test_what_is_not_known_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(ModelError, match="its path depends on the values of a tensor"):
        split(function, X)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_others_are_refused(draw: Callable[[], float]) -> None:
    # They were drawn once, by the trace, and every step used them again.
    with pytest.raises(ModelError, match="must draw its random numbers with torch"):
        split(lambda x: x * draw(), X)


# ---- plain numbers


def counted(x: torch.Tensor) -> torch.Tensor:
    table = torch.arange(4).view(2, 2)
    table[0] += 1
    row = table[0]
    row.mul_(2)
    return torch.cat(
        [part * n for part, n in zip(torch.split(x, row.tolist()), table[1], strict=True)]
    )


def test_tensors_of_plain_numbers_are_known_through_writes_to_their_views() -> None:
    x = torch.randn(6, SIZE)
    model, pipe = split(counted, x)
    assert conditions(pipe) == []
    torch.testing.assert_close(pipe(x), model(x))


# ---- integer inputs


def by_lengths(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    lengths = torch.repeat_interleave(counts, torch.tensor([1, 1]))
    return torch.cat([part.cumsum(0) * len(part) for part in torch.split(x, lengths.tolist())])


def by_ends(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    ends = counts.cumsum(0)
    parts = x[: ends[0]] * 2, x[ends[0] : ends[1]]
    return torch.cat([part for part in parts if len(part) != 2])


def by_repeats(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    owners = torch.repeat_interleave(torch.arange(2), counts)
    places = owners.sub(1).nonzero()
    return x * 2 if len(places) == 3 else x


def by_mask(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    kept = torch.repeat_interleave(counts, counts) > 2
    chosen = x[kept]
    return x + chosen.sum(0) / len(chosen)


def by_view(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    rows: Any = counts[0]
    wide = x.repeat(rows, 1)
    return wide * 2 if len(wide) > 8 else wide


def by_branch(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    largest = torch.tensor([max(counts[0], counts[1]), 1])
    return x * 2 if largest[0] == 3 else x


BY_VALUES = (by_lengths, by_ends, by_repeats, by_mask, by_view, by_branch)


@pytest.mark.parametrize("function", BY_VALUES)
def test_values_that_the_model_reads_are_those_of_the_example(
    function: Callable[..., torch.Tensor],
) -> None:
    model, pipe = split(function, X, COUNTS)
    assert conditions(pipe)
    torch.testing.assert_close(pipe(X * 2, COUNTS.clone()), model(X * 2, COUNTS))
    with pytest.raises(BatchError, match=r"what the traced model reads of others\[0\] must be "):
        pipe(X, torch.tensor([2, 2]))


def test_a_condition_says_what_was_read_and_where() -> None:
    _, pipe = split(by_branch, X, COUNTS)
    line = by_branch.__code__.co_firstlineno + 1
    with pytest.raises(BatchError) as refusal:
        pipe(X, torch.tensor([1, 2]))
    assert str(refusal.value) == (
        "what the traced model reads of others[0] must be 3 as in its example (got 2), at "
        f"test_known_values.py:{line} `largest = torch.tensor([max(counts[0], counts[1]), 1])`; "
        "trace with an example that has the values of all your batches, or split the model by "
        "layers"
    )


def test_sizes_that_depend_on_values_stay_free_where_torch_traces_them() -> None:
    model, pipe = split(lambda x, counts: torch.cat(x.split(counts.tolist())[::-1]), X, COUNTS)
    assert conditions(pipe) == []
    others = torch.tensor([2, 2])
    torch.testing.assert_close(pipe(X, others), model(X, others))


def test_conditions_are_on_what_is_read_alone() -> None:
    model, pipe = split(lambda x, counts: x * 2 if counts.sum() == 4 else x, X, COUNTS)
    assert conditions(pipe) == ["True"]
    others = torch.tensor([0, 4])
    torch.testing.assert_close(pipe(X, others), model(X, others))


def test_values_that_are_not_read_may_vary() -> None:
    model, pipe = split(lambda x, counts: x * counts.max() + (counts > 2).sum(), X, COUNTS)
    assert conditions(pipe) == []
    others = torch.tensor([7, 9])
    torch.testing.assert_close(pipe(X, others), model(X, others))


def test_the_example_is_not_written_to() -> None:
    counts = COUNTS.clone()

    def shortened(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        counts.sub_(1)
        return by_lengths(x, counts + 1)

    split(shortened, X, counts)
    assert counts.equal(COUNTS)


def test_conditions_are_copied_with_their_stage() -> None:
    _, pipe = split(by_lengths, X, COUNTS)
    first = pickle.loads(pickle.dumps(pipe.stages[0]))
    with pytest.raises(BatchError, match="as in its example"):
        first(X, torch.tensor([2, 2]))


_LOAD = """
import pickle, sys, torch
stage = pickle.loads(bytes.fromhex(sys.argv[1]))
try:
    stage(torch.ones(4, 6), torch.tensor([2, 2]))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_conditions_are_known_where_a_stage_was_only_unpickled() -> None:
    # The operation that checks them is registered by a module of the tracer.
    _, pipe = split(by_mask, X, COUNTS)
    pipe.stages[0].__dict__["_modules"].pop("function", None)
    packed = pickle.dumps(pipe.stages[0]).hex()
    run = [sys.executable, "-c", _LOAD, packed]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "BatchError\n"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_conditions_are_checked_in_compiled_stages(backend: str) -> None:
    _, pipe = split(by_lengths, X, COUNTS)
    first = torch.compile(pipe.stages[0], backend=backend)
    assert first(X, COUNTS) is not None
    with pytest.raises(BatchError, match="as in its example"):
        first(X, torch.tensor([2, 2]))


def test_examples_without_values_answer_nothing() -> None:
    with pytest.raises(ModelError, match="the model cannot be traced"):
        split(by_branch, X, COUNTS.to("meta"))


def of_small_numbers(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    made = torch.as_tensor(counts[0])
    return x * 2 if counts[0] == 3 and made.dtype == torch.int32 else x


def test_numbers_keep_the_type_of_their_tensors() -> None:
    # Python's numbers, which a trace gave in the place of tensors, made 64 bits of 32.
    model, pipe = split(of_small_numbers, X, COUNTS.int())
    torch.testing.assert_close(pipe(X, COUNTS.int()), model(X, COUNTS.int()))


def test_a_mask_without_dimensions_adds_one() -> None:
    # It became the position 0, so that the first row took the place of all.
    model, pipe = split(lambda x: x[torch.tensor(True)].sum(0), X)
    torch.testing.assert_close(pipe(X), model(X))

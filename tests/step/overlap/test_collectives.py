"""Collectives that nobody marks are turning points, in forwards, backwards and compiled code."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd

import penstock as ps
from penstock.step.overlap.by_turns import run_by_turns
from penstock.step.overlap.collectives import CollectiveTurns
from penstock.step.overlap.generators import MemberGenerators
from penstock.step.overlap.turning import Counter, reaching
from penstock.torch_private import dispatch_modes


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]  # missing in torch's stubs
        rank=0,
        world_size=1,
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def turns_of(call: Callable[[], object]) -> int:
    """Return how often a call turns, where collectives are looked for."""
    mode, counter = CollectiveTurns(), Counter()
    with reaching(counter), mode.watching():
        call()
    assert dispatch_modes() == []
    assert mode.found <= counter.reached
    return counter.reached


def test_a_functional_collective_turns_before_it_is_awaited(group: dist.ProcessGroup) -> None:
    begun = []
    assert turns_of(lambda: begun.append(all_reduce(torch.ones(2), "sum", group))) == 0
    assert turns_of(lambda: begun.pop() + 1) == 1
    assert turns_of(lambda: all_reduce(torch.ones(2), "sum", group) + 1) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_collective_of_torch_distributed_turns_once_it_has_begun(is_async: bool) -> None:
    def exchange() -> None:
        work = dist.all_to_all_single(torch.empty(2), torch.ones(2), async_op=is_async)
        if work is not None:
            work.wait()

    assert turns_of(exchange) == 1


# Two of them have other names since torch 2.13, which call the same operations.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.empty(2), torch.ones(2)),
        lambda: dist.reduce_scatter(torch.empty(2), [torch.ones(2)]),
        lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2)),
    ],
)
def test_collectives_that_gather_or_add_up_turn(call: Callable[[], object]) -> None:
    assert turns_of(call) == 1


def test_other_calls_do_not_turn() -> None:
    assert turns_of(dist.barrier) == 0
    assert turns_of(lambda: dist.broadcast(torch.ones(2), 0)) == 0
    total = nn.Linear(2, 2)(torch.ones(1, 2)).sum()
    assert turns_of(lambda: torch.autograd.backward(total)) == 0


def test_a_marked_collective_turns_once() -> None:
    def begin(value: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        result = torch.empty_like(value)
        return result, dist.all_to_all_single(result, value, async_op=True)

    value = torch.ones(2, requires_grad=True)
    assert turns_of(lambda: ps.communicate(value, begin, begin)) == 1


def test_collectives_of_a_backward_turn_too(group: dist.ProcessGroup) -> None:
    value = torch.ones(2, requires_grad=True)
    result = all_to_all_single_autograd(value, [2], [2], group) * 2
    total = result.sum()
    assert turns_of(lambda: torch.autograd.backward(total)) == 1


def test_compiled_code_is_neither_compiled_again_nor_left(group: dist.ProcessGroup) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def compiled(value: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = all_reduce(value * 2, "sum", group) + 1
        return summed

    compiled(torch.ones(2))
    assert turns_of(lambda: compiled(torch.ones(2))) == 1
    assert turns_of(lambda: compiled(torch.ones(2))) == 1
    assert len(graphs) == 1


def test_two_members_run_beside_each_others_collectives(group: dist.ProcessGroup) -> None:
    notes: list[str] = []

    def member(name: str) -> Callable[[], None]:
        def run() -> None:
            with CollectiveTurns().watching():
                for number in range(2):
                    summed = all_reduce(torch.full((2,), number + 1.0), "sum", group)
                    notes.append(f"{name}{number}")
                    assert summed.tolist() == [number + 1.0] * 2
            notes.append(f"{name}2")

        return run

    generators = MemberGenerators([torch.default_generator], members=2, main=0)
    with ThreadPoolExecutor(1) as pool:
        assert run_by_turns([member("F"), member("B")], pool, generators) == [2, 2]
    assert " ".join(notes) == "F0 B0 F1 B1 F2 B2"

"""Calls that run by turns: who runs when, under which settings, and how errors end them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from penstock.ranks.peer.driver import current_context
from penstock.step.overlap.by_turns import MemberError, run_by_turns
from penstock.step.overlap.generators import MemberGenerators
from penstock.step.overlap.turning import turning_point, without_turns
from penstock.torch_private import TorchDispatchMode, dispatch_modes


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


def generators(members: int, main: int = 0) -> MemberGenerators:
    return MemberGenerators([torch.default_generator], members=members, main=main)


def notes_of(members: list[tuple[str, int]], pool: ThreadPoolExecutor) -> str:
    """Run members that turn this often; return the order of what they do."""
    notes: list[str] = []

    def member(name: str, turns: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(turns):
                notes.append(f"{name}{number}")
                turning_point()
            notes.append(f"{name}{turns}")

        return run

    turned = run_by_turns([member(*each) for each in members], pool, generators(len(members)))
    assert turned == [turns for _, turns in members]
    return " ".join(notes)


def test_two_members_alternate_at_their_turning_points(
    pool: ThreadPoolExecutor,
) -> None:
    assert notes_of([("F", 2), ("B", 2)], pool) == "F0 B0 F1 B1 F2 B2"


def test_a_member_continues_alone_when_the_other_is_done(pool: ThreadPoolExecutor) -> None:
    assert notes_of([("F", 3), ("W", 0)], pool) == "F0 W0 F1 F2 F3"
    assert notes_of([("W", 0), ("F", 2)], pool) == "W0 F0 F1 F2"


def test_three_members_go_round(pool: ThreadPoolExecutor) -> None:
    assert notes_of([("F", 1), ("B", 2), ("W", 0)], pool) == "F0 B0 W0 F1 B1 B2"


def test_the_first_member_runs_in_the_callers_thread(pool: ThreadPoolExecutor) -> None:
    found: list[int] = []
    run_by_turns([lambda: found.append(get_ident())] * 2, pool, generators(2))
    assert found[0] == get_ident() != found[1]


def test_nothing_turns_where_turns_are_off(pool: ThreadPoolExecutor) -> None:
    notes: list[str] = []

    def first() -> None:
        with without_turns():
            turning_point()
        notes.append("first")

    run_by_turns([first, lambda: notes.append("second")], pool, generators(2))
    assert notes == ["first", "second"]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_member_ends_the_other_at_its_turning_point(
    pool: ThreadPoolExecutor, failing: int
) -> None:
    ended: list[int] = []

    def member(number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                turning_point()
                if number == failing:
                    raise ValueError("broken")
                turning_point()
                ended.append(-1)
            except Exception:
                ended.append(number)
                raise
            finally:
                ended.append(number)

        return run

    with pytest.raises(MemberError) as caught:
        run_by_turns([member(0), member(1)], pool, generators(2))
    assert caught.value.number == failing
    assert repr(caught.value.error) == "ValueError('broken')"
    assert ended == [failing, failing, 1 - failing]


def test_an_error_before_the_other_member_has_begun_keeps_it_from_beginning(
    pool: ThreadPoolExecutor,
) -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(MemberError):
        run_by_turns([fail, lambda: pytest.fail("it has begun")], pool, generators(2))


def test_an_interrupt_in_a_member_is_raised_unchanged(pool: ThreadPoolExecutor) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_by_turns([turning_point, interrupted], pool, generators(2))


class _Functions(TorchFunctionMode):
    """A mode that sees functions of torch."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """A mode that sees operations."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def settings() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_device(),
        torch.empty(0).device,
        [type(mode).__name__ for mode in dispatch_modes()],
    ]


def test_other_members_have_the_settings_of_the_callers_thread(pool: ThreadPoolExecutor) -> None:
    def compare() -> None:
        found: list[list[Any]] = []
        run_by_turns([lambda: found.append(settings())] * 2, pool, generators(2))
        assert found[0] == found[1] == settings()

    compare()
    with torch.no_grad():
        compare()
    with torch.inference_mode():
        compare()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.device("meta"):
        compare()
    with _Functions(), _Operations():  # type: ignore[no-untyped-call]  # untyped upstream
        compare()
    # What a member is given stays in it.
    compare()


def test_hooks_of_saved_tensors_are_those_of_the_caller(pool: ThreadPoolExecutor) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(get_ident())
        return tensor

    def save() -> None:
        torch.ones(1, requires_grad=True).exp()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_by_turns([save, save], pool, generators(2))
    assert len(set(packed)) == 2
    run_by_turns([save, save], pool, generators(2))
    assert len(packed) == 2


def draw(found: list[float], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(count):
            found.append(torch.rand(()).item())
            turning_point()

    return run


@pytest.mark.parametrize("main", [0, 1])
def test_the_main_member_draws_what_it_would_alone(pool: ThreadPoolExecutor, main: int) -> None:
    torch.manual_seed(3)
    alone: list[float] = []
    draw(alone, 4)()
    after = torch.rand(()).item()
    numbers: list[list[float]] = [[], []]
    torch.manual_seed(3)
    run_by_turns([draw(numbers[0], 4), draw(numbers[1], 4)], pool, generators(2, main))
    assert numbers[main] == alone
    assert not set(numbers[1 - main]) & set(alone)
    assert torch.rand(()).item() == after


def test_a_checkpoint_draws_again_what_its_forward_drew(pool: ThreadPoolExecutor) -> None:
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        turning_point()
        return torch.dropout(x, 0.5, train=True) * torch.rand(8, dtype=torch.float64)

    def run(others: list[Callable[[], None]]) -> list[float]:
        torch.manual_seed(5)
        output = checkpoint(block, weight, use_reentrant=False)
        backward = output.sum().backward
        if others:
            run_by_turns([*others, backward], pool, generators(2))
        else:
            backward()
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.tolist(), None
        return [*gradient, *output.tolist()]

    assert run([draw([], 3)]) == run([])


@pytest.mark.gpu
def test_a_member_has_the_context_of_its_device_before_it_does_anything() -> None:
    # A member whose first call is a matrix product began with a warning of torch.
    found = []

    def member() -> None:
        found.append(current_context())

    torch.cuda.current_stream().synchronize()
    with ThreadPoolExecutor(2) as fresh:
        run_by_turns([member] * 3, fresh, generators(3))
    assert found == [current_context()] * 3
    assert found[0] != 0

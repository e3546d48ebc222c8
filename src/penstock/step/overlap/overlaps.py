"""Overlapped actions of one process: which run by turns, and which one after the other.

The first time a group of actions runs, its members run one after the other, and their turning
points are counted, with the collectives that torch knows. Where any member has one, the group runs
by turns from then on. What decides is the same on all ranks that communicate inside a stage,
because it depends on the order and on the model alone.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from penstock.ir.actions import Action, Kind
from penstock.step.layer_random import find_generators
from penstock.step.overlap.by_turns import MemberError, run_by_turns
from penstock.step.overlap.collectives import CollectiveTurns
from penstock.step.overlap.generators import MemberGenerators
from penstock.step.overlap.turning import Counter, reaching
from penstock.step.stage import Stage
from penstock.torch_private import peek_interpreter_stack

__all__ = ["Overlaps"]

# A stage and a kind of action.
_Key = tuple[int, Kind]


def _call_in(context: AbstractContextManager[None], call: Callable[[], None]) -> None:
    with context:
        call()


class Overlaps:
    """How the overlapped actions of one process run.

    With `takes_turns=False` they run one after the other, whatever they do, and with
    `finds_collectives=False` only the turning points count that the model marks.
    """

    def __init__(
        self, device: torch.device, *, takes_turns: bool = True, finds_collectives: bool = True
    ) -> None:
        self._device = device
        self._takes_turns = takes_turns
        self._finds_collectives = finds_collectives and takes_turns
        # The actions in which collectives were found.
        self._with_collectives: set[_Key] = set()
        # The turning points of an action, once it has run; and who runs modules in a backward.
        self._turns: dict[_Key, int] = {}
        self._runs_again: set[_Key] = set()
        self._shared: dict[tuple[Stage, Stage], bool] = {}
        self._apart: set[frozenset[int]] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = 0

    def run(
        self,
        actions: Sequence[Action],
        stages: Sequence[Stage],
        calls: Sequence[Callable[[], None]],
    ) -> None:
        """Run the calls of one group of actions; the error of one comes as a `MemberError`."""
        if self._may_turn(actions, stages):
            found = [self._finding((action.stage, action.kind)) for action in actions]
            self._run_by_turns(
                actions, [partial(_call_in, *each) for each in zip(found, calls, strict=True)]
            )
            return
        for number, (action, stage, call) in enumerate(zip(actions, stages, calls, strict=True)):
            key, counter = (action.stage, action.kind), Counter()
            is_new = key not in self._turns and action.kind is not Kind.FORWARD
            watching = self._watch(key, stage) if is_new else nullcontext()
            try:
                with reaching(counter), watching, self._finding(key):
                    call()
            except Exception as error:
                raise MemberError(number, error) from error
            self._turns[key] = counter.reached

    def close(self) -> None:
        """End the threads; those of an owner that is let go of end by themselves."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def describe(self) -> str:
        """Return how overlapped actions have run so far, or nothing if there were none."""
        if not self._turns:
            return ""
        turning = sorted({stage for (stage, _), count in self._turns.items() if count})
        if not turning:
            return "overlapped actions one after the other (no turning points)"
        if not self._takes_turns:
            return "overlapped actions one after the other (CUDA graphs have no turning points)"
        text = f"overlapped actions by turns (turning points in stages {turning})"
        apart = sorted({stage for group in self._apart for stage in group})
        return f"{text}, but not those of stages {apart} with themselves" if apart else text

    def _may_turn(self, actions: Sequence[Action], stages: Sequence[Stage]) -> bool:
        keys = [(action.stage, action.kind) for action in actions]
        if not self._takes_turns or not all(key in self._turns for key in keys):
            return False
        # A transform of `torch.func` around the step belongs to its thread.
        if not any(map(self._turns.__getitem__, keys)) or peek_interpreter_stack() is not None:
            return False
        pairs = [
            (first, second)
            for first in range(len(keys))
            for second in range(first)
            if not self._can_pause(keys[first], keys[second], stages[first], stages[second])
        ]
        self._apart.update(frozenset((keys[a][0], keys[b][0])) for a, b in pairs)
        return not pairs

    def _can_pause(self, key: _Key, other: _Key, stage: Stage, other_stage: Stage) -> bool:
        """Whether one action may run while another one is in the middle of its work.

        Not two runs of one module, which may keep something in itself meanwhile; nor two stages
        that share parameters whose hooks autograd runs under a lock, or that are data-parallel.
        """
        if not self._share(stage, other_stage):
            return True
        if self._runs_modules(key) and self._runs_modules(other):
            return False
        has_hooks = any(p._post_accumulate_grad_hooks for p in stage.module.parameters())
        return stage.replica.is_alone and not has_hooks

    def _runs_modules(self, key: _Key) -> bool:
        return key[1] is Kind.FORWARD or key in self._runs_again

    def _share(self, stage: Stage, other: Stage) -> bool:
        """Whether two stages have modules or parameters in common, as copies of a model do."""
        if (stage, other) not in self._shared:
            mine = {*stage.module.modules(), *stage.module.parameters()}
            theirs = {*other.module.modules(), *other.module.parameters()}
            self._shared[stage, other] = not mine.isdisjoint(theirs)
        return self._shared[stage, other]

    def _finding(self, key: _Key) -> AbstractContextManager[None]:
        """Return what finds the collectives of an action: in its first run, and if it had some."""
        is_open = key in self._with_collectives or key not in self._turns
        if not (is_open and self._finds_collectives and dist.is_initialized()):
            return nullcontext()
        return self._find(key)

    @contextmanager
    def _find(self, key: _Key) -> Iterator[None]:
        mode = CollectiveTurns()
        with mode.watching():
            yield
        if mode.found:
            self._with_collectives.add(key)

    @contextmanager
    def _watch(self, key: _Key, stage: Stage) -> Iterator[None]:
        """Notice whether a backward runs modules again, as checkpoints do."""
        own = set(stage.module.modules())

        def notice(module: nn.Module, _: Any) -> None:
            if module in own:
                self._runs_again.add(key)

        handle = register_module_forward_pre_hook(notice)
        try:
            yield
        finally:
            handle.remove()

    def _run_by_turns(
        self, actions: Sequence[Action], calls: Sequence[Callable[[], None]]
    ) -> None:
        pool = self._find_pool(len(actions) - 1)
        kinds = [action.kind for action in actions]
        main = kinds.index(Kind.FORWARD) if Kind.FORWARD in kinds else 0
        generators = MemberGenerators(
            find_generators(self._device), members=len(actions), main=main
        )
        turned = run_by_turns(calls, pool, generators)
        for action, count in zip(actions, turned, strict=True):
            self._turns[action.stage, action.kind] = count

    def _find_pool(self, threads: int) -> ThreadPoolExecutor:
        """Return at least as many threads; they stay, because each keeps threads of its own."""
        if self._pool is None or self._num_threads < threads:
            self.close()
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-overlap")
            self._num_threads = threads
        return self._pool

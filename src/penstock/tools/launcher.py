"""Processes on this machine that run what they are given, one for each rank.

this process                     rank 0            rank 1
starts a store and workers  -->  waits             waits
gives work                  -->  works             works
listens, with a limit       <--  reports
                            <--  answers      <--  answers       or reports its error
gives more work, or ends what is left

`run_on_ranks` is one piece of work from start to end; `Workers` keeps the processes for more.
"""

import os
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from signal import SIG_IGN, SIGINT, Signals, signal
from time import monotonic
from traceback import format_exception
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PipelineError
from penstock.torch_private import PrefixStore, Store, TCPStore

__all__ = [
    "Answered",
    "Ended",
    "Failed",
    "Report",
    "Reported",
    "WorkerContext",
    "WorkerMessage",
    "Workers",
    "join_group",
    "prepare_rank",
    "run_on_ranks",
]

# What work calls to report something to the process that gave it, before it is done.
Report: TypeAlias = Callable[[Any], None]

_HOST = "127.0.0.1"
# How long a process gets to end by itself, and again when it was killed.
_SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True)
class Reported:
    """Something that work reports before it is done."""

    value: Any


@dataclass(frozen=True, slots=True)
class Answered:
    """What work has returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Why work has failed; the process waits for more."""

    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code of a process that ended without an answer."""

    exit_code: int


WorkerMessage: TypeAlias = Reported | Answered | Failed | Ended


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What work gets in its process; `state` is what the process was prepared with."""

    rank: int
    store: Store
    report: Report
    state: Any


# What a process does around all of its work; what it yields is `WorkerContext.state`.
Prepare: TypeAlias = Callable[[int], AbstractContextManager[Any]]


@contextmanager
def prepare_rank(rank: int) -> Iterator[None]:
    """Let a process compute with one thread, and leave interrupts to whoever started it."""
    del rank
    signal(SIGINT, SIG_IGN)
    torch.set_num_threads(1)
    yield


class Workers:
    """Processes that run work, one for each rank; a context that leaves no process behind.

    They are forked from a server that has loaded `preload`, so that they start fast.
    """

    def __init__(
        self, ranks: int, *, prepare: Prepare = prepare_rank, preload: Sequence[str] = ("torch",)
    ) -> None:
        self._ranks = ranks
        self._prepare = prepare
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        # The store takes a free port itself and keeps it, so that no other process can get it.
        self._store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> Self:
        try:
            for rank in range(self._ranks):
                self._start(rank)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.end()
        else:
            self.kill()

    def give(self, rank: int, work: Callable[[WorkerContext], Any]) -> None:
        """Let a process run work that can be pickled, once it is done with what it has."""
        self._pipes[rank].send_bytes(pickle.dumps(work))

    def listen(self, ranks: Collection[int], seconds: float) -> list[tuple[int, WorkerMessage]]:
        """Return what ranks say, as soon as one does; nothing if none does in time."""
        ranks_of = {self._pipes[rank]: rank for rank in ranks}
        heard = wait(list(ranks_of), max(0.0, seconds))
        return [(rank, self._read(rank)) for pipe, rank in ranks_of.items() if pipe in heard]

    def wait_for_end(self, ranks: Collection[int], seconds: float) -> list[int | None]:
        """Wait until processes have ended; return their exit codes, None if one still runs."""
        deadline = monotonic() + seconds
        for rank in ranks:
            self._processes[rank].join(max(0.0, deadline - monotonic()))
        return [self._processes[rank].exitcode for rank in ranks]

    def send_signal(self, rank: int, number: Signals) -> None:
        """Send a signal to a process."""
        pid = self._processes[rank].pid
        assert pid is not None, "the process was started"
        os.kill(pid, number)

    def replace(self, rank: int) -> None:
        """Kill a process, whatever it is doing, and start another one."""
        self._kill(rank)
        self._start(rank)

    def end(self) -> None:
        """Let the processes end by themselves, and kill those that do not."""
        for pipe in self._pipes.values():
            pipe.close()
        self.wait_for_end(list(self._processes), _SECONDS_TO_END)
        self.kill()

    def kill(self) -> None:
        """End every process, whatever it is doing."""
        for rank in list(self._processes):
            self._kill(rank)

    def _start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_run_worker,
            args=(rank, self._store.port, theirs, self._prepare),
            name=f"penstock rank {rank}",
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes[rank], self._pipes[rank] = process, ours

    def _kill(self, rank: int) -> None:
        process = self._processes.pop(rank)
        process.kill()
        process.join(_SECONDS_TO_END)
        process.close()
        self._pipes.pop(rank).close()

    def _read(self, rank: int) -> WorkerMessage:
        try:
            message: WorkerMessage = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_SECONDS_TO_END)
            return Ended(self._processes[rank].exitcode or 0)
        return message


def join_group(
    context: WorkerContext,
    ranks: int,
    *,
    name: str,
    seconds: float,
    backend: str = "gloo",
    device: torch.device | None = None,
) -> None:
    """Make this process a member of a group that no other work has joined under this name."""
    dist.init_process_group(
        backend,
        store=PrefixStore(name, context.store),
        rank=context.rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
        device_id=device,
    )


def run_on_ranks(
    work: Callable[[Report], Any],
    ranks: int,
    *,
    seconds: float,
    on_report: Callable[[int, Any], None] = lambda _rank, _value: None,
) -> list[Any]:
    """Start processes that each run `work` as a member of one gloo group, and end them.

    Returns what each rank returned. `work` is a function that can be pickled. It may report, and
    `on_report` is called here with the rank and what it reported. If nothing is heard for
    `seconds`, or a rank fails, all processes are ended and an error says which rank and why.
    """
    with Workers(ranks) as workers:
        for rank in range(ranks):
            workers.give(rank, partial(_work_in_group, work, ranks, seconds))
        try:
            return _listen_to_all(workers, ranks, seconds, on_report)
        except PipelineError as error:
            # A rank that died is the cause of what the others complain about.
            codes = enumerate(workers.wait_for_end(range(ranks), 0.0))
            dead = [f"the process of rank {r} ended with exit code {c}" for r, c in codes if c]
            raise PipelineError("\n".join([*dead, str(error)])) from None


def _listen_to_all(
    workers: Workers, ranks: int, seconds: float, on_report: Callable[[int, Any], None]
) -> list[Any]:
    """Wait until every rank has answered; raise what the first one to fail says."""
    answers: dict[int, Any] = {}
    while len(answers) < ranks:
        silent = [rank for rank in range(ranks) if rank not in answers]
        heard = workers.listen(silent, seconds)
        if not heard:
            names = ", ".join(map(str, silent))
            raise PipelineError(f"nothing was heard of ranks {names} for {seconds:g} seconds")
        for rank, message in heard:
            match message:
                case Answered(value):
                    answers[rank] = value
                case Reported(value):
                    on_report(rank, value)
                case Failed(text):
                    raise PipelineError(f"the process of rank {rank} failed: {text}")
                case Ended():
                    raise PipelineError(f"the process of rank {rank} gave no answer")
    return [answers[rank] for rank in range(ranks)]


def _work_in_group(
    work: Callable[[Report], Any], ranks: int, seconds: float, context: WorkerContext
) -> Any:
    join_group(context, ranks, name="only", seconds=seconds)
    answer = work(context.report)
    # Nobody leaves before all are done, because a peer may still be talking to this rank.
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _run_worker(rank: int, port: int, pipe: Connection, prepare: Prepare) -> None:
    """Run one piece of work after the other, until the pipe is closed."""

    def send(message: WorkerMessage) -> None:
        # Plain pickling: tensors go by value, and share no memory between processes.
        pipe.send_bytes(pickle.dumps(message))

    with prepare(rank) as state:
        store = TCPStore(_HOST, port, is_master=False)
        context = WorkerContext(rank, store, lambda value: send(Reported(value)), state)
        while True:
            try:
                data = pipe.recv_bytes()
            except EOFError:
                return
            try:
                send(Answered(pickle.loads(data)(context)))
            except Exception as error:
                send(Failed(_describe(error)))


def _describe(error: Exception) -> str:
    """Say what went wrong, and where in the code unless the error explains itself."""
    if not isinstance(error, PenstockError):
        return "".join(format_exception(error))
    cause = "" if error.__cause__ is None else "\n" + "".join(format_exception(error.__cause__))
    return f"{error}{cause}"

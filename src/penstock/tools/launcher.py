"""Run a function on every rank of a group of local gloo processes, and hear from each.

this process                rank 0            rank 1
starts a store       ----->  joins   ----->   joins
waits, with a limit  <-----  reports
                     <-----  answers <-----   answers       or tells its error
ends what is left
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from signal import SIG_IGN, SIGINT, signal
from traceback import format_exception
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, PipelineError

__all__ = ["Report", "run_on_ranks"]

# What a rank calls to tell this process something while it works.
Report: TypeAlias = Callable[[Any], None]

_Store = dist.TCPStore  # type: ignore[attr-defined]  # public, but not typed as exported

_HOST = "127.0.0.1"
# How long a process gets to end by itself once it has answered, and again when it was told to.
_SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str


def run_on_ranks(
    work: Callable[[Report], Any],
    ranks: int,
    *,
    seconds: float,
    on_report: Callable[[int, Any], None] = lambda _rank, _value: None,
) -> list[Any]:
    """Start `ranks` processes that each run `work`, as members of one gloo group.

    Returns what each rank returned. `work` is a function that can be pickled; it may report, and
    `on_report` is called here with the rank and what it said. If nothing is heard for `seconds`,
    or a rank fails, all are ended and an error tells which and why.
    """
    store = _Store(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )
    context = get_context("spawn")
    processes: list[SpawnProcess] = []
    receivers: list[Connection] = []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank,
                args=(work, rank, ranks, store.port, seconds, sender),
                name=f"penstock rank {rank}",
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        answers = _listen(processes, receivers, seconds, on_report)
        for process in processes:
            process.join(_SECONDS_TO_END)
        return answers
    except PipelineError as error:
        # A rank that died without a word is the cause of what the others complain about.
        dead = [f"{p.name} ended with exit code {p.exitcode}" for p in processes if p.exitcode]
        raise PipelineError("\n".join([*dead, str(error)])) from None
    finally:
        _end(processes)
        for receiver in receivers:
            receiver.close()


def _listen(
    processes: list[SpawnProcess],
    receivers: list[Connection],
    seconds: float,
    on_report: Callable[[int, Any], None],
) -> list[Any]:
    """Wait until every rank has answered; raise what the first one to fail says."""
    answers: dict[int, Any] = {}
    while len(answers) < len(receivers):
        silent = [r for rank, r in enumerate(receivers) if rank not in answers]
        heard = wait(silent, seconds)
        if not heard:
            ranks = ", ".join(str(rank) for rank in range(len(receivers)) if rank not in answers)
            raise PipelineError(f"nothing was heard of ranks {ranks} for {seconds:g} seconds")
        for rank, receiver in enumerate(receivers):
            if receiver not in heard:
                continue
            match _receive(receiver, processes[rank]):
                case _Answer(value):
                    answers[rank] = value
                case _Failure(message):
                    raise PipelineError(f"the process of rank {rank} failed: {message}")
                case value:
                    on_report(rank, value)
    return [answers[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, process: SpawnProcess) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        process.join(_SECONDS_TO_END)
        return _Failure("it ended without an answer")


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()


def _run_rank(
    work: Callable[[Report], Any],
    rank: int,
    ranks: int,
    port: int,
    seconds: float,
    sender: Connection,
) -> None:
    """What a process does: join the group, work, answer."""
    # Whoever started this process ends it; an interrupt from the keyboard is for them.
    signal(SIGINT, SIG_IGN)
    torch.set_num_threads(1)
    limit = timedelta(seconds=seconds)
    try:
        store = _Store(_HOST, port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        answer = work(sender.send)
        # Nobody leaves before all are done, for a peer may still be talking to this rank.
        dist.barrier()
        dist.destroy_process_group()
        sender.send(_Answer(answer))
    except Exception as error:
        sender.send(_Failure(_describe(error)))


def _describe(error: Exception) -> str:
    """What went wrong, and where in the code, unless it is an error that explains itself."""
    if not isinstance(error, PenstockError):
        return "".join(format_exception(error))
    cause = "" if error.__cause__ is None else "\n" + "".join(format_exception(error.__cause__))
    return f"{error}{cause}"

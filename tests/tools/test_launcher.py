"""Local processes: answers, reports and every way to fail. All tests start real processes."""

import os
import signal
import sys
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from penstock.errors import PipelineError, SizeError
from penstock.tools.launcher import (
    Answered,
    Ended,
    Failed,
    Report,
    Reported,
    WorkerContext,
    WorkerMessage,
    Workers,
    join_group,
    run_on_ranks,
)

SECONDS = 240.0


def add_up(report: Report) -> tuple[int, float, int]:
    rank = dist.get_rank()
    report(f"rank {rank} is there")
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return rank, float(total), torch.get_num_threads()


def fail_on_rank_1(how: str, _report: Report) -> None:
    if dist.get_rank() == 1:
        match how:
            case "raise":
                raise ZeroDivisionError("no water")
            case "refuse":
                raise SizeError("use 2 or more") from KeyError("the cause")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
    # Rank 0 waits for a message that never comes.
    dist.recv(torch.zeros(1), src=1)


def test_every_rank_reports_and_answers() -> None:
    heard: list[tuple[int, Any]] = []
    answers = run_on_ranks(
        add_up, 2, seconds=SECONDS, on_report=lambda rank, value: heard.append((rank, value))
    )
    assert answers == [(0, 3.0, 1), (1, 3.0, 1)]
    assert sorted(heard) == [(0, "rank 0 is there"), (1, "rank 1 is there")]


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("raise", ["rank 1 failed", "raise ZeroDivisionError", "no water"]),
        ("refuse", ["rank 1 failed: use 2 or more", "KeyError: 'the cause'"]),
        ("die", ["the process of rank 1 ended with exit code -9"]),
    ],
)
def test_failure_of_one_rank_ends_all(how: str, messages: list[str]) -> None:
    with pytest.raises(PipelineError) as caught:
        run_on_ranks(partial(fail_on_rank_1, how), 2, seconds=SECONDS)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.slow
def test_silence_has_a_limit() -> None:
    with pytest.raises(PipelineError, match=r"nothing was heard|imed out"):
        run_on_ranks(partial(fail_on_rank_1, "hang"), 2, seconds=15)


# ---- workers that stay


def add_up_as_member(name: str, context: WorkerContext) -> tuple[float, int]:
    """Sum over a new group; the process is the same one every time."""
    join_group(context, 2, name=name, seconds=SECONDS)
    total = torch.tensor(float(context.rank + 1))
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return float(total), os.getpid()


def report_and_fail(context: WorkerContext) -> None:
    context.report(context.rank)
    raise SizeError("use 2 or more")


def return_a_lambda(_: WorkerContext) -> object:
    return lambda: None


def exit_at_once(_: WorkerContext) -> None:
    sys.exit(7)


def listen_once(workers: Workers, rank: int) -> WorkerMessage:
    ((_, message),) = workers.listen([rank], SECONDS)
    return message


def answers_of(workers: Workers) -> list[tuple[float, int]]:
    found = []
    for rank in range(2):
        match listen_once(workers, rank):
            case Answered(value):
                found.append(value)
            case other:
                raise AssertionError(other)
    return found


def test_workers_run_one_piece_of_work_after_the_other() -> None:
    with Workers(2) as workers:
        seen = []
        for name in ("first", "second"):
            for rank in range(2):
                workers.give(rank, partial(add_up_as_member, name))
            seen.append(answers_of(workers))
        assert [[total for total, _ in answers] for answers in seen] == [[3.0, 3.0]] * 2
        assert seen[0] == seen[1]
        # A failure leaves the process fit for more, and so does an answer that cannot be sent.
        workers.give(0, report_and_fail)
        assert [listen_once(workers, 0) for _ in range(2)] == [
            Reported(0),
            Failed("use 2 or more"),
        ]
        workers.give(0, return_a_lambda)
        assert isinstance(listen_once(workers, 0), Failed)
        workers.give(0, exit_at_once)
        assert listen_once(workers, 0) == Ended(7)
        workers.replace(0)
        for rank in range(2):
            workers.give(rank, partial(add_up_as_member, "third"))
        (_, replaced), (_, kept) = answers_of(workers)
        assert kept == seen[0][1][1]
        assert replaced != seen[0][0][1]
    for pid in (replaced, kept):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def hang(context: WorkerContext) -> None:
    context.report(os.getpid())
    signal.pause()


def leave_with_an_error(pids: list[int]) -> None:
    with Workers(1) as workers:
        workers.give(0, hang)
        message = listen_once(workers, 0)
        assert isinstance(message, Reported)
        pids.append(message.value)
        assert workers.listen([0], 0.0) == []
        raise KeyError


def test_workers_that_hang_are_killed_when_an_error_leaves_the_context() -> None:
    pids: list[int] = []
    with pytest.raises(KeyError):
        leave_with_an_error(pids)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)

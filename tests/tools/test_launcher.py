"""Local processes: answers, reports and every way to fail. All of these start real processes."""

import os
import signal
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from penstock.errors import PipelineError, SizeError
from penstock.tools.launcher import Report, run_on_ranks

SECONDS = 60.0


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
        ("die", ["penstock rank 1 ended with exit code -9"]),
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

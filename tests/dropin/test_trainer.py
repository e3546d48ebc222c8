"""A whole training program, run unchanged under torch's own module and under ours."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.dropin.names.lists import write_order
from penstock.dropin.orders.tables import build_order

SCRIPT = Path(__file__).with_name("trainer.py")
LIMIT_SECONDS = 150


def run_trainer(*arguments: str, is_ours: bool) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    under = ["-m", "penstock.dropin"] if is_ours else []
    result = subprocess.run(
        [sys.executable, *under, *launcher, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return told


def compare(*arguments: str) -> None:
    ours, theirs = (run_trainer(*arguments, is_ours=is_ours) for is_ours in (True, False))
    assert ours["module"].startswith("penstock.dropin")
    assert theirs["module"].startswith("torch.distributed.pipelining")
    assert any(told for told, _ in ours["ranks"])
    for mine, other in zip(ours["ranks"], theirs["ranks"], strict=True):
        assert mine[0] == pytest.approx(other[0], rel=0, abs=1e-12)
        assert mine[1] == pytest.approx(other[1], rel=0, abs=1e-12)


@pytest.mark.slow
def test_a_trainer_runs_unchanged_with_the_same_losses() -> None:
    compare("Interleaved1F1B")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "LoopedBFS"])
def test_a_trainer_runs_unchanged_with_every_schedule(schedule: str) -> None:
    compare(schedule)


@pytest.mark.slow
def test_a_trainer_runs_a_schedule_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    write_order(build_order("Interleaved1F1B", 2, 4, 2), path)
    compare("Interleaved1F1B", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_validation_between_steps_works_with_a_split_backward(schedule: str) -> None:
    # With V schedules torch's own module stops in its first validation, so 1F1B is the reference.
    ours = run_trainer(schedule, is_ours=True)
    expected = run_trainer("1F1B", is_ours=True)
    losses = [value for told, _ in ours["ranks"] for value in told]
    assert losses == pytest.approx(
        [value for told, _ in expected["ranks"] for value in told], rel=0, abs=1e-12
    )

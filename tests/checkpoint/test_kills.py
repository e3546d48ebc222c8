"""Processes that are killed while they save: the last complete step can always be loaded."""

import random
import signal
from functools import partial
from pathlib import Path

import pytest

import penstock as ps
from penstock.tools.launcher import Ended, Reported, Workers
from tests.checkpoint.victim import Point, make_pipeline, save_until_killed

# About how many calls on files a save makes, and how many bytes it writes to one of them.
_CALLS, _BYTES = 27, 24_000


def kill_while_saving(folder: Path, point: Point) -> int | None:
    """Return the last step that a process reported as complete before it was killed."""
    last = None
    with Workers(1, preload=["penstock.checkpoint.checkpoints"]) as workers:
        workers.give(0, partial(save_until_killed, folder, point))
        while True:
            match workers.listen([0], 300.0):
                case [(_, Reported(step))]:
                    last = step
                case [(_, Ended(code))]:
                    assert code in (-signal.SIGKILL, -signal.SIGXFSZ)
                    return last
                case other:
                    raise AssertionError(other)


def kill_many(folder: Path, times: int) -> set[bool]:
    """Kill processes one after the other; return whether each left a partial step."""
    generator = random.Random(times)
    pipeline, complete = make_pipeline(), 0
    left = set()
    for number in range(times):
        # Every third dies in the middle of a file, the others before a call, a few saves on.
        call, byte = generator.randrange(3 * _CALLS), generator.randrange(_BYTES)
        point = Point("byte", byte) if number % 3 == 2 else Point("call", call)
        reported = kill_while_saving(folder, point)
        complete = complete if reported is None else reported
        restored = ps.Checkpoints(folder).load(pipeline)
        if restored is None:
            assert complete == 0
            continue
        # It may have been killed between the completion of a step and its report.
        assert restored.step - complete in (0, 1)
        complete = restored.step
        numbers = {
            number for t in pipeline.state_dict().values() for number in t.unique().tolist()
        }
        assert numbers == {float(complete)}
        left.add(any(path.is_dir() for path in (folder / ".penstock").iterdir()))
    return left


def test_process_killed_while_saving_leaves_the_last_complete_step(tmp_path: Path) -> None:
    kill_many(tmp_path / "run", 6)


@pytest.mark.slow
def test_fifty_kills_at_random_points_leave_the_last_complete_step(tmp_path: Path) -> None:
    # Among fifty points, some are inside of a save and some between two saves.
    assert kill_many(tmp_path / "run", 50) == {True, False}

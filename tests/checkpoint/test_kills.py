"""Processes that are killed while they save: the last complete step can always be loaded."""

import multiprocessing
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import penstock as ps
from tests.checkpoint.victim import Point, make_pipeline, save_until_killed

# A save makes about so many calls on files, and writes so many bytes to one of them.
_CALLS, _BYTES = 27, 24_000


def kill_while_saving(folder: Path, point: Point) -> int | None:
    """The last step that a process has completed before it was killed, as it said itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["penstock.checkpoint.checkpoints"])
    ours, theirs = context.Pipe(duplex=False)
    victim = context.Process(target=save_until_killed, args=(folder, point, theirs), daemon=True)
    victim.start()
    theirs.close()
    victim.join(timeout=300)
    is_killed = victim.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ)
    victim.kill()
    victim.join()
    assert is_killed
    return _last(ours)


def _last(results: Connection) -> int | None:
    last = None
    with results:
        while True:
            try:
                last = results.recv()
            except EOFError:
                return last


def kill_many(folder: Path, times: int) -> set[bool]:
    """Kill so many processes, one after the other; whether each left something half-written."""
    generator = random.Random(times)
    pipeline, complete = make_pipeline(), 0
    left = set()
    for number in range(times):
        # Every third dies in the middle of a file, the others before a call, a few saves on.
        call, byte = generator.randrange(3 * _CALLS), generator.randrange(_BYTES)
        point = Point("byte", byte) if number % 3 == 2 else Point("call", call)
        told = kill_while_saving(folder, point)
        complete = complete if told is None else told
        restored = ps.Checkpoints(folder).load(pipeline)
        if restored is None:
            assert complete == 0
            continue
        # It may have been killed between the completion of a step and the news of it.
        assert restored.step - complete in (0, 1)
        complete = restored.step
        numbers = {
            number for t in pipeline.state_dict().values() for number in t.unique().tolist()
        }
        assert numbers == {float(complete)}
        left.add(any(path.name.endswith(".partial") for path in folder.iterdir()))
    return left


def test_a_process_killed_while_saving_leaves_the_last_complete_step(tmp_path: Path) -> None:
    kill_many(tmp_path / "run", 6)


@pytest.mark.slow
def test_fifty_kills_at_random_points_leave_the_last_complete_step(tmp_path: Path) -> None:
    # Points inside of a save and between two of them are both among so many.
    assert kill_many(tmp_path / "run", 50) == {True, False}

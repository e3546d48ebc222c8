"""One job at a time saves to a folder, and a job that ended does not block its successor."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads

import pytest
from torch import nn

import penstock as ps
from penstock.checkpoint.saving.completing import Completion, Whole
from penstock.checkpoint.storage.lease import LEASE, Lease
from penstock.checkpoint.storage.local import LocalStorage
from penstock.checkpoint.storage.processes import is_alive, this_process
from penstock.checkpoint.storage.steps import RenamedSteps
from penstock.errors import CheckpointError

SECONDS = 0.6
# A lease of this length is not renewed while a test writes to its file.
LONG_SECONDS = 60.0
LIMIT_SECONDS = 240.0
# From a server that has loaded torch, because starting it seven times took most of the time.
FORKED = get_context("forkserver")


def make_pipeline() -> ps.Pipeline:
    return ps.Pipeline([nn.Linear(2, 2)], "GPipe", microbatches=1, loss=nn.MSELoss())


@contextmanager
def held(storage: LocalStorage, seconds: float = SECONDS) -> Iterator[Lease]:
    lease = Lease(storage, seconds)
    lease.hold()
    try:
        yield lease
    finally:
        lease.release()


def pretend(folder: Path, **changes: object) -> None:
    """Let the lease be of a process on another machine."""
    file = folder / LEASE
    facts = json.loads(file.read_text())
    process = replace(this_process(), machine="another boot of another machine")
    # At once, as a job does: nobody reads half of a lease.
    half = folder / "half"
    half.write_text(json.dumps(facts | {"process": asdict(process), "job": "ab"} | changes))
    half.replace(file)


def test_lease_is_given_back(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with held(storage) as lease:
        lease.hold()
        assert storage.size(LEASE) is not None
    assert storage.size(LEASE) is None


class Collecting(LocalStorage):
    """Storage in which the lease is released while it is renewed."""

    lease: Lease

    def replace(self, name: str, data: bytes) -> None:
        self.lease.release()
        super().replace(name, data)


def test_lease_that_is_released_by_its_own_thread_is_given_back(tmp_path: Path) -> None:
    # Garbage was collected in the thread that renews, which then tried to join itself.
    storage = Collecting(tmp_path)
    storage.lease = Lease(storage, 0.06)
    storage.lease.hold()
    for thread in enumerate_threads():
        if thread.name == "renew the lease":
            thread.join(LIMIT_SECONDS)
    assert storage.size(LEASE) is None


def test_lease_that_is_not_renewed_elsewhere_is_taken_over(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with held(storage, LONG_SECONDS) as first:
        pretend(tmp_path)
        with held(storage) as second:
            message = "has lost its lease of .* has taken it over"
            with pytest.raises(CheckpointError, match=message):
                first.hold()
            second.hold()


def test_lease_that_is_renewed_elsewhere_is_refused_with_who_has_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with held(storage, LONG_SECONDS):
        pretend(tmp_path, host="node7", since="noon")
        other = Lease(storage, 30.0)

        errors = []

        def wait() -> None:
            try:
                other.hold()
            except CheckpointError as error:
                errors.append(str(error))

        waiting = Thread(target=wait)
        waiting.start()
        # The other job renews its lease while this one looks.
        for number in count(1):
            pretend(tmp_path, host="node7", since="noon", renewals=number)
            waiting.join(0.05)
            if not waiting.is_alive():
                break
    assert errors == [
        f"{tmp_path} must be saved to by one job at a time (process {os.getpid()} on node7 since "
        "noon uses it); end that job, or save to another folder"
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"job": 1}', "\0" * 100])
def test_unreadable_lease_lasts_no_longer_than_another(text: str, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create(LEASE, text.encode())
    with held(storage) as lease:
        lease.hold()


def test_file_that_cannot_be_a_lease_is_refused(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create(LEASE, bytes(10_000))
    with pytest.raises(CheckpointError, match=r"must be a lease .it has 10,000 bytes.; remove it"):
        Lease(storage, SECONDS).hold()


def test_process_is_known_by_its_start() -> None:
    process = this_process()
    assert is_alive(process) is True
    assert is_alive(replace(process, start="1")) is False
    assert is_alive(replace(process, machine="another")) is None


def save_when_asked(folder: Path, lease_seconds: float, asked: Connection) -> None:
    """Save a step for every message, and answer how it went."""
    checkpoints = ps.Checkpoints(folder, keep=1000, lease_seconds=lease_seconds)
    pipeline, step = make_pipeline(), max(checkpoints.steps(), default=0)
    asked.send("ready")
    while asked.recv():
        try:
            checkpoints.save(step + 1, pipeline, wait=True)
        except CheckpointError as error:
            asked.send(str(error))
        else:
            step += 1
            asked.send(f"saved {step}")


class Job:
    """A job in a process of its own, which saves when it is asked to."""

    def __init__(self, folder: Path, lease_seconds: float = 30.0) -> None:
        self._asked, theirs = Pipe()
        arguments = (folder, lease_seconds, theirs)
        self.process = FORKED.Process(target=save_when_asked, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def number(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def answer(self) -> str:
        assert self._asked.poll(LIMIT_SECONDS), "no answer"
        return str(self._asked.recv())

    def ask(self) -> None:
        self._asked.send(True)

    def save(self) -> str:
        self.ask()
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_SECONDS)
        self._asked.close()


@contextmanager
def jobs(count: int, folder: Path, lease_seconds: float = 30.0) -> Iterator[list[Job]]:
    started = [Job(folder, lease_seconds) for _ in range(count)]
    try:
        # Each has looked for the last step before one of them saves another.
        assert [job.answer() for job in started] == ["ready"] * count
        yield started
    finally:
        for job in started:
            job.kill()


def test_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    # Two jobs destroyed each other's saves, with no hint at the cause.
    (tmp_path / "run" / "step-00000005.partial").mkdir(parents=True)
    (tmp_path / "run" / "step-00000005.partial" / "mine.txt").write_text("of the user")
    with jobs(2, tmp_path / "run") as (first, second):
        assert first.save() == "saved 1"
        number = first.number
        start = "step 1 cannot be saved: "
        message = f"{tmp_path / 'run'} must be saved to by one job at a time (process {number} on "
        assert second.save().startswith(start + message)
        assert first.save() == "saved 2"
        first.kill()
        # It does not wait until the lease of a process of this machine ends.
        refused = second.save()
        assert "step must be newer" in refused
        with jobs(1, tmp_path / "run") as (third,):
            assert "one job at a time" in third.save()
            second.kill()
            assert third.save() == "saved 3"
    assert ps.Checkpoints(tmp_path / "run").steps() == (1, 2, 3)
    # Only what is ours is ever removed.
    assert (tmp_path / "run" / "step-00000005.partial" / "mine.txt").exists()


class Slow(LocalStorage):
    """Storage in which another job takes over right before this one does."""

    other: Lease

    def replace_if(self, path: str, before: bytes, data: bytes) -> bool:
        self.other.hold()
        return super().replace_if(path, before, data)


# It had looked before the other job took over, and wrote after that had made sure of its lease:
# then both had it, or neither.
def test_job_that_takes_over_too_late_is_refused(tmp_path: Path) -> None:
    storage = Slow(tmp_path)
    storage.other = Lease(LocalStorage(tmp_path), LONG_SECONDS)
    with held(LocalStorage(tmp_path)):
        facts = json.loads((tmp_path / LEASE).read_text())
    facts["process"]["start"] = "1"
    (tmp_path / LEASE).write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match="one job at a time"):
        # As another process of this machine.
        late(Lease(storage, LONG_SECONDS)).hold()
    storage.other.hold()
    storage.other.release()


def late(lease: Lease) -> Lease:
    """Let a lease be of another process than this one."""
    number = this_process().number + 1
    vars(lease)["_process"] = replace(this_process(), number=number, start="2")
    return lease


def test_of_two_jobs_that_take_over_at_once_one_saves(tmp_path: Path) -> None:
    with held(LocalStorage(tmp_path)):
        text = (tmp_path / LEASE).read_text()
    with jobs(2, tmp_path) as pair:
        # The lease of a process of this machine that has ended.
        ended = json.loads(text)
        ended["process"]["start"] = "1"
        (tmp_path / LEASE).write_text(json.dumps(ended))
        for job in pair:
            job.ask()
        answers = [job.answer() for job in pair]
        assert answers.count("saved 1") == 1, answers
        for job in pair:
            job.ask()
        answers += [job.answer() for job in pair]
        assert answers.count("saved 2") == 1, answers
    assert ps.Checkpoints(tmp_path).steps() == (1, 2)


class TakenOver(RenamedSteps):
    """Steps that another job takes over when the second of them is complete."""

    def publish(self, step: int, job: str, manifest: bytes) -> None:
        super().publish(step, job, manifest)
        if step == 2:
            pretend(Path(self.storage.show("")))


def test_job_that_lost_its_lease_removes_no_step(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    steps = TakenOver(storage)
    lease = Lease(storage, 30.0)
    lease.hold()
    completion = Completion(steps, lease, keep=1)

    def complete(step: int) -> str | None:
        folder = steps.begin(step, lease.job)
        whole = Whole(step, folder, 1, None, {}, {}, {})
        return completion.complete(whole, {}, [], "", {})

    assert complete(1) is None
    message = complete(2)
    assert message is not None
    assert message.startswith(
        "step 2 is complete, but older ones were not removed: this job has lost its lease"
    )
    lease.release()
    assert steps.complete() == (1, 2)


@pytest.mark.slow
def test_jobs_that_are_killed_one_after_the_other_lose_nothing(tmp_path: Path) -> None:
    last = 0
    for _ in range(10):
        with jobs(2, tmp_path / "run") as pair:
            answers = [job.save() for job in pair for _ in range(3)]
            saved = [int(answer.split()[1]) for answer in answers if answer.startswith("saved")]
            assert saved == [last + 1, last + 2, last + 3], answers
            last = saved[-1]
    pipeline = make_pipeline()
    checkpoints = ps.Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == tuple(range(1, last + 1))
    for step in checkpoints.steps():
        assert checkpoints.load(pipeline, step=step) is not None


def test_job_that_was_stopped_finds_out_that_another_has_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with jobs(1, folder, LONG_SECONDS) as (stopped,):
        assert stopped.save() == "saved 1"
        os.kill(stopped.number, signal.SIGSTOP)
        # To a job on another machine it looks as if it had ended.
        facts = json.loads((folder / LEASE).read_text())
        facts["process"]["machine"] = "another"
        (folder / LEASE).write_text(json.dumps(facts))
        with ps.Checkpoints(folder, lease_seconds=SECONDS) as checkpoints:
            checkpoints.save(2, make_pipeline(), wait=True)
            os.kill(stopped.number, signal.SIGCONT)
            assert "this job has lost its lease" in stopped.save()
            checkpoints.save(3, make_pipeline(), wait=True)
        assert checkpoints.steps() == (2, 3)

"""Local folders and object stores: the same promises, by a rename or by a marker."""

import errno
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import penstock as ps
from penstock.checkpoint.storage.interface import OWN_FOLDER
from penstock.checkpoint.storage.local import LocalStorage
from penstock.checkpoint.storage.objects import ObjectStorage
from penstock.checkpoint.storage.steps import MANIFEST, RenamedSteps, open_steps
from penstock.checkpoint.storage.words import in_words
from penstock.errors import ArgumentError, CheckpointError, MissingDependencyError
from tests.checkpoint.jobs import make_model, train_alone, whole_state
from tests.models import differences


@pytest.fixture(params=["folder", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "folder":
            yield str(tmp_path / "run")
        case "file":
            yield f"file://{tmp_path}/run"
        case _:
            yield f"memory://{uuid4().hex}"


def test_any_storage_keeps_the_newest_steps_and_gives_them_back(place: str) -> None:
    training = train_alone("1F1B", 2)
    states = {}
    with ps.Checkpoints(place) as checkpoints:
        assert checkpoints.load(training.pipeline) is None
        for step in (1, 2, 3):
            training.step(step)
            states[step] = whole_state(training.pipeline.state_dict())
            checkpoints.save(step, training.pipeline, training.optimizer, data={"place": step})
    assert checkpoints.steps() == (2, 3)
    storage = open_steps(place).storage
    assert storage.names(OWN_FOLDER) == []
    other = train_alone("ZBV", 2, seed=9)
    for step in (3, 2):
        restored = ps.Checkpoints(place).load(other.pipeline, other.optimizer, step=step)
        assert restored == ps.checkpoint.Restored(step, {"place": step}, has_generator_states=True)
        assert differences(whole_state(other.pipeline.state_dict()), states[step], limit=0) == {}


def test_torch_reads_what_is_in_an_object_store(place: str) -> None:
    training = train_alone("1F1B", 2)
    ps.Checkpoints(place).save(1, training.pipeline, wait=True)
    model = make_model(5)
    state = {"model": model.state_dict()}
    with warnings.catch_warnings(action="ignore"):  # torch warns that there is one process only
        dcp_load(
            state, checkpoint_id=f"{place.removeprefix('file://')}/step-00000001", no_dist=True
        )
    expected = whole_state(training.pipeline.state_dict())
    found = whole_state(model.state_dict())
    assert differences({name: found[name] for name in expected}, expected, limit=0) == {}


def test_what_a_crash_leaves_is_removed_and_what_others_leave_is_not(place: str) -> None:
    steps = open_steps(place)
    storage = steps.storage
    for job in ("aa", "bb"):
        path = steps.begin(4, job)
        storage.write(f"{path}/half.distcp", [b"half"])
    assert steps.complete() == ()
    steps.publish(4, "bb", b"{}")
    assert steps.complete() == (4,)
    assert storage.names("step-00000004") == sorted(["half.distcp", MANIFEST])
    steps.discard(4, "bb")
    assert steps.complete() == (4,)
    storage.write("step-00000005/mine.txt", [b"of the user"])
    with pytest.raises(CheckpointError, match="must not exist yet"):
        steps.begin(5, "cc")
    assert storage.size("step-00000005/mine.txt") == 11
    storage.write(f"{steps.begin(6, 'cc')}/half.distcp", [b"half"])
    steps.discard(6, "cc")
    assert storage.names("step-00000006") == []
    assert storage.names(OWN_FOLDER) == []


def test_job_that_lost_its_step_to_another_cannot_complete_it(place: str) -> None:
    steps = open_steps(place)
    paths = []
    for job in ("aa", "bb"):
        paths.append(f"{steps.begin(4, job)}/{steps.file_name(0, job)}")
        steps.storage.write(paths[-1], [job.encode()])
    with pytest.raises(CheckpointError, match=r"another (process has removed it|job, which has)"):
        steps.publish(4, "aa", b"{}")
    assert steps.complete() == ()
    # What the first job still writes replaces no file of the second.
    steps.storage.write(paths[0], [b"late"])
    with steps.storage.open(paths[1]) as file:
        assert file.read() == b"bb"
    steps.publish(4, "bb", b"{}")
    assert steps.complete() == (4,)


class RacedStorage(LocalStorage):
    """A folder in which something else happens just before something is removed."""

    happens: Callable[[], None] | None = None

    def remove(self, path: str) -> None:
        if self.happens is not None:
            self.happens()
        super().remove(path)


def test_step_cannot_be_completed_while_it_is_removed(tmp_path: Path) -> None:
    storage = RacedStorage(tmp_path)
    steps = RenamedSteps(storage)
    storage.write(f"{steps.begin(4, 'aa')}/half.distcp", [b"half"])
    refused = []

    def complete() -> None:
        with pytest.raises(CheckpointError, match="another process has removed it"):
            steps.storage.rename(f"{OWN_FOLDER}/step-00000004-aa", "step-00000004")
        refused.append("aa")

    storage.happens = complete
    steps.begin(4, "bb")
    assert refused == ["aa"]
    assert (steps.complete(), storage.names(OWN_FOLDER)) == ((), [])


class BusyStorage(LocalStorage):
    """A folder in which nothing can be removed, as on a network while somebody reads it."""

    is_busy = True

    def remove(self, path: str) -> None:
        if self.is_busy:
            raise CheckpointError(f"cannot remove {path}: it is busy")
        super().remove(path)


# An old step that could not be removed ended a run, with "step 2 was not saved: it is complete".
def test_old_step_that_is_still_read_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = BusyStorage(tmp_path)
    steps = RenamedSteps(storage)

    for step in (1, 2, 3):
        storage.write(f"{steps.begin(step, 'aa')}/file", [b""])
        steps.publish(step, "aa", b"{}")
        steps.prune(1, "aa")
        assert steps.complete() == (step,)
    assert "it is busy; the next save will try again" in caplog.text
    # Names do not grow with every attempt.
    assert max(map(len, storage.names(OWN_FOLDER))) < 60
    storage.is_busy = False
    steps.begin(4, "aa")
    assert storage.names(OWN_FOLDER) == []


def test_places_that_cannot_be_reached_are_refused_in_words() -> None:
    with pytest.raises(ArgumentError, match="must be a folder that fsspec can reach"):
        ps.Checkpoints("nowhere://run")
    with pytest.raises(MissingDependencyError, match="s3://bucket/run needs another package"):
        ps.Checkpoints("s3://bucket/run")


def test_missing_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    message = (
        "memory://run needs fsspec, which is not installed; run pip install 'penstock[objects]'"
    )
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(message)}$"):
        ObjectStorage("memory://run")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            errno.ENOSPC,
            "the disk or its quota is full (7 bytes are free); make room, or keep fewer",
        ),
        (
            errno.EDQUOT,
            "the disk or its quota is full (7 bytes are free); make room, or keep fewer",
        ),
        (errno.EACCES, "permission denied (Permission denied); allow this process to, or use"),
        (errno.EROFS, "permission denied (Read-only file system); allow this process to, or use"),
        (errno.ENOENT, "it does not exist, or another process has removed it"),
        (errno.EFBIG, "the file is longer than this system allows; raise the limit (ulimit -f)"),
        (errno.EMFILE, "this process has too many open files; raise the limit (ulimit -n)"),
        (errno.EXDEV, "the two are on different disks; let .penstock be a folder beside the"),
        (errno.EEXIST, "a file, or a link to nowhere, is in its place; move that away"),
        (errno.EIO, "OSError: [Errno 5] Input/output error"),
    ],
)
def test_errors_of_disks_are_in_words(number: int, message: str) -> None:
    with pytest.raises(CheckpointError) as caught, in_words("write", "run/x", lambda: 7):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"cannot write run/x: {message}")


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    # A file where the folder should be: refused for every user, also for root.
    (tmp_path / "run").write_text("not a folder")
    training = train_alone("1F1B", 2)
    with pytest.raises(
        CheckpointError, match=r"step 1 cannot be saved: cannot write .*/lease.json"
    ):
        ps.Checkpoints(tmp_path / "run").save(1, training.pipeline, wait=True)


def test_folders_behind_links_work_unless_they_lead_nowhere(tmp_path: Path) -> None:
    training = train_alone("1F1B", 2)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with ps.Checkpoints(tmp_path / "link") as checkpoints:
        checkpoints.save(1, training.pipeline, wait=True)
    # A step that was moved to another disk: removing it removes the link only.
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000001").symlink_to(tmp_path / "moved")
    with ps.Checkpoints(tmp_path / "run", keep=1) as checkpoints:
        assert checkpoints.load(training.pipeline) is not None
        checkpoints.save(2, training.pipeline, wait=True)
        assert checkpoints.steps() == (2,)
    assert (tmp_path / "moved" / MANIFEST).exists()
    (tmp_path / "nowhere").symlink_to("missing")
    with pytest.raises(CheckpointError, match="a link to nowhere, is in its place"):
        ps.Checkpoints(tmp_path / "nowhere").save(1, training.pipeline, wait=True)


SMALL_DISK = """
import sys, torch
from torch import nn
import penstock as ps

pipeline = ps.Pipeline([nn.Linear(300, 300)], "GPipe", microbatches=1, loss=nn.MSELoss())
checkpoints = ps.Checkpoints(sys.argv[1], keep=100)
try:
    for step in range(1, 100):
        checkpoints.save(step, pipeline, wait=True)
except ps.errors.CheckpointError as error:
    print(error)
again = ps.Checkpoints(sys.argv[1])
print(again.load(pipeline).step == step - 1 == again.steps()[-1])
"""


@pytest.mark.slow
def test_full_disk_is_named_and_leaves_what_was_complete(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    program = f"{mount} && exec {sys.executable} -c '{SMALL_DISK}' {tmp_path}"
    command = ["unshare", "-m", "sh", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if ended.returncode and "mount" in ended.stderr:
        pytest.skip("needs the right to mount")
    message, is_kept = ended.stdout.strip().split("\n")
    assert "was not saved: rank 0: cannot write" in message
    assert "the disk or its quota is full" in message
    assert is_kept == "True", ended.stderr


def test_state_of_another_optimizer_is_loaded_only_if_asked_for(tmp_path: Path) -> None:
    # AdamW's state went into SGD without a word.
    training = train_alone("1F1B", 2)
    training.step(0)
    ps.Checkpoints(tmp_path).save(1, training.pipeline, training.optimizer, wait=True)
    parameters = dict(training.pipeline.named_parameters())
    groups = [{"params": [p]} for p in parameters.values()]
    other = torch.optim.SGD(groups, lr=0.5)
    with pytest.raises(CheckpointError) as caught:
        ps.Checkpoints(tmp_path).load(training.pipeline, other)
    assert str(caught.value) == (
        "cannot load step 1: the optimizer must be the one that was saved, 'torch.optim.Adam' "
        "(got 'torch.optim.SGD'); load without the optimizer, or with allow_other_optimizer=True "
        "if its state has the same meaning; no other step"
    )
    assert (other.param_groups[0]["lr"], len(other.state)) == (0.5, 0)
    ps.Checkpoints(tmp_path).load(training.pipeline, other, allow_other_optimizer=True)
    assert other.param_groups[0]["lr"] == 1e-3

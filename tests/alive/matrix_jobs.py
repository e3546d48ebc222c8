"""What a rank does in a case of the fault matrix, up to the phase in which one of them fails."""

import ctypes
import gc
import os
import signal
import socket
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.alive.tree import seeking
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.dropin.run import session
from penstock.dropin.schedules import get_schedule_class
from penstock.dropin.stage import PipelineStage
from penstock.measuring import links
from penstock.training import pipeline as pipeline_module
from penstock.training.build import assemble
from tests.models import make_batch, make_blocks, make_stages, mean_loss

__all__ = [
    "MISTAKE",
    "SILENCE_SECONDS",
    "TEMPORARY",
    "MatrixCase",
    "cut_incoming",
    "fail_in_phase",
]

MISTAKE = "a mistake"
SILENCE_SECONDS = 6.0
# Longer than it takes the others to notice.
HANG_SECONDS = 12
MICROBATCHES = 4
SO_ATTACH_FILTER = 26
# Where ranks of a case put temporary files that nobody asked for.
TEMPORARY = "temporary"
# Far longer than threads and connections need to end once nobody holds them.
SETTLE_SECONDS = 20.0


@dataclass(frozen=True)
class MatrixCase:
    """How a rank fails, in which phase, and what the ranks are."""

    kind: str
    phase: str
    layout: str

    @property
    def ranks(self) -> int:
        return 4 if self.layout == "replicas" else 2

    @property
    def silence_seconds(self) -> float:
        """Only a rank that does not answer should be given up for that on a busy machine."""
        is_silent = self.kind in ("SIGSTOP", "half-open link", "GIL held")
        return SILENCE_SECONDS if is_silent else 60.0

    @property
    def victim(self) -> int:
        """The last rank, which is rank 1 of its pipeline."""
        return self.ranks - 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.layout}".replace(" ", "_")


def cut_incoming(connection: Any) -> None:
    """Let the kernel drop whatever comes in on a connection, which stays open."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HL", 1, ctypes.addressof(drop_all))
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def cut_off() -> None:
    """Let nothing come in on the heartbeat any more, nor on any new connection."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    # Every new connection of this process fails.
    vars(seeking)["call"] = fail
    for node in (one for one in gc.get_objects() if type(one) is HeartbeatNode):
        for connection in node._near.connections():
            cut_incoming(connection)
    sleep(HANG_SECONDS)


def fail(kind: str) -> None:
    """Let this process fail in the given way."""
    match kind:
        case "raise":
            raise ValueError(MISTAKE)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(4)
        case "half-open link":
            cut_off()
        case "GIL held":
            ctypes.PyDLL(None).sleep(HANG_SECONDS)
        case _:
            raise AssertionError(kind)


class Trapped(nn.Module):
    """A stage whose forward fails once it is armed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.kind = ""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if self.kind:
            fail(self.kind)
        output: torch.Tensor = self.inner(value)
        return output


@contextmanager
def springing(holder: Any, name: str, kind: str) -> Iterator[None]:
    """Let a function fail before its work when it is first called, if there is a failure."""
    before = getattr(holder, name)

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        setattr(holder, name, before)
        fail(kind)
        return before(*args, **kwargs)

    if kind:
        setattr(holder, name, fail_once)
    yield
    setattr(holder, name, before)


def fail_in_phase(rank: int, case: MatrixCase, folder: Path) -> str:
    """Go through all phases of a case until its own, and fail there on the victim."""
    timeouts = ps.Timeouts(
        case.silence_seconds, stop_seconds=5.0, join_seconds=120.0, folder=folder
    )
    kind = case.kind if rank == case.victim else ""
    tempfile.tempdir = str(folder / TEMPORARY)
    held = Holdings()
    run = _run_dropin if case.layout == "drop-in" else _run_pipeline
    try:
        return run(rank, case, kind, timeouts, held)
    except Exception as error:
        # As in a program that has caught the error and lets go of its pipeline.
        reported = without_frames(error)
    held.check()
    raise reported


def without_frames(error: BaseException) -> BaseException:
    """Return an error whose frames do not keep what they held alive, with those of its causes."""
    seen, waiting = set[int](), [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        waiting += filter(None, (one.__cause__, one.__context__))
    return error


class Holdings:
    """The threads, sockets and other open files that a process has beside those of before."""

    def __init__(self) -> None:
        self._before = self._now()

    def begin(self) -> None:
        """Count from now on, since what torch has opened so far is not Penstock's."""
        self._before = self._now()

    def check(self) -> None:
        """Raise if something is left, once it had time to end."""
        end = monotonic() + SETTLE_SECONDS
        gc.collect()
        while (left := self._now().keys() - self._before.keys()) and monotonic() < end:
            sleep(0.05)
            gc.collect()
        if left:
            raise AssertionError(f"left behind: {[self._now().get(one) for one in left]}")

    @staticmethod
    def _now() -> dict[str, str]:
        """Return what every thread and descriptor is; a thread may take its name later."""
        found = dict[str, str]()
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                # The number of a descriptor is used again.
                found[f"{file.name}: {file.readlink()}"] = str(file.readlink())
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                found[f"thread {task.name}"] = f"thread {(task / 'comm').read_text().strip()}"
        return found


def _run_pipeline(
    rank: int, case: MatrixCase, kind: str, timeouts: ps.Timeouts, held: Holdings
) -> str:
    folder = Path(str(timeouts.folder))

    def armed(phase: str) -> str:
        return kind if phase == case.phase else ""

    stage, group = rank % 2, dist.group.WORLD
    assert group is not None
    trap = Trapped(make_stages("1F1B", 2, make_blocks())[stage])
    module: nn.Module = trap
    if case.layout == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        group = mesh["pipeline"].get_group()
        module = DistributedDataParallel(trap, process_group=mesh["data"].get_group())
    held.begin()
    # Replicas do not measure together, so that only this lets them know of one another by then.
    is_early = case.phase == "before" or (case.phase, case.layout) == ("measure", "replicas")
    with ps.watching(timeouts=timeouts) if is_early else nullcontext():
        if armed("before"):
            fail(kind)
        if case.phase == "measure":
            with springing(links, "_round_trip", armed("measure")):
                ps.measure_links(group, large_bytes=128, repeats=1, timeouts=timeouts)
        with springing(assemble, "_build", armed("build")):
            pipeline = ps.Pipeline(
                {stage: module},
                "1F1B",
                microbatches=MICROBATCHES,
                loss=mean_loss,
                group=group,
                timeouts=timeouts,
            )
    batch, target = make_batch()
    checkpoints = ps.Checkpoints(folder / "saved")

    def step() -> None:
        pipeline.step(batch, target=target)

    def evaluate() -> None:
        pipeline.evaluate(batch)

    def clip() -> None:
        with springing(pipeline_module, "total_norm", armed("clip")):
            pipeline.clip_grad_norm_(1.0)

    def save() -> None:
        with springing(pipeline, "state_dict", armed("save")):
            checkpoints.save(1, pipeline, wait=True)

    def load() -> None:
        with springing(pipeline, "state_dict", armed("load")):
            checkpoints.load(pipeline)

    phases: dict[str, Callable[[], None]] = {
        "first step": step,
        "step": step,
        "evaluate": evaluate,
        "clip": clip,
        "save": save,
        "load": load,
    }
    for name, do in phases.items():
        trap.kind = armed(name) if name in ("first step", "step", "evaluate") else ""
        do()
    # A replica that needed nothing from the lost rank so far learns of it now.
    for _ in range(100):
        sleep(0.2)
        step()
    return "finished"


def _run_dropin(
    rank: int, case: MatrixCase, kind: str, timeouts: ps.Timeouts, held: Holdings
) -> str:
    blocks = make_blocks(2)
    trap = Trapped(blocks[rank])
    stage = PipelineStage(trap, rank, 2, torch.device("cpu"))
    schedule = get_schedule_class("1F1B")(stage, MICROBATCHES, mean_loss)
    schedule.timeouts = timeouts
    held.begin()
    batch, target = make_batch()
    given: tuple[Any, ...] = (batch,) if rank == 0 else ()
    target_of: dict[str, Any] = {"target": target} if rank == 1 else {}
    for name in ("first step", "step", "evaluate"):
        trap.kind = kind if name == case.phase else ""
        is_built_here = name == "first step" and case.phase == "build"
        with springing(session, "_prepare", kind if is_built_here else ""):
            run = schedule.eval if name == "evaluate" else schedule.step
            run(*given, **target_of)
    return "finished"

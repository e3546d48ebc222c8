"""A rank is lost while all save or load: the others end and name it, and the last step loads."""

import os
import signal
import subprocess
import sys
from _collections_abc import dict_items
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.errors import PeerLostError
from tests.alive.fault_ranks import Fate, run_ranks
from tests.models import differences, make_batch, make_blocks, make_stages, mean_loss

RANKS = 4
MICROBATCHES = 4
CALLS = ("save", "finish", "load")
KINDS = ("SIGKILL", "SIGSTOP", "sys.exit")
EXIT_CODES = {"SIGKILL": -signal.SIGKILL, "SIGSTOP": 1, "sys.exit": 3}
WHAT = {
    "SIGKILL": "ended (its connection broke)",
    "SIGSTOP": "has not answered for 7 s",
    "sys.exit": "has left (SystemExit in the middle of a step)",
}


@dataclass(frozen=True)
class Case:
    """Which rank fails, how, and in which call."""

    call: str
    kind: str
    victim: int

    def __str__(self) -> str:
        return f"{self.call}-{self.kind}-rank{self.victim}"


def fail_as(kind: str) -> None:
    match kind:
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sys.exit":
            sys.exit(3)
        case _:
            raise AssertionError(kind)


class Deadly(dict[str, Any]):
    """Data whose rank fails when it saves them, before it has sent anything to the others."""

    kind = ""

    def items(self) -> "dict_items[str, Any]":
        fail_as(self.kind)
        return super().items()


def fail_at_file(kind: str, folder: Path, ending: str) -> None:
    """Fail when a file with this ending is opened in the folder for the first time."""
    is_set = True

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_set
        path = str(arguments[0]) if event == "open" else ""
        if is_set and path.startswith(str(folder)) and path.endswith(ending):
            is_set = False
            fail_as(kind)

    sys.addaudithook(look)


def make_pipeline(ranks: int | None, timeouts: ps.Timeouts, group: Any) -> ps.Pipeline:
    return ps.Pipeline(
        make_stages("1F1B", RANKS if ranks is None else ranks, make_blocks()),
        "1F1B",
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=group,
        timeouts=timeouts,
    )


def timeouts_for(kind: str, folder: Path) -> ps.Timeouts:
    return ps.Timeouts(silence_seconds=7.0 if kind == "SIGSTOP" else 60.0, folder=folder)


def train(pipeline: ps.Pipeline, optimizer: torch.optim.Optimizer) -> None:
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    optimizer.step()
    optimizer.zero_grad()


def lose_a_rank(rank: int, case: Case, folder: Path) -> str:
    """Save step 1; then lose the victim."""
    pipeline = make_pipeline(None, timeouts_for(case.kind, folder), dist.group.WORLD)
    optimizer = torch.optim.Adam(pipeline.parameters())
    run = folder / "run"
    with ps.Checkpoints(run) as checkpoints:
        train(pipeline, optimizer)
        checkpoints.save(1, pipeline, optimizer, wait=True)
        train(pipeline, optimizer)
        data = Deadly(place=2)
        match case.call, rank == case.victim:
            case "save", True:
                Deadly.kind = case.kind
                checkpoints.save(2, pipeline, optimizer, data=data)
            case "finish", True:
                fail_at_file(case.kind, run, ".distcp")
            case "load", True:
                fail_at_file(case.kind, run, "penstock.json")
        if case.call == "load":
            checkpoints.load(pipeline, optimizer)
        else:
            checkpoints.save(2, pipeline, optimizer, data={"place": 2})
    return "finished"


def check_case(case: Case, folder: Path) -> None:
    resume = case.victim if case.kind == "SIGSTOP" else None
    fates = run_ranks(lose_a_rank, RANKS, folder, case, folder, resume=resume)
    check_lost(fates, case)
    check_first_step(folder)


def check_lost(fates: list[Fate], case: Case) -> None:
    others = [fate for rank, fate in enumerate(fates) if rank != case.victim]
    reported = [(type(fate.reported), fate.exit_code, fate.stderr) for fate in others]
    assert reported == [(PeerLostError, 1, "")] * len(others), [str(f.reported) for f in others]
    (message,) = {str(fate.reported) for fate in others}
    assert {fate.reported.rank for fate in others} == {case.victim}, message
    assert WHAT[case.kind] in message
    assert fates[case.victim].exit_code == EXIT_CODES[case.kind]


def check_first_step(folder: Path) -> None:
    """Check that step 1 can be loaded, and that it is the only complete step."""
    pipeline, trained = (make_pipeline(None, ps.Timeouts(), None) for _ in range(2))
    train(trained, torch.optim.Adam(trained.parameters()))
    checkpoints = ps.Checkpoints(folder / "run")
    assert checkpoints.steps() == (1,)
    assert checkpoints.load(pipeline) == ps.checkpoint.Restored(1, {}, has_generator_states=False)
    assert differences(pipeline.state_dict(), trained.state_dict()) == {}


SOME_CASES = [
    Case("save", "SIGKILL", 2),
    Case("save", "SIGKILL", 0),
    Case("save", "sys.exit", 3),
    Case("finish", "SIGKILL", 1),
    Case("finish", "SIGSTOP", 3),
    Case("load", "SIGKILL", 3),
]
ALL_CASES = [
    Case(*values)
    for values in product(CALLS, KINDS, range(RANKS))
    # In a thread of its own an exit ends that thread only.
    if values[:2] != ("finish", "sys.exit")
]


@pytest.mark.parametrize("case", SOME_CASES, ids=str)
def test_others_name_the_rank_and_the_last_complete_step_loads(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ALL_CASES if c not in SOME_CASES], ids=str)
def test_others_name_the_rank_in_every_case(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


def end_without_waiting(rank: int, kind: str, folder: Path) -> str:
    """Lose rank 1 while it writes; no other rank asks how the save went."""
    pipeline = make_pipeline(None, timeouts_for(kind, folder), dist.group.WORLD)
    if rank == 1:
        fail_at_file(kind, folder / "run", ".distcp")
    ps.Checkpoints(folder / "run").save(1, pipeline)
    return "done"


@pytest.mark.parametrize("kind", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_program_that_does_not_wait_for_a_save_still_ends(
    kind: Literal["SIGKILL", "SIGSTOP"], tmp_path: Path
) -> None:
    resume = 1 if kind == "SIGSTOP" else None
    fates = run_ranks(end_without_waiting, RANKS, tmp_path, kind, tmp_path, resume=resume)
    others = [fate for rank, fate in enumerate(fates) if rank != 1]
    assert others == [Fate("done", 0, "")] * 3
    assert ps.Checkpoints(tmp_path / "run").steps() == ()


PROGRAM = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.checkpoint.test_lost import end_without_waiting

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
print(end_without_waiting(rank, "SIGSTOP", folder))
"""


@pytest.mark.slow
def test_interpreter_ends_while_a_thread_waits_for_a_rank_that_has_stopped(tmp_path: Path) -> None:
    # Other tests fork their processes, which end without cleaning up; these end as programs do.
    command = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in (0, 2, 3):
            reported = processes[rank].communicate(timeout=300)
            assert (*reported, processes[rank].returncode) == ("done\n", "", 0)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def lose_a_process_beside(rank: int, ranks: int | None, kind: str, folder: Path) -> None:
    """Lose the last process of several pipelines that save together, and are not replicas."""
    group = None
    if ranks is not None:
        shape = (dist.get_world_size() // ranks, ranks)
        group = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline"))["pipeline"]
    pipeline = make_pipeline(ranks, timeouts_for(kind, folder), group)
    if rank == dist.get_world_size() - 1:
        fail_at_file(kind, folder / "run", ".distcp")
    ps.Checkpoints(folder / "run").save(1, pipeline, wait=True)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        (2, "SIGKILL"),
        (None, "SIGKILL"),
        pytest.param(2, "SIGSTOP", marks=pytest.mark.slow),
        pytest.param(None, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_process_lost_by_one_pipeline_is_named_by_all_that_save_with_it(
    ranks: int | None, kind: Literal["SIGKILL", "SIGSTOP"], tmp_path: Path
) -> None:
    # Only replicas watched one another, so that others waited for torch's timeout where the
    # process had stopped, and did not know which one was gone where it had ended.
    processes = 4 if ranks else 2
    lost = processes - 1
    resume = lost if kind == "SIGSTOP" else None
    fates = run_ranks(
        lose_a_process_beside, processes, tmp_path, ranks, kind, tmp_path, resume=resume
    )
    assert [fate.exit_code for fate in fates] == [1] * lost + [EXIT_CODES[kind]]
    others = [fate.reported for fate in fates[:lost]]
    assert [type(error) for error in others] == [PeerLostError] * lost, others
    assert {error.rank for error in others} == {lost}
    assert all(WHAT[kind] in str(error) for error in others), others


def save_and_end(rank: int, folder: Path) -> list[str]:
    """Save in the background; drop the pipeline first and the checkpoints last."""
    pipeline = make_pipeline(None, ps.Timeouts(folder=folder / str(rank)), dist.group.WORLD)
    checkpoints = ps.Checkpoints(folder / "run")
    checkpoints.save(1, pipeline, wait=True)
    checkpoints.save(2, pipeline)
    checkpoints.finish()
    dist.barrier()
    del pipeline
    dist.barrier()
    left = [path.name for path in folder.rglob("*.flight")]
    dist.barrier()
    assert checkpoints.steps() == (1, 2)
    return left


def test_checkpoints_do_not_keep_a_pipeline_that_has_ended(tmp_path: Path) -> None:
    # The heartbeat kept what to abort after the call, which kept the pipeline: its thread, which
    # ends with the pipeline, kept that alive.
    fates = run_ranks(save_and_end, RANKS, tmp_path, tmp_path)
    assert fates == [Fate([], 0, "")] * RANKS

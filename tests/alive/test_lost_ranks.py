"""A rank raises, dies, stops, exits or loses its link: every other rank ends and names it."""

import logging
import os
import signal
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.ir.actions import Action, Kind
from tests.alive.fault_cases import (
    EXIT_CODES,
    KINDS,
    MICROBATCHES_OF_FAILURE,
    MISTAKE,
    RAISING,
    WHAT,
    Case,
    fail_as,
)
from tests.alive.fault_ranks import Fate, run_ranks
from tests.models import make_batch, make_blocks, make_stages, mean_loss

RANKS = 4
MICROBATCHES = 8
FAMILIES = ("1F1B", "ZBV")
BACKWARDS = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)


class Trap:
    """A failure at one action of the victim, once it is set."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.is_victim = rank == case.victim
        self.is_set = False

    def __call__(self, action: Action, run: Callable[[], None]) -> None:
        case = self.case
        schedule = ps.build(case.schedule, ranks=RANKS, microbatches=MICROBATCHES)
        is_here = action.stage == schedule.placement.stages(case.victim)[0]
        if self.is_set and self.is_victim and is_here and action.microbatch == case.microbatch:
            fail_as(case.kind)
        run()


def make_pipeline(family: str, timeouts: ps.Timeouts, trap: Trap | None, kind: str) -> ps.Pipeline:
    kinds = BACKWARDS if kind == "raise in B" else (Kind.FORWARD,)
    return ps.Pipeline(
        make_stages(family, RANKS, make_blocks()),
        family,
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(around={} if trap is None else dict.fromkeys(kinds, trap)),
        timeouts=timeouts,
    )


def train_into_trap(rank: int, case: Case, folder: Path) -> str:
    timeouts = ps.Timeouts(silence_seconds=case.silence_seconds, folder=folder)
    trap = Trap(case, rank)
    pipeline = make_pipeline(case.schedule, timeouts, trap, case.kind)
    batch, target = make_batch()
    for step in range(3):
        trap.is_set = step == case.step
        pipeline.step(batch, target=target)
    return "finished"


def action_of(case: Case, reported: str) -> str:
    """Return the action at which the victim failed."""
    schedule = ps.build(case.schedule, ranks=RANKS, microbatches=MICROBATCHES)
    stage = schedule.placement.stages(case.victim)[0]
    texts = [f"{stage}{letter}{case.microbatch}" for letter in case.letters]
    return next((text for text in texts if text in reported), "nowhere")


def check_case(case: Case, folder: Path) -> None:
    fates = run_ranks(train_into_trap, RANKS, folder, case, folder, resume=case.resume)
    if case.kind in RAISING:
        check_raised(case, fates)
    else:
        check_lost(case, fates)


def check_raised(case: Case, fates: list[Fate]) -> None:
    """Check that all ranks raise the error of the rank that raised first."""
    for fate in fates:
        reported = str(fate.reported)
        assert (fate.exit_code, fate.stderr) == (1, "")
        place = f"rank {case.victim}, stage "
        assert place in reported
        assert f"{action_of(case, reported)}: ValueError: {MISTAKE}" in reported


def check_lost(case: Case, fates: list[Fate]) -> None:
    others = [fate for rank, fate in enumerate(fates) if rank != case.victim]
    assert [fate.stderr for fate in others] == [""] * len(others)
    assert [fate.exit_code for fate in others] == [1] * len(others)
    assert [type(fate.reported) for fate in others] == [ps.errors.PeerLostError] * len(others)
    named = {fate.reported.rank for fate in others}
    assert named == {case.victim}, [str(fate.reported) for fate in others]
    (message,) = {str(fate.reported) for fate in others}
    first, last = message.splitlines()
    assert first.startswith(f"rank {case.victim} (process ")
    assert WHAT[case.kind] in first
    assert f"; its last action was {action_of(case, first)} (forward of " in first
    assert first.endswith(f" of step {case.step}")
    assert last.startswith("what every rank did: penstock explain ")
    victim = fates[case.victim]
    assert victim.exit_code == EXIT_CODES[case.kind]
    if case.kind == "SIGSTOP":
        assert str(victim.reported) == message


ALL_CASES = [
    Case(*values) for values in product(FAMILIES, KINDS, range(RANKS), MICROBATCHES_OF_FAILURE)
]


def some_cases() -> list[Case]:
    """Return every kind once, with ranks, families and microbatches in turn; rank 0 ends too."""
    families, microbatches = cycle(FAMILIES), cycle(MICROBATCHES_OF_FAILURE)
    chosen = [(kind, number % RANKS) for number, kind in enumerate(KINDS, 1)]
    chosen.append(("SIGKILL", 0))
    return [Case(next(families), kind, rank, next(microbatches)) for kind, rank in chosen]


@pytest.mark.parametrize("case", some_cases(), ids=str)
def test_others_end_and_name_the_rank(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in ALL_CASES if c not in some_cases()], ids=str)
def test_others_end_and_name_the_rank_in_every_case(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


# ---- after a loss


def continue_after_a_loss(rank: int, folder: Path) -> list[str]:
    """Return what a step, an evaluation and clipping raise once a rank is lost."""
    trap = Trap(Case("1F1B", "SIGKILL", 2, 3), rank)
    trap.is_set = True
    pipeline = make_pipeline("1F1B", ps.Timeouts(folder=folder), trap, "SIGKILL")
    batch, target = make_batch()
    calls: list[Callable[[], object]] = [
        lambda: pipeline.step(batch, target=target),
        lambda: pipeline.step(batch, target=target),
        lambda: pipeline.evaluate(batch),
        lambda: pipeline.clip_grad_norm_(1.0),
    ]
    reported = []
    for call in calls:
        with pytest.raises(ps.errors.PeerLostError) as caught:
            call()
        reported.append(str(caught.value))
    return reported


def test_every_later_call_of_a_pipeline_that_lost_a_rank_raises_at_once(tmp_path: Path) -> None:
    fates = run_ranks(continue_after_a_loss, RANKS, tmp_path, tmp_path)
    others = [fate for rank, fate in enumerate(fates) if rank != 2]
    assert [fate.exit_code for fate in others] == [0, 0, 0]
    (message,) = {message for fate in others for message in fate.reported}
    assert message.startswith("rank 2 (process ")
    (folder,) = tmp_path.glob("penstock-*")
    assert message.endswith(f"\nwhat every rank did: penstock explain {folder}")
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rank{rank}.flight" for rank in range(RANKS)
    ]


def loop_for_ever(rank: int, folder: Path) -> None:
    """Kill rank 2 while rank 1 is in an endless loop, before it waits for rank 2."""

    def act(action: Action, run: Callable[[], None]) -> None:
        if rank == 2 and action.microbatch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while rank == 1 and action.microbatch == 2:
            pass
        run()

    pipeline = ps.Pipeline(
        make_stages("1F1B", RANKS, make_blocks()),
        "1F1B",
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(around={Kind.FORWARD: act}),
        timeouts=ps.Timeouts(stop_seconds=6.0, folder=folder),
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)


def test_process_that_does_not_leave_its_call_is_ended_with_exit_code_83(
    tmp_path: Path,
) -> None:
    fates = run_ranks(loop_for_ever, RANKS, tmp_path, tmp_path)
    assert [fate.exit_code for fate in fates] == [1, 83, -signal.SIGKILL, 1]
    reported = fates[1].stderr.splitlines()
    assert reported[0].startswith("penstock: rank 2 (process ")
    assert reported[1].startswith("what every rank did: penstock explain ")
    assert reported[2] == (
        "this is rank 1, which did not leave 1F2 (forward of microbatch 2 in stage 1) of step 0 "
        "within 6 s; its process ends now with exit code 83"
    )
    assert any("in act" in line for line in reported[3:])


def lose_the_link(rank: int, folder: Path) -> None:
    """Cut the connections of rank 1, which stays alive, in the second step."""
    pipeline = make_pipeline("1F1B", ps.Timeouts(folder=folder), None, "")
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    if rank == 1:
        pipeline._running().transport.abort()  # type: ignore[attr-defined]  # a cut cable, by hand
    pipeline.step(batch, target=target)


def test_rank_that_lost_its_link_ends_the_step_on_all_ranks(tmp_path: Path) -> None:
    fates = run_ranks(lose_the_link, RANKS, tmp_path, tmp_path)
    assert [(fate.exit_code, fate.stderr) for fate in fates] == [(1, "")] * RANKS
    (message,) = {str(fate.reported) for fate in fates}
    assert " lost its connection to another rank (" in message


# ---- no loss


def end_without_a_fault(rank: int, folder: Path) -> list[str]:
    """Train two pipelines in turn; return the records that exist meanwhile."""
    batch, target = make_batch()
    for family in FAMILIES:
        pipeline = make_pipeline(family, ps.Timeouts(folder=folder / str(rank)), None, "")
        pipeline.step(batch, target=target)
        found = [path.name for path in folder.rglob("*.flight")]
        dist.barrier()
        del pipeline
        dist.barrier()
    return found


def test_pipelines_without_a_fault_leave_no_records(tmp_path: Path) -> None:
    fates = run_ranks(end_without_a_fault, RANKS, tmp_path, tmp_path)
    expected = [f"rank{rank}.flight" for rank in range(RANKS)]
    assert [sorted(fate.reported) for fate in fates] == [expected] * RANKS
    assert list(tmp_path.rglob("*.flight")) == []
    assert list(tmp_path.rglob("penstock-*")) == []


def leave_early(rank: int, folder: Path) -> str:
    """Leave after one step on rank 2, while the others continue."""
    pipeline = make_pipeline("ZBV", ps.Timeouts(folder=folder), None, "")
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    if rank == 2:
        return "done"
    pipeline.step(batch, target=target)
    return "more"


def test_rank_that_left_is_named_by_ranks_that_continue(tmp_path: Path) -> None:
    fates = run_ranks(leave_early, RANKS, tmp_path, tmp_path)
    assert [fate.exit_code for fate in fates] == [1, 1, 0, 1]
    for rank in (0, 1, 3):
        reported = fates[rank].reported
        assert isinstance(reported, ps.errors.PeerLostError)
        assert reported.rank == 2
        assert " has left (its pipeline was closed)" in str(reported)


def hold_up(rank: int, folder: Path) -> str:
    """Let rank 1 wait until rank 0 has reported the stall."""
    gate = folder / "gate"

    class Opener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # On a busy machine, an earlier report may find ranks on their way to the gate.
            if record.getMessage().partition("\n")[0].endswith("waiting for rank 1"):
                (folder / "report").write_text(record.getMessage())
                gate.write_text("open")

    def wait(action: Action, run: Callable[[], None]) -> None:
        if rank == 1 and action.microbatch == 3 and not (folder / "report").exists():
            gate.read_text()
        run()

    if rank == 0:
        os.mkfifo(gate)
        logging.getLogger("penstock").addHandler(Opener())
    pipeline = ps.Pipeline(
        make_stages("1F1B", RANKS, make_blocks()),
        "1F1B",
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(around={Kind.FORWARD: wait}),
        timeouts=ps.Timeouts(stall_seconds=2.0, folder=folder),
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    return (folder / "report").read_text()


def test_stalled_step_is_reported_and_continues(tmp_path: Path) -> None:
    fates = run_ranks(hold_up, RANKS, tmp_path, tmp_path)
    assert [(fate.exit_code, fate.stderr) for fate in fates] == [(0, "")] * RANKS
    first, heading, *rows = fates[0].reported.splitlines()
    assert first.endswith(" s; all ranks are waiting for rank 1")
    assert heading.split() == ["rank", "in", "for", "waits", "for"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[1].split()[1] == "1F3"
    assert "rank 1, 2RECV_F3" in rows[2]


# ---- more than one pipeline


def fail_in_reduction(rank: int, kind: str, folder: Path) -> None:
    """Lose rank 1 of the second of two replicas, in the collective of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    stage = rank % 2
    module = DistributedDataParallel(
        make_stages("1F1B", 2, make_blocks())[stage], process_group=mesh["data"].get_group()
    )

    def act(_: Action, run: Callable[[], None]) -> None:
        if rank == 3:
            fail_as(kind)
        run()

    pipeline = ps.Pipeline(
        {stage: module},
        "1F1B",
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=mesh["pipeline"],
        options=ps.RunOptions(around={Kind.REDUCE_GRAD: act}),
        timeouts=ps.Timeouts(silence_seconds=9.0, stop_seconds=8.0, folder=folder),
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)


@pytest.mark.parametrize("kind", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
def test_loss_in_a_collective_of_replicas_ends_both_pipelines_by_name(
    kind: str, tmp_path: Path
) -> None:
    # The other pipeline had no heartbeat with the lost rank, and waited for it.
    resume = 3 if kind == "SIGSTOP" else None
    fates = run_ranks(
        fail_in_reduction, RANKS, tmp_path, kind, tmp_path, resume=resume, resume_after=[0, 1, 2]
    )
    for fate in fates[:3]:
        # A collective of DDP cannot be aborted: a process that is still in it is ended.
        reported = str(fate.reported) if fate.exit_code == 1 else fate.stderr
        assert fate.exit_code in (1, 83)
        assert "rank 3 (rank 1 of its pipeline, process " in reported
        assert "; its last action was 1REDUCE_GRAD (" in reported

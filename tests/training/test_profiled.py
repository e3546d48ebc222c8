"""Steps that were profiled or recorded come back as timelines: what ran, in its order."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import penstock as ps
from penstock.files.trace.reading import read_trace
from penstock.sim.timeline import Timeline
from penstock.view.trace import write_trace
from tests.processes import Processes
from tests.view.trace_format import check_trace, flows_of


def make_pipeline(family: str, ranks: int) -> ps.Pipeline:
    schedule = ps.build(family, ranks=ranks, microbatches=4)
    stages = {stage: nn.Linear(8, 8) for stage in range(schedule.num_stages)}
    group = dist.group.WORLD if dist.is_initialized() else None
    return ps.Pipeline(stages, schedule, loss=nn.functional.mse_loss, group=group)


def profile_steps(rank: int, family: str, ranks: int, folder: Path) -> Path:
    """Two steps and an evaluation of one process, as the profiler writes them."""
    pipeline = make_pipeline(family, ranks)
    batch, target = torch.ones(8, 8), torch.zeros(8, 8)
    pipeline.step(batch, target=target)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        pipeline.step(batch, target=target)
        pipeline.evaluate(batch)
        pipeline.step(batch, target=target)
    file = folder / f"rank{rank}.json.gz"
    profiler.export_chrome_trace(str(file))
    return file


def test_profiled_ranks_are_a_timeline_of_the_lowered_schedule(
    two_processes: Processes, tmp_path: Path
) -> None:
    for family in ("1F1B", "ZBV"):
        folder = tmp_path / family
        folder.mkdir()
        files = two_processes.run(profile_steps, family, 2, folder)
        lowered = ps.lower(ps.build(family, ranks=2, microbatches=4))
        for step in (-1, 0):
            timeline = read_trace(*files[::-1], step=step)
            assert timeline.schedule == lowered
            assert (timeline.start <= timeline.end).all()
            assert timeline.start.min() == 0.0
        assert read_trace(*files, step=1).schedule.is_forward_only
        # What was profiled can be written and read as a trace of ours.
        write_trace(timeline, folder / "ours.json")
        assert read_trace(folder / "ours.json").schedule == lowered


def record_step(_rank: int, family: str) -> Timeline:
    result = make_pipeline(family, 2).step(torch.ones(8, 8), target=torch.zeros(8, 8), record=True)
    assert result.timeline is not None
    return result.timeline


def test_recorded_steps_have_well_formed_traces_that_come_back(
    two_processes: Processes, tmp_path: Path
) -> None:
    for family in ("1F1B", "DualPipeV"):
        for timeline in (record_step(0, family), two_processes.run(record_step, family)[0]):
            write_trace(timeline, tmp_path / "step.json")
            events = check_trace((tmp_path / "step.json").read_text())
            assert flows_of(events)
            again = read_trace(tmp_path / "step.json")
            assert again.schedule == timeline.schedule
            assert (again.start == timeline.start).all()
            assert (again.end == timeline.end).all()


def test_one_process_that_runs_all_ranks_is_one_rank(tmp_path: Path) -> None:
    timeline = read_trace(profile_steps(0, "1F1B", 2, tmp_path))
    rows = ps.lower(ps.build("1F1B", ranks=2, microbatches=4)).rows
    found = timeline.schedule.rows
    assert found.num_ranks == 1
    assert sorted(str(found.action(row)) for row in range(len(found))) == sorted(
        str(rows.action(row)) for row in range(len(rows))
    )

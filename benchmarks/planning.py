"""Planning, side by side with torch.distributed.pipelining in one run.

    python benchmarks/planning.py            about three minutes, most of it torch's lowering
    python benchmarks/planning.py --quick    leaves out the largest sizes of both

Prints its tables and writes them to benchmarks/results/planning.md: ZBV built, lowered and
checked by both; cost against size; actions simulated per second; and one very large schedule.
Ours is the best of three runs and torch's is one run, because its largest takes half a minute.
"""

import argparse
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

import penstock as ps
from penstock.ir.schedule import Schedule
from result_files import write_result

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--large-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.large_only:
        print(large_schedule())
        return
    plan_and_check(4, 8)  # loads numba's cached code, so that no table includes it
    plan_and_check(64, 512)
    sizes = [(16, 128), (32, 256), (64, 512)]
    sections = [
        lowering_table(sizes[:2] if arguments.quick else sizes),
        growth_table(6 if arguments.quick else 7),
        simulation_table(),
    ]
    if not arguments.quick:
        # In a process of its own, so that its peak memory is its own.
        command = [sys.executable, __file__, "--large-only"]
        sections.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    spread = "the best of two to five runs, but one run of torch's largest"
    print(write_result("planning", "Planning", sections, spread=spread))


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    begin = perf_counter()
    result = function()
    return perf_counter() - begin, result


def best_of(times: int, function: Callable[[], object]) -> float:
    return min(timed(function)[0] for _ in range(times))


def plan_and_check(ranks: int, microbatches: int) -> Schedule:
    """Do what torch does when a schedule object is made, and prove that its order finishes."""
    lowered = ps.lower(ps.build("ZBV", ranks=ranks, microbatches=microbatches))
    ps.check(lowered, channels="shared")
    return lowered


def torch_orders(ranks: int, microbatches: int) -> dict[int, list[torch_schedules._Action | None]]:
    """Torch's own ZBV order, from its own function, without stages or process groups."""
    schedule = object.__new__(torch_schedules.ScheduleZBVZeroBubble)
    schedule.pp_group_size, schedule.num_stages = ranks, 2 * ranks
    schedule._n_microbatches = microbatches
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}


def torch_plan(ranks: int, microbatches: int) -> dict[int, list[torch_schedules._Action]]:
    """Torch's order, checked and lowered by its own functions, as its constructor does."""
    orders = torch_orders(ranks, microbatches)
    lowered: dict[int, Any] = {}
    holder = generate_stage_to_rank_mapping(ranks, 2 * ranks, style="v")
    torch_schedules._validate_schedule(orders, ranks, 2 * ranks, microbatches)
    for rank, order in orders.items():
        sharded: Any = torch_schedules._add_unshard_reshard(order)
        lowered[rank] = torch_schedules._add_reduce_grad(sharded, microbatches)
    return torch_schedules._add_send_recv(lowered, lambda stage: holder[stage], 2 * ranks)


def lowering_table(sizes: list[tuple[int, int]]) -> str:
    lines = [
        "## Build, lower and check ZBV",
        "",
        "| ranks | microbatches | lowered actions | Penstock s | torch s | torch / Penstock |",
        "|---|---|---|---|---|---|",
    ]
    for ranks, microbatches in sizes:
        ours = best_of(3, partial(plan_and_check, ranks, microbatches))
        theirs, orders = timed(partial(torch_plan, ranks, microbatches))
        actions = sum(map(len, orders.values()))
        assert actions == len(plan_and_check(ranks, microbatches).rows), "not the same work"
        lines.append(
            f"| {ranks} | {microbatches} | {actions:,} | {ours:.3f} | {theirs:.2f} "
            f"| {theirs / ours:.0f} |"
        )
    return "\n".join(lines)


def growth_table(doublings: int) -> str:
    """Time against size up to nearly ten million actions, each size twice the one before."""
    lines = [
        "## Cost against size (build, lower and check ZBV)",
        "",
        "| ranks | microbatches | lowered actions | s | million actions / s |",
        "|---|---|---|---|---|",
    ]
    points = []
    for step in range(4, doublings + 4):
        ranks, microbatches = 2 ** (3 + step // 2), 2 ** (4 + (step + 1) // 2 + 2)
        seconds = best_of(2, partial(plan_and_check, ranks, microbatches))
        actions = len(plan_and_check(ranks, microbatches).rows)
        points.append((actions, seconds))
        rate = actions / seconds / 1e6
        lines.append(f"| {ranks} | {microbatches} | {actions:,} | {seconds:.3f} | {rate:.2f} |")
    sizes, times = np.log(np.array(points)).T
    exponent = np.polyfit(sizes, times, 1)[0]
    return "\n".join([*lines, "", f"Fitted exponent: {exponent:.3f}"])


def simulation_table() -> str:
    """Actions per second, with torch's dry run of the same schedule beside ours.

    Torch's counts turns and knows no durations; ours gives times and memory.
    """
    lines = [
        "## Simulation (ZBV with sends and receives)",
        "",
        "| | actions | s | million actions / s |",
        "|---|---|---|---|",
    ]
    ranks, microbatches = 16, 128
    small = ps.passes.add_send_recv(ps.build("ZBV", ranks=ranks, microbatches=microbatches))
    holder = generate_stage_to_rank_mapping(ranks, 2 * ranks, style="v")
    orders = torch_schedules._add_send_recv(
        {r: [a for a in o if a] for r, o in torch_orders(ranks, microbatches).items()},
        lambda stage: holder[stage],
        2 * ranks,
    )
    theirs = best_of(
        2,
        lambda: torch_schedules._simulate_comms_compute(
            orders, stage_to_rank=lambda stage: holder[stage], num_stages=2 * ranks
        ),
    )
    large = ps.passes.add_send_recv(ps.build("ZBV", ranks=64, microbatches=2048))
    for name, seconds, actions in (
        ("torch, 16 x 128", theirs, len(small.rows)),
        ("Penstock, 16 x 128", best_of(5, lambda: ps.simulate(small)), len(small.rows)),
        ("Penstock, 64 x 2048", best_of(3, lambda: ps.simulate(large)), len(large.rows)),
    ):
        rate = actions / seconds / 1e6
        lines.append(f"| {name} | {actions:,} | {seconds:.3f} | {rate:.2f} |")
    return "\n".join(lines)


def large_schedule() -> str:
    """1F1B at 1,024 ranks and 4,096 microbatches: built, lowered, checked and simulated."""
    built, schedule = timed(lambda: ps.build("1F1B", ranks=1024, microbatches=4096))
    simulated, timeline = timed(lambda: ps.simulate(schedule))
    lowered_in, lowered = timed(lambda: ps.lower(schedule))
    checked, _ = timed(lambda: ps.check(lowered, channels="shared"))
    expected = 3 * (4096 + 1023)
    assert math.isclose(timeline.end_time, expected), (timeline.end_time, expected)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return "\n".join(
        [
            "## 1F1B, 1,024 ranks, 4,096 microbatches",
            "",
            f"{len(schedule.rows):,} actions built and checked in {built:.1f} s, simulated in "
            f"{simulated:.1f} s;",
            f"{len(lowered.rows):,} lowered actions in {lowered_in:.1f} s, proven free of "
            f"deadlock in {checked:.1f} s.",
            f"Peak memory of the process: {peak:.2f} GiB.",
        ]
    )


if __name__ == "__main__":
    main()

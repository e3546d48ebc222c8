"""Steps under half of 1F1B's memory: another order, recomputing, offloading.

    python benchmarks/memory_limits.py    about two minutes; the same numbers on every machine

Nothing is measured: steps are simulated, and the effort of the planner is counted in rows, not in
seconds. Prints its table and writes it to benchmarks/results/memory_limits.md.
"""

from dataclasses import replace
from functools import partial

import penstock as ps
from result_files import write_result

SIZES = ((4, 16), (8, 32))
EFFORT = 20_000
# A boundary is this part of an activation. A rank's F, I and W take 1 s each.
BOUNDARY = 0.06
COSTS = ps.Costs(transfer=0.05, activation_bytes=1.0, message_bytes=BOUNDARY)
# A fast link copies an activation in the time of one forward, a slow one in that of two.
FAST, SLOW = 1.0, 0.5
HEADINGS = (
    "ranks, microbatches",
    "1F1B",
    "planned, no limit",
    "at half: order alone",
    "recomputing",
    "offloading, slow link",
    "offloading, fast link",
)


def main() -> None:
    rows = [row(*sizes) for sizes in SIZES]
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *rows)]
    section = "\n".join(
        [
            f"Simulated seconds of a step for F = I = W = 1, transfers of {COSTS.transfer} and "
            f"boundaries of {BOUNDARY:.0%} of an activation.".replace("%", " %"),
            "",
            *lines,
        ]
    )
    spread = f"none: simulated, with an effort of {EFFORT:,} rows for every plan"
    print(write_result("memory_limits", "Under half of the memory", [section], spread=spread))


def row(ranks: int, microbatches: int) -> list[str]:
    """Return the cells of one size."""
    familiar = ps.simulate(ps.build("1F1B", ranks=ranks, microbatches=microbatches), COSTS)
    half = familiar.peak_bytes / 2
    plan = partial(ps.plan, COSTS, ranks=ranks, microbatches=microbatches, effort=EFFORT)
    fit = partial(
        ps.planner.plan_memory, ranks=ranks, microbatches=microbatches, memory=half, effort=EFFORT
    )
    found = [
        familiar.end_time,
        plan().seconds,
        plan(memory=half).seconds,
        fit(COSTS, means="recompute").seconds,
        *(fit(linked(speed), means="offload").seconds for speed in (SLOW, FAST)),
    ]
    return [f"{ranks}, {microbatches}", *(f"{seconds:.1f}" for seconds in found)]


def linked(speed: float) -> ps.Costs:
    return replace(COSTS, host_link=speed)


if __name__ == "__main__":
    main()

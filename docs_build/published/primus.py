"""AMD Primus-Pipeline: measured throughput of six schedules, Llama2-7B on 8 MI300X.

Primus-Pipeline: A More Flexible and Scalable Pipeline Parallelism Implementation,
https://rocm.blogs.amd.com/software-tools-optimization/primus-pipeline/README.html
"""

import numpy as np

from docs_build.published.table import Table, above_bound, percent
from penstock.assembly import build
from penstock.costs import Costs
from penstock.sim.engine import simulate

# Tokens per second and device, by our name of the schedule.
PUBLISHED = {
    "1F1B": 10057.0,
    "Interleaved1F1B": 10974.0,
    "ZB-H1": 11411.0,
    "ZBV": 11347.0,
    "V-Half": 10894.0,
    "V-Min": 8897.2,
}
RANKS, LAYERS = 8, 32
# Not stated; the configuration of the authors' simulator has 32.
MICROBATCHES = 32
# FLOPs of attention in a forward, over those of a layer's products with weights: 4 x 4096 x 4096
# (half of it masked) over 2 x 202 million. Its backward does two and a half times that, all in I.
ATTENTION = 0.083
# The head's weights over those of a layer: 131 million over 202 million.
HEAD = 0.65
# Transfer over the forward of a rank: 33 MB at some 50 GB/s beside four layers.
TRANSFER = 0.02


def price(stages_per_rank: int, *, has_head: bool) -> Costs:
    """Return the costs of the stages in FLOPs of a layer's products with weights."""
    stages = RANKS * stages_per_rank
    layers = LAYERS / stages
    head = np.zeros(stages)
    head[-1] = HEAD if has_head else 0.0
    return Costs(
        forward=(layers * (1 + ATTENTION) + head).tolist(),
        backward_input=(layers * (1 + 2.5 * ATTENTION) + head).tolist(),
        backward_weight=(layers + head).tolist(),
        transfer=TRANSFER * LAYERS / RANKS * (1 + ATTENTION),
        activation_bytes=1 / stages_per_rank,
    )


def table() -> Table:
    """Predict throughput relative to 1F1B, with even stages and with the head on the last."""
    first: dict[bool, float] = {}
    rows = []
    for name, tokens in PUBLISHED.items():
        measured = tokens / PUBLISHED["1F1B"]
        cells = [name, f"{measured:.3f}"]
        for has_head in (False, True):
            schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES)
            costs = price(schedule.num_stages // RANKS, has_head=has_head)
            timeline = simulate(schedule, costs)
            ratio = first.setdefault(has_head, timeline.end_time) / timeline.end_time
            above = percent(above_bound(timeline, costs))
            cells += [f"{ratio:.3f}", percent(ratio / measured - 1), above]
        rows.append(cells)
    headings = ["schedule", "measured / 1F1B"]
    for stages in ("even stages", "head on the last stage"):
        headings += [f"predicted, {stages}", "error", "above the bound"]
    return Table(headings, rows)

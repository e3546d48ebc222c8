"""Llama 3 405B: TFLOP/s per GPU when the GPUs double and the batch does not.

The Llama 3 Herd of Models, table 4 and section 3.3.2, https://arxiv.org/abs/2407.21783
"""

from docs_build.published.table import Table, above_bound, percent
from penstock.assembly import build
from penstock.costs import Costs
from penstock.sim.engine import simulate

# Pipeline ranks; stages of a rank: 126 layers, embedding and head make 128 chunks of one each.
RANKS, STAGES_PER_RANK = 16, 8
# By GPUs: sequences of a replica in a step, one microbatch each, and the published TFLOP/s.
MICROBATCHES = {8_192: 32, 16_384: 16}
PUBLISHED = {8_192: 430.0, 16_384: 400.0}
# Transfer seconds of a message, as shares of the forward of one chunk.
TRANSFERS = (0.0, 0.05, 0.1, 0.2)


def table() -> Table:
    """Predict the second row of the published table from the first."""
    rows = []
    for transfer in TRANSFERS:
        # A rank's share is 8 chunks, whose F, I and W take a second each.
        costs = Costs(transfer=transfer / STAGES_PER_RANK)
        timelines = {
            gpus: simulate(
                build(
                    "Interleaved1F1B",
                    ranks=RANKS,
                    microbatches=count,
                    stages_per_rank=STAGES_PER_RANK,
                ),
                costs,
            )
            for gpus, count in MICROBATCHES.items()
        }
        rates = {gpus: count / timelines[gpus].end_time for gpus, count in MICROBATCHES.items()}
        predicted = PUBLISHED[8_192] * rates[16_384] / rates[8_192]
        rows.append(
            [
                f"{transfer:g}",
                *(
                    f"{timeline.bubble_rate:.1%}".replace("%", " %")
                    for timeline in timelines.values()
                ),
                f"{predicted:.0f}",
                f"{PUBLISHED[16_384]:.0f}",
                percent(predicted / PUBLISHED[16_384] - 1),
                *(percent(above_bound(timeline, costs)) for timeline in timelines.values()),
            ]
        )
    headings = (
        "transfer / F of a layer",
        "bubble, 8,192 GPUs",
        "bubble, 16,384",
        "predicted TFLOP/s on 16,384",
        "published",
        "error",
        "above the bound, 8,192",
        "above the bound, 16,384",
    )
    return Table(headings, rows)

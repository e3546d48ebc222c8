"""A schedule of your own, as a function.

A family is a function of ranks, microbatches and stages per rank that says what each rank does,
in order. Here every rank runs twice as far ahead as in 1F1B, which hides slow messages
and costs memory. It is checked, drawn, compared with 1F1B, and trained with; nothing else has to
know about it.

    python examples/own_schedule.py
"""

import torch
from torch import nn

import penstock as ps


def eager(ranks: int, microbatches: int, stages_per_rank: int) -> ps.Schedule:
    """1F1B with two forwards ahead for every hop to the last rank, instead of one."""
    orders = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank) + 1, microbatches)
        order = [f"{rank}F{number}" for number in range(ahead)]
        for number in range(microbatches):
            order.append(f"{rank}B{number}")
            if ahead + number < microbatches:
                order.append(f"{rank}F{ahead + number}")
        orders.append(order)
    return ps.Schedule.from_orders(orders, name="Eager1F1B")


ps.register("Eager1F1B", eager)

# Messages that take half a forward: the case in which running ahead pays.
costs = ps.Costs(forward=1, backward_input=1, backward_weight=1, transfer=0.5)
for name in ("1F1B", "Eager1F1B"):
    schedule = ps.build(name, ranks=4, microbatches=8)  # refused here if it could not finish
    timeline = ps.simulate(schedule, costs)
    print(f"{name}: {timeline.end_time:g} s, {timeline.peak_activations} activations")
    print(ps.view.draw(timeline, width=90))

stages = [nn.Linear(8, 8) for _ in range(4)]
pipeline = ps.Pipeline(stages, "Eager1F1B", microbatches=8, loss=nn.MSELoss())
print(f"loss {pipeline.step(torch.randn(16, 8), target=torch.randn(16, 8)).loss:.4f}")

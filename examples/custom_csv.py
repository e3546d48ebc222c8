"""A schedule from a CSV file.

One row per rank, one cell per action: the format that `torch.distributed.pipelining` reads and
writes, and that a spreadsheet or another program can make. A file that could not finish is
refused before anything runs, with the rank, the position and the circle of waits.

    python examples/custom_csv.py
"""

from pathlib import Path

import torch
from torch import nn

import penstock as ps

Path("mine.csv").write_text(
    "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n"  # rank 0, which holds stage 0
    "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"  # rank 1, which holds stage 1
)
schedule = ps.Schedule.from_csv("mine.csv")
ps.check(schedule)
print(schedule)
print(f"{ps.simulate(schedule).end_time:g} s if F takes 1 s and B takes 2 s")

pipeline = ps.Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], schedule, loss=nn.MSELoss())
result = pipeline.step(torch.randn(12, 8), target=torch.randn(12, 8))
print(f"loss {result.loss:.4f}")

Path("stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
try:
    ps.check(ps.Schedule.from_csv("stuck.csv"))
except ps.errors.DeadlockError as error:
    print(error)

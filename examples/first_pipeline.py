"""A first pipeline in twenty lines.

Four stages on two ranks, all in this process: the way to try, debug and test. The gradients are
those of the model that was never split.

    python examples/first_pipeline.py
"""

import torch
from torch import nn

import penstock as ps

torch.manual_seed(0)
stages = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]  # any modules
pipeline = ps.Pipeline(stages, "ZBV", microbatches=8, loss=nn.MSELoss())
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
x, y = torch.randn(64, 16), torch.randn(64, 16)

for step in range(50):
    result = pipeline.step(x, target=y)  # forward and backward of all microbatches
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1:2}: loss {result.loss:.4f}")

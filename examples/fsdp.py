"""FSDP and pipeline together.

Four processes: two pipelines of two ranks each, side by side. Stages are sharded over the
pipelines with torch's `fully_shard`; parameters are gathered and let go where the schedule says,
and gradients are reduced once per step. The whole model is saved at the end, gathered from all
shards of all stages. With GPUs, say "cuda" and "nccl" in the two places.

    torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
data, rank = mesh["data"].get_local_rank(), mesh["pipeline"].get_local_rank()

torch.manual_seed(0)  # the same model everywhere
stages = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
schedule = ps.build("ZBV", ranks=2, microbatches=8)
own = {stage: stages[stage] for stage in schedule.placement.stages(rank)}
for module in own.values():
    fully_shard(module, mesh=mesh["data"])
pipeline = ps.Pipeline(own, schedule, loss=nn.MSELoss(), group=mesh["pipeline"])
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)

torch.manual_seed(1 + data)  # each pipeline has rows of its own
x, y = torch.randn(32, 16), torch.randn(32, 16)
for _ in range(20):
    result = pipeline.step(x, target=y)
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

if rank == 0:
    print(f"pipeline {data}: loss {result.loss:.4f}\n", end="")
# Every rank of every pipeline calls it; the first one gets the whole model.
state = pipeline.full_state_dict()
if dist.get_rank() == 0:
    torch.save(state, "trained.pt")
dist.destroy_process_group()

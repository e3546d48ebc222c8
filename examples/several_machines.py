r"""Several machines under torchrun.

The same command on each machine; HOST is the name or address of any one of them, which the
others can reach. Each machine starts two ranks here; say `--nproc-per-node 8` for eight GPUs,
and the script takes them. Every process makes all stages and keeps its own.

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
        --rdzv-endpoint HOST:29500 --rdzv-id my-run examples/several_machines.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same model and batch everywhere
schedule = ps.build("ZB-H1", ranks=ranks, microbatches=4 * ranks)
stages = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(schedule.num_stages)]
own = {stage: stages[stage].to(device) for stage in schedule.placement.stages(rank)}
pipeline = ps.Pipeline(own, schedule, loss=nn.MSELoss(), group=dist.group.WORLD, device=device)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)

# The first rank needs the batch and the last one the target; the loss is known to all.
x, y = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
for step in range(20):
    result = pipeline.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1:2} on {ranks} ranks: loss {result.loss:.4f}")
state = pipeline.full_state_dict()  # on every rank; the first one gets the whole model
if rank == 0:
    torch.save(state, "trained.pt")
dist.destroy_process_group()

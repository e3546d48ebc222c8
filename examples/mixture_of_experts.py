"""A mixture of experts, which are spread over processes beside the pipeline.

Four processes: two pipelines of two ranks, which have batches of their own and share the experts
of each stage. Rows travel to their expert and back by `ps.communicate`, which a schedule with
overlapped actions, as here, lets run beside compute. The loss that keeps experts evenly busy is
added where it arises.

    torchrun --standalone --nproc-per-node 4 examples/mixture_of_experts.py
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps

WIDTH, EXPERTS = 16, 4
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "pipeline"))
group, rank = mesh["expert"].get_group(), mesh["pipeline"].get_local_rank()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        everyone = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(EXPERTS)]
        self.here = nn.ModuleList(everyone[group.rank() :: group.size()])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shares = self.router(rows).softmax(-1)
        weight, expert = shares.max(-1)
        # Rows in the order of who has their expert: numbers go round among the ranks.
        order = (expert % group.size() * EXPERTS + expert).argsort()
        counts = torch.bincount(expert, minlength=EXPERTS)
        ps.add_loss(0.01 * (counts / len(rows) * shares.mean(0)).sum() * EXPERTS)
        leaving = counts.view(-1, group.size()).T.contiguous()
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, group=group)
        there, back = leaving.sum(1).tolist(), coming.sum(1).tolist()
        parts = torch.split(travel(rows[order], there, back), coming.flatten().tolist())
        done = [self.here[i % len(self.here)](part) for i, part in enumerate(parts)]
        mixed = travel(torch.cat(done), back, there)[order.argsort()]
        return torch.addcmul(rows, weight[:, None], mixed)


def travel(rows: torch.Tensor, there: Sequence[int], back: Sequence[int]) -> torch.Tensor:
    def begin(value: torch.Tensor, out: Sequence[int], into: Sequence[int]) -> Any:
        arrived = value.new_empty(sum(into), WIDTH)
        settings: dict[str, Any] = {"group": group, "async_op": True}
        return arrived, dist.all_to_all_single(arrived, value, into, out, **settings)

    return ps.communicate(
        rows, lambda value: begin(value, there, back), lambda grad: begin(grad, back, there)
    )


schedule = ps.build("DualPipeV", ranks=2, microbatches=8)
torch.manual_seed(0)  # the same routers everywhere
blocks = [Block() for _ in range(schedule.num_stages)]
own = {stage: blocks[stage] for stage in schedule.placement.stages(rank)}
pipeline = ps.Pipeline(own, schedule, loss=nn.MSELoss(), group=mesh["pipeline"])
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)

torch.manual_seed(1 + group.rank())  # each pipeline has rows of its own
batch = torch.randn(64, WIDTH)
for step in range(10):
    result = pipeline.step(batch, target=batch.roll(1, -1))
    for name, parameter in pipeline.named_parameters():
        if ".here." not in name:  # routers are copies; experts have had the rows of both
            dist.all_reduce(parameter.grad, group=group)
        if parameter.grad is not None:
            parameter.grad /= group.size()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1:2}: loss {result.loss:.4f}")
dist.destroy_process_group()

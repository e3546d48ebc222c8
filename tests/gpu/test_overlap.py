"""Overlapped pairs on two pipelines of two NCCL ranks each, whose stages communicate across."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from penstock.training.options import TransportChoice
from tests.experts import EXCHANGES
from tests.processes import Processes
from tests.training.test_experts import MICROBATCHES, train_experts
from tests.training.test_overlap_tensor_parallel import train_tensor_parallel

pytestmark = pytest.mark.gpu


def train_everything(rank: int, device: torch.device, transport: TransportChoice) -> list[str]:
    """Return what was wrong, and what did not run by turns."""
    del rank
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("inside", "pipeline"))
    options = ps.RunOptions(transport=transport if device.type == "cuda" else "auto")
    schedule = ps.build("DualPipeV", ranks=2, microbatches=MICROBATCHES)
    found = {}
    for is_checkpointed in (False, True):
        name = "checkpointed" if is_checkpointed else "plain"
        for exchange in EXCHANGES:
            found[f"{exchange} experts, {name}"] = train_experts(
                mesh,
                schedule,
                is_checkpointed=is_checkpointed,
                exchange=exchange,
                options=options,
                steps=3,
            )
        found[f"tensor parallel, {name}"] = train_tensor_parallel(
            mesh, schedule, is_checkpointed=is_checkpointed
        )
    return [
        f"{name}: {one}"
        for name, one in found.items()
        if one["wrong"] or "overlapped actions by turns" not in one["repr"]
    ]


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_pairs_that_hide_exchanges_are_exact(
    four_ranks: Processes, accelerator: torch.device, transport: TransportChoice
) -> None:
    # In the second world of a process torch crashes while it splits NCCL's group for a mesh.
    four_ranks.stop()
    everyone = four_ranks.run(train_everything, accelerator, transport, seconds=200.0)
    assert everyone == [[]] * 4

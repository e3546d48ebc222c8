"""Generators of the ranks of a pipeline are alike after a state was loaded."""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock.integrations.layout import Layout
from penstock.integrations.processes import share_random_states
from tests.processes import Processes


def draw(rank: int) -> tuple[float, float, float]:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replica", "pipeline"))
    share_random_states(Layout(size, 1, 0, mesh))
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_ranks_of_a_pipeline_draw_what_the_first_one_does(two_processes: Processes) -> None:
    # Resumed with more processes, the Accelerator left the others with generators of their own,
    # and so with other data.
    first, second = two_processes.run(draw)
    assert first == second
    random.seed(0)
    assert first[0] == random.random()

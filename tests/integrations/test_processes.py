"""Generators of the ranks of a pipeline are alike after a state was loaded."""

import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock.integrations.hugging_face.random_states import (
    load_random_states,
    save_random_states,
)
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


def load_from_own_disk(rank: int, folder: Path) -> tuple[float, float]:
    """Resume where each rank sees its own files only; return what it drew, and draws again."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replica", "pipeline"))
    layout, disk = Layout(size, 1, 0, mesh), folder / str(rank)
    save_random_states(disk, layout)
    drawn = random.random()
    random.seed(rank)
    load_random_states(disk, layout)
    return drawn, random.random()


def test_a_state_that_only_the_first_rank_sees_is_that_of_all(
    two_processes: Processes, tmp_path: Path
) -> None:
    # Ranks that found no file kept generators of their own, and drew other data.
    (drawn, first), (_, second) = two_processes.run(load_from_own_disk, tmp_path)
    assert first == second == drawn

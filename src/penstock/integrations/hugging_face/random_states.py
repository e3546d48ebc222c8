"""Random numbers of a Trainer: the ranks of a pipeline have one state, each replica its own."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import safe_globals

from penstock.integrations.layout import Layout
from penstock.integrations.processes import share_random_states

__all__ = ["load_random_states", "save_random_states"]


def save_random_states(folder: Path, layout: Layout) -> None:
    """Save the state of this process's replica, in the way of one process of the library."""
    if layout.rank > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # what collators draw from
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    torch.save(states, folder / _name(layout))


def load_random_states(folder: Path, layout: Layout) -> None:
    """Load the state of this process's replica, if as many replicas have saved theirs.

    Otherwise all ranks of a pipeline keep the state that they have in common.
    """
    file = folder / _name(layout)
    if file.is_file():
        with safe_globals():
            states = torch.load(file, weights_only=True)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])  # what collators draw from
        torch.set_rng_state(states["cpu"])
    # The first rank has written the file, to a disk that others may not see.
    share_random_states(layout)


def _name(layout: Layout) -> str:
    return "rng_state.pth" if layout.replicas == 1 else f"rng_state_{layout.replica}.pth"

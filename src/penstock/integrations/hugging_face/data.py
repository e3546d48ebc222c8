"""Data of a Trainer: all ranks of a pipeline get the same batches, replicas get different ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from penstock.integrations.layout import Layout

__all__ = ["gather_over_replicas", "gather_rows", "load_by_replica", "loading_by_replica"]


def load_by_replica(accelerator: Accelerator, layout: Layout, loader: Any) -> Any:
    """Return a loader that the accelerator shards by replica, and not by process."""
    settings = accelerator.dataloader_config
    made = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=layout.replicas,
        process_index=layout.replica,
        split_batches=settings.split_batches,
        put_on_device=True,
        dispatch_batches=False,
        even_batches=settings.even_batches,
        use_seedable_sampler=settings.use_seedable_sampler,
        data_seed=settings.data_seed,
        non_blocking=settings.non_blocking,
    )
    accelerator._dataloaders.append(made)
    return made


@contextmanager
def loading_by_replica(accelerator: Accelerator, layout: Layout) -> Iterator[None]:
    """Have the accelerator prepare loaders for replicas meanwhile."""
    vars(accelerator)["prepare"] = partial(load_by_replica, accelerator, layout)
    try:
        yield
    finally:
        del vars(accelerator)["prepare"]


def gather_over_replicas(accelerator: Accelerator, layout: Layout, tree: Any) -> Any:
    """Return the rows of all replicas, without those that fill up the last batch."""
    if isinstance(tree, list | tuple):
        return type(tree)(gather_over_replicas(accelerator, layout, part) for part in tree)
    if not isinstance(tree, torch.Tensor):
        return tree
    tree = gather_rows(accelerator, layout, tree)
    state = accelerator.gradient_state
    is_filled = state.end_of_dataloader and state.remainder > 0
    return tree[: state.remainder] if is_filled else tree


def gather_rows(accelerator: Accelerator, layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of all replicas; every rank of a pipeline has the same ones."""
    if layout.replicas == 1:
        return tensor
    # Of each pipeline the first rank's are kept.
    found = Accelerator.gather(accelerator, tensor.contiguous())
    parts = found.chunk(layout.replicas * layout.ranks)
    return torch.cat(parts[:: layout.ranks])

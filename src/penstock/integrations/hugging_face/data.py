"""Data of a Trainer: all ranks of a pipeline get the same batches, replicas get different ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

from penstock.integrations.hugging_face.layout import Layout

__all__ = ["gather_over_replicas", "loading_by_replica"]


@contextmanager
def loading_by_replica(accelerator: Accelerator, layout: Layout) -> Iterator[None]:
    """Make the accelerator shard data by replica, and not by process, meanwhile."""
    settings = accelerator.dataloader_config

    def prepare(loader: Any) -> Any:
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

    vars(accelerator)["prepare"] = prepare
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
    if layout.replicas > 1:
        # Every rank of a pipeline has the same rows; the first one's are kept.
        parts = accelerator.gather(tree.contiguous()).chunk(layout.replicas * layout.ranks)
        tree = torch.cat(parts[:: layout.ranks])
    state = accelerator.gradient_state
    is_filled = state.end_of_dataloader and state.remainder > 0
    return tree[: state.remainder] if is_filled else tree

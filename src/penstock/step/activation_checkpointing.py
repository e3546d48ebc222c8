"""Activation checkpointing of a stage, including stages that write to their inputs."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.torch_private import tree_leaves, tree_map_only

__all__ = ["CheckpointedModule"]


class CheckpointedModule:
    """A module that runs under a checkpoint.

    A module that writes to its inputs would start the second run from what the first has written.
    Whether it does is found out in the first call; then every run gets copies, and what the first
    run wrote is written to the caller's tensors too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._writes: bool | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module; its inputs are held until the backward."""
        if self._writes is not False:
            return self._run_on_copies(args, kwargs)
        given = _tensors((args, kwargs))
        versions = [tensor._version for tensor in given]
        output = checkpoint(self._module, *args, use_reentrant=False, **kwargs)
        if versions != [tensor._version for tensor in given]:
            self._writes = True
            raise PipelineError(
                "a checkpointed module must write to its inputs from its first microbatch on, or "
                "never (this one began later); repeat the step, which now expects it"
            )
        return output

    def _run_on_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _tensors((args, kwargs))
        # Tensors that autograd does not track belong to the caller, who will see the writes.
        kept_args, kept_kwargs = tree_map_only(torch.Tensor, _keep, (args, kwargs))
        first_run: list[torch.Tensor] = []

        def run(*inputs: Any, **named: Any) -> Any:
            copies = tree_map_only(torch.Tensor, torch.clone, (inputs, named))
            if not first_run:
                first_run.extend(_tensors(copies))
            return self._module(*copies[0], **copies[1])

        output = checkpoint(run, *kept_args, use_reentrant=False, **kept_kwargs)
        self._write_back(given, first_run)
        return output

    def _write_back(self, given: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """Copy back what the module has written to its copies; note whether it has."""
        written = [(to, copy) for to, copy in zip(given, copies, strict=True) if copy._version]
        self._writes = bool(self._writes or written)
        with torch.no_grad():
            for tensor, copy in written:
                if not tensor.requires_grad:
                    tensor.copy_(copy)


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.requires_grad else tensor.clone()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

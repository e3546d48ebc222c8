"""Compiled stages that cannot run among several ranks on devices."""

from collections.abc import Mapping

import torch

from penstock.errors import ArgumentError
from penstock.modules.compiled import is_compiled
from penstock.step.stage import Stage

__all__ = ["refuse_compiled_graphs"]


def refuse_compiled_graphs(stages: Mapping[int, Stage], device: torch.device) -> None:
    """Refuse stages whose outputs lie where the next microbatch is written, on a device.

    They may still be on their way. A split backward has compiled its stages again without graphs.
    """
    if device.type == "cpu":
        return
    for index, stage in stages.items():
        compiled = [module for module in stage.module.modules() if is_compiled(module)]
        if not compiled:
            continue
        # Loading the compiler takes seconds; with compiled modules it is there already.
        from penstock.deferred.compiled import captures_graphs

        if any(captures_graphs(module) for module in compiled):
            raise ArgumentError(
                f"stage {index} must not be compiled with mode='reduce-overhead', because its "
                "CUDA graphs overwrite outputs that are still being sent; compile it without that "
                "mode, and give options=ps.RunOptions(cuda_graphs=True) for graphs"
            )

"""Random numbers for the stages of a pipeline that are the same for every layout."""

from collections.abc import Mapping, Sequence

import torch

from penstock.step.layer_random import KnowsLayers, LayerRandom, StageRandom
from penstock.step.stage import Stage
from penstock.training.batch.batch import unwrap

__all__ = ["seed_stages"]


def seed_stages(
    seed: int, stages: Mapping[int, Stage], parts: Sequence[int], device: torch.device
) -> LayerRandom:
    """Let stages draw from streams of this seed, by layer or each as a whole.

    `parts` has the part of the model that each stage runs; copies of a part draw the same.
    """
    random = LayerRandom(seed, device)
    # A module that two stages run announces its layers once.
    for module in dict.fromkeys(unwrap(stage.module) for stage in stages.values()):
        if isinstance(module, KnowsLayers):
            random.observe(module)
    for index, stage in stages.items():
        stage.draw_from(StageRandom(random, unwrap(stage.module), parts[index]))
    return random

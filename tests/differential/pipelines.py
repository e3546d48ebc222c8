"""The pipeline of a case: its model by one of the doors, its schedule, and what it holds."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ir.dataflow import Dataflow
from tests.differential.batches import make_batch
from tests.differential.case import Case
from tests.differential.losses import LOSSES, LossFunction, count_targets
from tests.differential.model.building import SPLIT_DOORS, Model
from tests.differential.orders import build_schedule

__all__ = ["SEED", "held_modules", "known_warnings", "make_pipeline"]

# Of random numbers inside of stages.
SEED = 11
# What torch warns of in the plain model too: the compiler looks at every attribute, lazy modules
# are new, hooks fire otherwise behind frozen parts, and a weight was transposed between steps.
_TORCHS_OWN = (
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"Lazy modules are a new feature",
    r"Full backward hook is firing when gradients are computed with respect to module outputs",
    r"grad and param do not obey the gradient layout contract",
)


def make_pipeline(
    case: Case, model: Model, loss: LossFunction, group: dist.ProcessGroup | None
) -> ps.Pipeline:
    """The pipeline of a case in this process, or this process's part of it."""
    settings: dict[str, Any] = {"group": group, "loss": loss}
    match LOSSES[case.loss].reduction:
        case "found":
            pass
        case "count":
            settings["reduction"] = count_targets
        case reduction:
            settings["reduction"] = reduction
    if "dropout" in case.kinds:
        settings["seed"] = SEED
    schedule = build_schedule(case)
    stages = [model.parts[part] for part in schedule.dataflow.parts]
    given: Any = stages
    match case.door:
        case "list":
            pass
        case "mapping":
            settings["ties"] = _tied_names(stages)
            rank = None if group is None else dist.get_rank(group)
            holder = schedule.placement.rank_of_stage
            given = {s: m for s, m in enumerate(stages) if rank in (None, holder[s])}
        case "pipe":
            given = ps.Pipe(model.parts, Dataflow(len(model.parts), case.edges))
        case "layers" | "traced":
            given = _split(case, model)
    if case.order.actions or case.skips or case.order.has_additions:
        return ps.Pipeline(given, schedule, **settings)
    if group is None:
        settings["ranks"] = case.order.ranks
    return ps.Pipeline(given, case.order.family, microbatches=case.order.microbatches, **settings)


def _split(case: Case, model: Model) -> ps.Pipe:
    """The whole model, cut where the parts of the case end."""
    batch = make_batch(case, 0)
    args, keywords = (batch.inputs.detach(),), batch.keywords()
    if case.door == "traced":
        return ps.split(model.whole, stages=len(case.parts), example=args, example_kwargs=keywords)
    sizes = [len(part.blocks) for part in case.parts]
    if not case.skips:
        return ps.split(model.whole, layers="layers", stages=sizes)
    return ps.split(
        model.whole, layers="layers", stages=sizes, example=args, example_kwargs=keywords
    )


def _tied_names(stages: Sequence[nn.Module]) -> list[list[str]]:
    """The names of every parameter that several stages have, for ranks without all stages."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(parameter, {})[number] = f"{number}.{name}"
    return [list(places.values()) for places in names.values() if len(places) > 1]


def held_modules(
    case: Case, model: Model, pipeline: ps.Pipeline, loss: LossFunction
) -> tuple[list[tuple[str, nn.Module]], LossFunction | None]:
    """What this process holds of a model, with prefixes for names, and the loss if it has that."""
    flow = pipeline.schedule.dataflow
    held = {flow.parts[stage]: module for stage, module in pipeline.modules.items()}
    own_loss = loss if flow.num_parts - 1 in held else None
    if case.door in SPLIT_DOORS:
        return [("", module) for module in held.values()], own_loss
    return [(f"{part}.", model.parts[part]) for part in held], own_loss


@contextmanager
def known_warnings() -> Iterator[None]:
    """Make errors of all warnings but that a stage has nothing to put off, and torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"the backward of the stages \[.*\] cannot be split")
        for message in _TORCHS_OWN:
            warnings.filterwarnings("ignore", message)
        yield

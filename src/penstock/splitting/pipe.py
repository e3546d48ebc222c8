"""Pipes: models cut into stage modules, with their dataflow, as every way of splitting returns.

The first stage is called like the model. Any other stage gets the outputs of the stages that feed
it, in their order; a tuple is several arguments. What a stage returns is sent to all stages that
it feeds, unless it is a `Routed` with something for each of them. The last stage returns what the
model returns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn

from penstock.errors import ArgumentError, ModelError
from penstock.ir.dataflow import Dataflow, Routed
from penstock.ir.schedule import Schedule
from penstock.splitting.materialize import compute_buffers, expect_filled, give_memory
from penstock.splitting.original import unguarded
from penstock.splitting.placed_routes import ValueRoutes, dataflow_on
from penstock.splitting.signature import Signature, sign
from penstock.tensors.packet import as_arguments
from penstock.torch_private import tree_map_only

__all__ = ["Pipe", "Tie", "check_complete", "require_stages"]


@dataclass(frozen=True, slots=True)
class Tie:
    """One parameter that has several names, as the stage and name of each."""

    places: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that hold it."""
        return tuple(sorted({stage for stage, _ in self.places}))


@dataclass(frozen=True, eq=False)
class Pipe:
    """A model cut into stages that run one after the other, or in a `Pipeline`.

    Names of parameters and buffers are the model's own: the union of the stages' `state_dict` is
    that of the model.
    """

    stages: tuple[nn.Module, ...]
    dataflow: Dataflow
    # The values behind the dataflow, by which stages that share a rank share what it has.
    routes: ValueRoutes | None = field(default=None, repr=False)
    # The lists of layers that it was cut between, if it was split by layers.
    layers: tuple[str, ...] = ()
    # Every parameter that has several names, found before anything replaces it.
    shared: tuple[Tie, ...] = field(init=False)
    # The signatures when the model was split, by which ranks check that they split alike.
    signatures: tuple[Signature, ...] = field(init=False)
    # The model that was split, as long as something else keeps it alive.
    original: ReferenceType[nn.Module] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        shared = (Tie(tuple(places)) for places in self._places().values() if len(places) > 1)
        object.__setattr__(self, "shared", tuple(shared))
        object.__setattr__(self, "signatures", tuple(sign(stage) for stage in self.stages))

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process, one after the other, and return the model's output."""
        return self._run(lambda value: value, args, kwargs)

    def run_detached(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages with gradients cut between them, as on separate ranks."""
        return self._run(_detach, args, kwargs)

    def _run(
        self, cross: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        made: dict[tuple[int, int], Any] = {}
        output: Any = None
        for index, stage in enumerate(self.stages):
            received = [made.pop((p, index)) for p in self.dataflow.producers(index)]
            output = stage(*as_arguments(received)) if index else stage(*args, **kwargs)
            for consumer in self.dataflow.consumers(index):
                value = output.values[consumer] if isinstance(output, Routed) else output
                made[index, consumer] = cross(value)
        return output

    def with_stages(self, wrapped: Mapping[int, nn.Module]) -> "Pipe":
        """Return this pipe with some stages replaced, for example by DDP wrappers."""
        stages = [wrapped.get(index, stage) for index, stage in enumerate(self.stages)]
        pipe = Pipe(tuple(stages), self.dataflow, self.routes, self.layers)
        object.__setattr__(pipe, "shared", self.shared)
        object.__setattr__(pipe, "signatures", self.signatures)
        object.__setattr__(pipe, "original", self.original)
        return pipe

    def dataflow_on(self, schedule: Schedule) -> Dataflow:
        """Return the dataflow of this pipe where it runs in the order of a schedule.

        A value that several stages of one rank need is sent there once: the first of them gets it
        from another rank, and the others from the one before them on their own rank. To simulate a
        step of this pipe, `reroute` a schedule to this dataflow.
        """
        return dataflow_on(self.routes, self.num_stages, self.dataflow, schedule)

    def of_model(self, model: nn.Module) -> "Pipe":
        """Return this pipe with a reference to the model that it was split from."""
        pipe = copy(self)
        object.__setattr__(pipe, "original", ref(model))
        return pipe

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without the model."""
        return vars(self) | {"original": None}

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that more than one stage holds."""
        return tuple(tie for tie in self.shared if len(tie.stages) > 1)

    def _places(self) -> dict[nn.Parameter, list[tuple[int, str]]]:
        places: dict[nn.Parameter, list[tuple[int, str]]] = {}
        for index, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                places.setdefault(parameter, []).append((index, name))
        return places

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every parameter once, by its name in the model."""
        return ((places[0][1], parameter) for parameter, places in self._places().items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every parameter once."""
        return iter(self._places())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all stages, by the model's own names."""
        return {name: value for stage in self.stages for name, value in stage.state_dict().items()}

    def to(self, device: torch.device | str) -> "Pipe":
        """Move every stage; a pipe too large for one device is moved stage by stage instead."""
        for stage in self.stages:
            stage.to(device)
        return self

    def materialize(
        self,
        stages: Iterable[int],
        device: torch.device | str,
        initialize: Callable[[nn.Module], object],
    ) -> None:
        """Allocate memory for these stages of a model on the meta device, and fill it.

        `initialize` is called with every module of theirs, children first, as by
        `nn.Module.apply`. It may call `reset_parameters`, or the model's own initialization. What
        it leaves out must be loaded before the first step. Buffers that are not in checkpoints
        are computed by models that define how, as those of `transformers` do. Tensors that are
        not on the meta device are kept.
        """
        own = sorted(set(stages))
        names = {index: give_memory(self.stages[index], device) for index in own}
        self._share_again(own)
        for index in own:
            self.stages[index].apply(lambda module: _call_without_graph(initialize, module))
            compute_buffers(self.stages[index], names[index])
            expect_filled(self.stages[index], names[index])

    def _share_again(self, own: Sequence[int]) -> None:
        """Tie the parameters again that were tied before they got memory."""
        for tie in self.shared:
            places = [(self.stages[stage], name) for stage, name in tie.places if stage in own]
            if places:
                parameter = places[0][0].get_parameter(places[0][1])
                for stage, name in places[1:]:
                    path, _, attribute = name.rpartition(".")
                    setattr(stage.get_submodule(path), attribute, parameter)

    def __repr__(self) -> str:
        return f"<Pipe: {self._title}>"

    @property
    def _title(self) -> str:
        lists = ", ".join(name or "the model itself" for name in self.layers)
        return f"{self.num_stages} stages{f' of the layers in {lists}' if lists else ''}"

    def __str__(self) -> str:
        lines = [self._title]
        for index, stage in enumerate(self.stages):
            parameters = list(stage.parameters())
            count = sum(parameter.numel() for parameter in parameters)
            size = sum(p.numel() * p.element_size() for p in parameters)
            feeds = ", ".join(map(str, self.dataflow.consumers(index))) or "nothing"
            lines.append(
                f"{index:>3}  {count:>14,} parameters  {size / 2**20:>10,.1f} MiB  feeds {feeds}"
            )
        return "\n".join(lines)


def _call_without_graph(function: Callable[[nn.Module], object], module: nn.Module) -> None:
    with torch.no_grad():
        function(module)


def _detach(value: Any) -> Any:
    return tree_map_only(torch.Tensor, _cut, value)


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def check_complete(model: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Raise if a split has lost a parameter or a buffer of the model, or has added one."""
    with unguarded(model):
        expected = dict(_state(model))
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        found.update(_state(stage))
    if lost := sorted(expected.keys() - found.keys()):
        raise ModelError(f"no stage holds {', '.join(lost)}; every part of the model needs one")
    if extra := sorted(found.keys() - expected.keys()):
        raise ModelError(f"stages hold {', '.join(extra)}, which the model does not have")


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from ((name, value) for name, value in module.state_dict().items())


def require_stages(stages: object) -> None:
    """Refuse what is neither a pipe nor modules, and say how a model becomes stages."""
    if isinstance(stages, Pipe):
        return
    wanted = "stages must be a Pipe, or one module per stage"
    # An iterator gives its modules once, and stages are looked at several times.
    if not isinstance(stages, Iterable) or isinstance(stages, Iterator):
        is_model = isinstance(stages, nn.Module)
        way = (
            "split it first, as in penstock.split(model, stages=4)" if is_model else "give a list"
        )
        raise ArgumentError(f"{wanted} (got {type(stages).__name__}); {way}")
    held = stages.values() if isinstance(stages, Mapping) else stages
    wrong = [type(one).__name__ for one in held if not isinstance(one, nn.Module)]
    if wrong:
        raise ArgumentError(f"{wanted} (got {wrong[0]} among them); give modules only")

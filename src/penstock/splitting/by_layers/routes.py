"""Which stage makes each value and which stages need it: what goes over which link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_layers.notes import INPUTS, Value

__all__ = ["LayerRoutes"]


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """Where units are called, and where the values that they return go.

    `stage_of_call` has the stage of every call that was seen, `stage_of_path` that of a unit's
    calls otherwise. A value goes to the first stage that needs it, and from there to the next.
    Of a value that nobody knows of, this is assumed: inputs of the model are needed by all
    stages, what the last layer of a stage returns by the next one.

    `loose` has the stages that hold a parameter or buffer which is used outside of the calls of
    units; of a container's, the first stage holds what is not in it. `written` has the buffers of
    containers that the model writes to, with the stages that read them. `outlines` is the tree of
    the inputs that the model was seen with, and how many leaves its output had. `rewritten` has
    the values that the model's code writes to in place, as every stage does again, `constants`
    the tensors that are plain attributes of units and were left alone, `changed` the attributes
    that a call of their unit changes.
    """

    num_stages: int
    stage_of_path: Mapping[str, int]
    last_layers: frozenset[str]
    stage_of_call: Mapping[tuple[str, int], int] = field(default_factory=dict)
    needs: Mapping[Value, Sequence[int]] = field(default_factory=dict)
    loose: Mapping[str, frozenset[int]] = field(default_factory=dict)
    written: Mapping[str, frozenset[int]] = field(default_factory=dict)
    outlines: tuple[str, int] = ("", 0)
    rewritten: frozenset[Value] = frozenset()
    constants: frozenset[str] = frozenset()
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def stage(self, path: str, call: int) -> int:
        """The stage on which a unit is called."""
        known = self.stage_of_call.get((path, call))
        return self.stage_of_path[path] if known is None else known

    @property
    def is_guessed(self) -> bool:
        """Whether nobody has seen the model run."""
        return not self.needs

    def callers(self, path: str) -> frozenset[int]:
        """The stages that call a unit, and so have to hold it."""
        calls = frozenset(at for (called, _), at in self.stage_of_call.items() if called == path)
        return calls or frozenset([self.stage_of_path[path]])

    def holds_loose(self, stage: int, name: str) -> bool:
        """Whether a stage holds a parameter or buffer of a container."""
        return stage in self.loose.get(name, {0})

    def held_parts(self, stage: int, path: str) -> list[str]:
        """The parameters and buffers of a unit that a stage holds without calling it."""
        start = f"{path}."
        names = (name for name, stages in self.loose.items() if stage in stages)
        return [name.removeprefix(start) for name in names if name.startswith(start)]

    def next_stop(self, value: Value, stage: int) -> int | None:
        """The stage to which one that has the value sends it on."""
        if value in self.needs:
            return next((s for s in self.needs[value] if s > stage), None)
        is_near = value.path in self.last_layers and self.stage(value.path, value.call) == stage
        is_wanted = value.path == INPUTS or (is_near and self.is_guessed)
        return stage + 1 if is_wanted and stage + 1 < self.num_stages else None

    def dataflow(self) -> Dataflow:
        """The chain, along which notes go, and the links that skip stages."""
        links = {(stage, stage + 1) for stage in range(self.num_stages - 1)}
        for value, stages in self.needs.items():
            origin = 0 if value.path == INPUTS else self.stage(value.path, value.call)
            links.update(pairwise([origin, *(s for s in stages if s > origin)]))
        return Dataflow(self.num_stages, sorted(links))

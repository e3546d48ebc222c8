"""Routes between the stages of a split by layers: which stage sends which value to which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.ir.dataflow import Dataflow
from penstock.splitting.by_layers.records.call_records import INPUTS, Value

__all__ = ["LayerRoutes"]


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The stage of every call of a unit, and the stages to which the returned values are sent.

    A value is sent to the first stage that needs it, and from there to the next one. A value that
    is not in `needed_by` is assumed to be needed as follows: inputs of the model by all stages,
    what the last layer of a stage returns by the next stage.

    - `stage_of_call`: the stage of every call that an example has shown.
    - `stage_of_path`: the stage of any other call of a unit.
    - `holders`: the stages that hold a parameter or buffer that is used outside of the calls of
      units. The first stage holds those of containers that are not in it.
    - `written`: buffers of containers that the model writes to, with the stages that read them.
    - `example_form`: the tree of the example's inputs, and the number of leaves of the output.
    - `rewritten`: values that the model's code writes to in place, on every stage.
    - `constants`: tensors that are plain attributes of units, and do not change.
    - `changed`: the attributes of a unit that its calls change.
    """

    num_stages: int
    stage_of_path: Mapping[str, int]
    last_layers: frozenset[str]
    stage_of_call: Mapping[tuple[str, int], int] = field(default_factory=dict)
    needed_by: Mapping[Value, Sequence[int]] = field(default_factory=dict)
    holders: Mapping[str, frozenset[int]] = field(default_factory=dict)
    written: Mapping[str, frozenset[int]] = field(default_factory=dict)
    example_form: tuple[str, int] = ("", 0)
    rewritten: frozenset[Value] = frozenset()
    constants: frozenset[str] = frozenset()
    changed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def stage(self, path: str, call: int) -> int:
        """Return the stage on which a unit is called."""
        known = self.stage_of_call.get((path, call))
        return self.stage_of_path[path] if known is None else known

    @property
    def is_guessed(self) -> bool:
        """Whether no example has shown which values are needed where."""
        return not self.needed_by

    def callers(self, path: str) -> frozenset[int]:
        """Return the stages that call a unit, and therefore hold it."""
        calls = frozenset(at for (called, _), at in self.stage_of_call.items() if called == path)
        return calls or frozenset([self.stage_of_path[path]])

    def holds_tensor(self, stage: int, name: str) -> bool:
        """Return whether a stage holds a parameter or buffer of a container."""
        return stage in self.holders.get(name, {0})

    def held_tensors(self, stage: int, path: str) -> list[str]:
        """Return the parameters and buffers of a unit that a stage holds without calling it."""
        start = f"{path}."
        names = (name for name, stages in self.holders.items() if stage in stages)
        return [name.removeprefix(start) for name in names if name.startswith(start)]

    def next_stage(self, value: Value, stage: int) -> int | None:
        """Return the stage to which a stage that has the value sends it, or None."""
        if value in self.needed_by:
            return next((s for s in self.needed_by[value] if s > stage), None)
        is_near = value.path in self.last_layers and self.stage(value.path, value.call) == stage
        is_wanted = value.path == INPUTS or (is_near and self.is_guessed)
        return stage + 1 if is_wanted and stage + 1 < self.num_stages else None

    def origin(self, value: Value) -> int:
        """Return the stage that makes a value."""
        return 0 if value.path == INPUTS else self.stage(value.path, value.call)

    def dataflow(self) -> Dataflow:
        """Return the chain of stages, which records follow, and the links that skip stages."""
        links = {(stage, stage + 1) for stage in range(self.num_stages - 1)}
        for value, stages in self.needed_by.items():
            origin = self.origin(value)
            links.update(pairwise([origin, *(s for s in stages if s > origin)]))
        return Dataflow(self.num_stages, sorted(links))

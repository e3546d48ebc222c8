"""The value `Costs`: seconds and bytes by kind of action, of the host and of links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.atomic_files import write_atomically
from penstock.costs.gains import Gains, freeze_gains
from penstock.costs.numbers import (
    PerLink,
    PerStage,
    Wires,
    format_values,
    freeze,
    freeze_table,
    freeze_wires,
    shorten,
)
from penstock.costs.recut import NOT_SHARED, recut
from penstock.errors import CostsError, ParseError
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.untrusted import quote, read_table

__all__ = ["COLLECTIVES", "PER_STAGE", "Costs"]

COLLECTIVES = ("unshard", "reshard", "reduce_grad")

PER_STAGE = (
    "forward",
    "backward_input",
    "backward_weight",
    "full_backward",
    "activation_bytes",
    "weight_stash_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "message_bytes",
    "workspace_bytes",
    "recompute",
    "input_bytes",
    *COLLECTIVES,
)
# One number each, for all stages and ranks.
_SINGLE = (
    "send",
    "host_action",
    "host_message",
    "collective_overlap",
    "host_link",
)
_OPTIONAL = ("full_backward", "wires", "recompute", "input_bytes", "host_link")

# What grows with the size of a microbatch.
_SCALED = (
    "forward",
    "backward_input",
    "backward_weight",
    "full_backward",
    "transfer",
    "send",
    "activation_bytes",
    "weight_stash_bytes",
    "message_bytes",
    "workspace_bytes",
    "recompute",
    "input_bytes",
)
# A microbatch is at most this many times as large as the costs say.
_LARGEST_SCALE = 1e6


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes by kind of action; each a number, or a list with one number per stage.

    A number is one rank's share of the model, of which each of its stages gets its part. So
    schedules with one and with several stages per rank are priced for the same model.

    `transfer` is the seconds that a value needs from rank to rank: one number, or a table with a
    row per sending and a column per receiving rank. `send` is the seconds that a send occupies
    the sender. Activations live from F to I or B (`activation_bytes`), what the weight backward
    still needs lives from I to W (`weight_stash_bytes`). An overlapped pair takes the sum of its
    parts less `overlap_gain` (0 to 1) times the shorter of them: one share for all pairs, or one
    by kinds, such as {"F+B": 0.4, "F+W": 0.2}, in which other pairs save nothing.

    Parameters, gradients and optimizer state are held all the time, and so is room for what a
    stage receives: one input of `message_bytes`, and one gradient of what its consumers take in.
    `workspace_bytes` is what a stage needs for itself while one of its actions runs.

    The host's seconds occupy the rank, since a device that waits for its host is not free:
    `host_action` for each compute action that takes any time, `host_message` for each message on
    its sender and on its receiver. They are the same for every stage, however small it is.

    `unshard`, `reshard` and `reduce_grad` are the seconds of a stage's collectives: UNSHARD ends
    before the stage is used, REDUCE_GRAD begins when its last backward is over, and a step lasts
    until all are done. The share `collective_overlap` of a collective runs beside compute, after
    that of the rank's earlier collectives; before it comes the rest, which occupies the rank.

    A forward that is recomputed holds only its inputs (`input_bytes`, by default `message_bytes`)
    until its RECOMPUTE, which takes the seconds of `recompute`, by default those of the forward.
    `host_link` is how many bytes a second go from a rank to its host by OFFLOAD, and as many at
    the same time back by RELOAD; without it, these take no time.

    `wires` says which links share a wire, which carries one message at a time, the first that is
    ready first: a table with a row per sender and a column per receiver, in which equal numbers
    share a wire and 0 has a wire of its own; or one number per rank, its node: the messages from
    a node to others share a wire.

    `microbatch_scale` is the size of every microbatch, or of each: compute, transfers, sends, and
    the bytes of activations, messages and workspaces are that many times as large. Host seconds
    and collectives are not.

    >>> Costs(forward=1, backward_input=1, backward_weight=[1, 2]).full_backward_seconds(1)
    3.0
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    full_backward: PerStage | None = None
    transfer: PerLink = 0.0
    send: float = 0.0
    overlap_gain: Gains = 0.0
    activation_bytes: PerStage = 0.0
    weight_stash_bytes: PerStage = 0.0
    parameter_bytes: PerStage = 0.0
    gradient_bytes: PerStage = 0.0
    optimizer_bytes: PerStage = 0.0
    message_bytes: PerStage = 0.0
    workspace_bytes: PerStage = 0.0
    host_action: float = 0.0
    host_message: float = 0.0
    unshard: PerStage = 0.0
    reshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    collective_overlap: float = 1.0
    wires: Wires | None = None
    microbatch_scale: float | Sequence[float] = 1.0
    recompute: PerStage | None = None
    input_bytes: PerStage | None = None
    host_link: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _frozen(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if (share := self.collective_overlap) > 1:
            raise CostsError(f"collective_overlap must be between 0 and 1 (got {share})")
        if self.host_link == 0:
            raise CostsError("host_link must be above 0 bytes a second; leave it out for no limit")
        if (largest := float(np.max(self.microbatch_scale))) > _LARGEST_SCALE:
            raise CostsError(
                f"microbatch_scale must be at most {_LARGEST_SCALE:g} (got {largest:g}); give "
                "sizes as multiples of the microbatch that the other costs are for"
            )

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={shorten(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"Costs({', '.join(changed)})"

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> "Costs":
        """Return costs from names and numbers; the error for an unknown name lists all names."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise CostsError(f"unknown cost {quote(unknown[0])}; known are {', '.join(known)}")
        return cls(**values)  # type: ignore[arg-type]  # __post_init__ checks every value

    @classmethod
    def from_file(cls, path: Path | str) -> "Costs":
        """Return costs from a TOML or JSON file that holds names and numbers."""
        file = Path(path)
        try:
            values = read_table(file)
            if not isinstance(values, dict):
                raise CostsError("write names and numbers, such as forward = 1.5")
            return cls.from_mapping(values)
        except (CostsError, ParseError) as error:
            raise CostsError(f"{file}: {error}") from error

    def to_mapping(self) -> dict[str, object]:
        """Return names and plain numbers, from which `from_mapping` makes the same costs."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.overlap_gain, Sequence):
            named["overlap_gain"] = dict(self.overlap_gain)
        return {name: value for name, value in named.items() if value is not None}

    def to_file(self, path: Path | str) -> None:
        """Write the costs for `from_file`: as JSON if the suffix is .json, else as TOML."""
        file = Path(path)
        text = format_values(self.to_mapping(), is_json=file.suffix == ".json")
        write_atomically(file, text)

    def for_each_stage(self, stages: int) -> "Costs":
        """Return costs per stage in which every single number is that of each stage.

        >>> Costs(forward=2, backward_input=[1, 3]).for_each_stage(2).forward
        (2.0, 2.0)
        """
        return self.divide_shares(stages, range(stages))

    def divide_shares(self, ranks: int, parts: Sequence[int]) -> "Costs":
        """Return costs per stage, for stages that run these parts of a model on some ranks.

        >>> Costs(forward=2, message_bytes=5).divide_shares(2, range(4)).forward
        (1.0, 1.0, 1.0, 1.0)
        """
        changes: dict[str, Any] = {
            name: (value * (1 if name in NOT_SHARED else ranks / (max(parts) + 1)),) * len(parts)
            for name in PER_STAGE
            if isinstance(value := getattr(self, name), float) and value
        }
        return replace(self, **changes) if changes else self

    def of_stages(self, schedule: Schedule) -> "Costs":
        """Return the costs of a schedule's stages, one number for each."""
        return self.divide_shares(schedule.num_ranks, schedule.dataflow.parts)

    def recut(self, share_of: int, pieces: int) -> "Costs":
        """Return the costs of the same model cut into `pieces` stages.

        A single number is one of `share_of` equal shares of the model. A list is for consecutive
        pieces, which are added up or divided evenly. Messages and workspaces keep their size.
        """
        changes: dict[str, Any] = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, Sequence):
                changes[name] = recut(name, list(value), pieces)
        return replace(self, **changes).divide_shares(share_of, range(pieces))

    def for_parts(self, parts: Sequence[int]) -> "Costs":
        """Return the costs of stages that run these parts of the model, from costs per part."""
        changes: dict[str, Any] = {
            name: tuple(value[part] for part in parts)
            for name in PER_STAGE
            if isinstance(value := getattr(self, name), Sequence)
        }
        return replace(self, **changes)

    def full_backward_seconds(self, stage: int) -> float:
        """Return the seconds of a stage's full backward: as given, or both halves added up."""
        given: tuple[PerStage, ...] = (self.backward_input, self.backward_weight)
        if self.full_backward is not None:
            given = (self.full_backward,)
        return sum(value[stage] if isinstance(value, Sequence) else value for value in given)

    def per_stage(self, name: str, stages: int) -> Floats:
        """Return one of the costs, for every stage."""
        value: PerStage = getattr(self, name)
        if isinstance(value, Sequence) and len(value) != stages:
            raise CostsError(
                f"{name} has {len(value)} values, but the schedule has {stages} stages; "
                "give one number, or one per stage"
            )
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (stages,))

    def per_link(self, ranks: int) -> Floats:
        """Return the transfer seconds from every rank to every rank."""
        table = np.asarray(self.transfer, dtype=np.float64)
        if table.ndim and table.shape != (ranks, ranks):
            raise CostsError(
                f"transfer is a table of {table.shape[0]} by {table.shape[1]}, but the schedule "
                f"has {ranks} ranks; give one number, or one per sender and receiver"
            )
        return np.broadcast_to(table, (ranks, ranks))

    def per_wire(self, ranks: int) -> NDArray[np.int64]:
        """Return the number of the wire from every rank to every rank; 0 is shared by none."""
        table = np.asarray(0 if self.wires is None else self.wires, dtype=np.int64)
        if table.ndim and table.shape != (ranks,) * table.ndim:
            raise CostsError(
                f"wires has {len(table)} rows, but the schedule has {ranks} ranks; give one "
                "number per rank, or one per sender and receiver"
            )
        if table.ndim == 1:
            leaves = table[:, None] != table
            return np.where(leaves, table[:, None] + 1, 0)
        return np.broadcast_to(table, (ranks, ranks))

    def recompute_seconds(self, stages: int) -> Floats:
        """Return the seconds of every stage's RECOMPUTE: as given, or those of its forward."""
        return self.per_stage("forward" if self.recompute is None else "recompute", stages)

    def saved_input_bytes(self, stages: int) -> Floats:
        """Return the bytes that every stage's forward holds if it is recomputed."""
        name = "message_bytes" if self.input_bytes is None else "input_bytes"
        activation = self.per_stage("activation_bytes", stages)
        return np.minimum(self.per_stage(name, stages), activation)

    @property
    def is_unscaled(self) -> bool:
        """Whether every microbatch has the size that the costs are for."""
        return self.microbatch_scale == 1.0

    @property
    def has_collectives(self) -> bool:
        """Whether UNSHARD, RESHARD or REDUCE_GRAD takes any time."""
        return any(np.any(getattr(self, name)) for name in COLLECTIVES)

    def scales(self, microbatches: int) -> Floats:
        """Return the size of every microbatch, as a multiple of what the costs are for."""
        value = np.asarray(self.microbatch_scale, dtype=np.float64)
        if value.ndim and len(value) != microbatches:
            raise CostsError(
                f"microbatch_scale has {len(value)} values, but the schedule has {microbatches} "
                "microbatches; give one number, or one per microbatch"
            )
        return np.broadcast_to(value, (microbatches,))

    def for_even_microbatches(self, scale: float) -> "Costs":
        """Return the costs if every microbatch had this size, as costs of size 1."""
        changes = {
            name: (np.asarray(value) * scale).tolist()
            for name in _SCALED
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **changes, microbatch_scale=1.0)

    def without_collectives(self) -> "Costs":
        """Return the costs of compute and messages alone."""
        return replace(self, unshard=0.0, reshard=0.0, reduce_grad=0.0)


def _frozen(name: str, value: object) -> object:
    """Check every number, and return numbers as floats and sequences as tuples."""
    if value is None and name in _OPTIONAL:
        return None
    match name:
        case "overlap_gain":
            return freeze_gains(value)
        case "transfer":
            return freeze_table(name, value)
        case "wires":
            return freeze_wires(value)
        case _:
            return freeze(name, value, is_single=name in _SINGLE)

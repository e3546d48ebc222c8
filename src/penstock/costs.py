"""Costs of actions: seconds and bytes per stage and kind of action, and seconds per link."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.atomic_files import write_atomically
from penstock.errors import CostsError, ParseError
from penstock.ir.actions import Kind
from penstock.ir.graph import Graph
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.untrusted import LARGEST, quote, read_table, to_quantity

__all__ = ["Costs", "PerLink", "PerStage", "Prices"]

_PER_STAGE = (
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
)

# Sizes that do not depend on how many pieces a model is cut into.
_NOT_SHARED = ("message_bytes", "workspace_bytes")

# A repr shows this many numbers of a cost; of more it shows the range.
_FEW_NUMBERS = 4

PerStage: TypeAlias = float | Sequence[float]
PerLink: TypeAlias = float | Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """The costs of one schedule: seconds per row, and seconds per need that crosses ranks.

    `duration` is the time until a row's result is there, `busy` how long it occupies its rank.
    """

    duration: Floats
    busy: Floats
    lag: Floats


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and bytes by kind of action; each a number, or a list with one number per stage.

    A number is one rank's share of the model, of which each of its stages gets its part. So
    schedules with one and with several stages per rank are priced for the same model.

    `transfer` is the seconds that a value needs from rank to rank: one number, or a table with a
    row per sending and a column per receiving rank. `send` is the seconds that a send occupies
    the sender. Activations live from F to I or B (`activation_bytes`), what the weight backward
    still needs lives from I to W (`weight_stash_bytes`). An overlapped pair takes the sum of its
    parts less `overlap_gain` (0 to 1) times the shorter of them.

    Parameters, gradients and optimizer state are held all the time, and so is room for what a
    stage receives: one input of `message_bytes`, and one gradient of what its consumers take in.
    `workspace_bytes` is what a stage needs for itself while one of its actions runs.

    >>> Costs(forward=1, backward_input=1, backward_weight=[1, 2]).full_backward_seconds(1)
    3.0
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    full_backward: PerStage | None = None
    transfer: PerLink = 0.0
    send: float = 0.0
    overlap_gain: float = 0.0
    activation_bytes: PerStage = 0.0
    weight_stash_bytes: PerStage = 0.0
    parameter_bytes: PerStage = 0.0
    gradient_bytes: PerStage = 0.0
    optimizer_bytes: PerStage = 0.0
    message_bytes: PerStage = 0.0
    workspace_bytes: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = _frozen(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        if not self.overlap_gain <= 1:
            raise CostsError(f"overlap_gain must be between 0 and 1 (got {self.overlap_gain})")

    def __repr__(self) -> str:
        changed = (
            f"{field.name}={_shorten(value)}"
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
        return {name: value for name, value in named.items() if value is not None}

    def to_file(self, path: Path | str) -> None:
        """Write the costs for `from_file`: as JSON if the suffix is .json, else as TOML."""
        file = Path(path)
        # TOML reads numbers and lists of numbers as JSON writes them.
        lines = [(name, json.dumps(value)) for name, value in self.to_mapping().items()]
        if file.suffix == ".json":
            text = "{\n" + ",\n".join(f'  "{name}": {value}' for name, value in lines) + "\n}\n"
        else:
            text = "".join(f"{name} = {value}\n" for name, value in lines)
        write_atomically(file, text)

    def for_each_stage(self, num_stages: int) -> "Costs":
        """Return costs per stage in which every single number is that of each stage.

        >>> Costs(forward=2, backward_input=[1, 3]).for_each_stage(2).forward
        (2.0, 2.0)
        """
        return self.divide_shares(num_stages, range(num_stages))

    def divide_shares(self, ranks: int, parts: Sequence[int]) -> "Costs":
        """Return costs per stage, for stages that run these parts of a model on some ranks.

        >>> Costs(forward=2, message_bytes=5).divide_shares(2, range(4)).forward
        (1.0, 1.0, 1.0, 1.0)
        """
        changes: dict[str, Any] = {
            name: (value * (1 if name in _NOT_SHARED else ranks / (max(parts) + 1)),) * len(parts)
            for name in _PER_STAGE
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
        for name in _PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, Sequence):
                changes[name] = _recut(name, list(value), pieces)
        return replace(self, **changes).divide_shares(share_of, range(pieces))

    def for_parts(self, parts: Sequence[int]) -> "Costs":
        """Return the costs of stages that run these parts of the model, from costs per part."""
        changes: dict[str, Any] = {
            name: tuple(value[part] for part in parts)
            for name in _PER_STAGE
            if isinstance(value := getattr(self, name), Sequence)
        }
        return replace(self, **changes)

    def full_backward_seconds(self, stage: int) -> float:
        """Return the seconds of a stage's full backward: as given, or both halves added up."""
        given: tuple[PerStage, ...] = (self.backward_input, self.backward_weight)
        if self.full_backward is not None:
            given = (self.full_backward,)
        return sum(value[stage] if isinstance(value, Sequence) else value for value in given)

    def per_stage(self, name: str, num_stages: int) -> Floats:
        """Return one of the costs, for every stage."""
        value: PerStage = getattr(self, name)
        if isinstance(value, Sequence) and len(value) != num_stages:
            raise CostsError(
                f"{name} has {len(value)} values, but the schedule has {num_stages} stages; "
                "give one number, or one per stage"
            )
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (num_stages,))

    def per_link(self, num_ranks: int) -> Floats:
        """Return the transfer seconds from every rank to every rank."""
        table = np.asarray(self.transfer, dtype=np.float64)
        if table.ndim and table.shape != (num_ranks, num_ranks):
            raise CostsError(
                f"transfer is a table of {table.shape[0]} by {table.shape[1]}, but the schedule "
                f"has {num_ranks} ranks; give one number, or one per sender and receiver"
            )
        return np.broadcast_to(table, (num_ranks, num_ranks))

    def price(self, schedule: Schedule, graph: Graph) -> Prices:
        """Return what every row of a schedule costs, and every need that crosses ranks."""
        rows = schedule.rows
        duration = self.of_stages(schedule)._seconds_by_kind(schedule.num_stages)[
            rows.kind, rows.stage
        ]
        if rows.joined.any():
            duration = _price_overlaps(duration, rows.joined, self.overlap_gain)
        lag = self._lags(schedule, graph)
        busy = duration
        if self.send and not schedule.has_communication:
            # Sends are implied: one after the other, they follow the work that they send.
            messages = _implied_messages(schedule)
            busy = duration + self.send * _sum_overlaps(messages, rows.joined)
            before = np.cumsum(messages) - messages
            queued = before + messages - before[rows.opening_row()]
            lag[graph.link >= 0] += self.send * queued[graph.need[graph.link >= 0]]
        return Prices(duration, busy, lag)

    def _seconds_by_kind(self, num_stages: int) -> Floats:
        table = np.zeros((len(Kind), num_stages))
        table[Kind.FORWARD] = self.per_stage("forward", num_stages)
        table[Kind.BACKWARD_INPUT] = self.per_stage("backward_input", num_stages)
        table[Kind.BACKWARD_WEIGHT] = self.per_stage("backward_weight", num_stages)
        if self.full_backward is None:
            table[Kind.FULL_BACKWARD] = table[Kind.BACKWARD_INPUT] + table[Kind.BACKWARD_WEIGHT]
        else:
            table[Kind.FULL_BACKWARD] = self.per_stage("full_backward", num_stages)
        table[Kind.SEND_F] = table[Kind.SEND_B] = self.send
        return table

    def _lags(self, schedule: Schedule, graph: Graph) -> Floats:
        transfer = self.per_link(schedule.num_ranks)
        lag = np.zeros(len(graph.link))
        crosses = graph.link >= 0
        lag[crosses] = transfer[np.divmod(graph.link[crosses], schedule.num_ranks)]
        return lag


def _shorten(value: PerStage | PerLink) -> str:
    """Return a cost on part of a line: all numbers if they are few, else their range.

    >>> _shorten((1.0, 2.0)), _shorten((1.0,) * 7 + (2.5,))
    ('(1.0, 2.0)', '<8 from 1 to 2.5>')
    """
    numbers = np.ravel(np.asarray(value))
    if numbers.size <= _FEW_NUMBERS:
        return repr(value)
    return f"<{numbers.size} from {numbers.min():g} to {numbers.max():g}>"


def _recut(name: str, given: list[float], pieces: int) -> tuple[float, ...]:
    is_shared = name not in _NOT_SHARED
    if pieces % len(given) == 0:
        times = pieces // len(given)
        return tuple(value / (times if is_shared else 1) for value in given for _ in range(times))
    if len(given) % pieces == 0:
        size = len(given) // pieces
        parts = [given[piece * size : (piece + 1) * size] for piece in range(pieces)]
        # The input of joined pieces is that of the first; their workspace is the largest.
        match name:
            case "message_bytes":
                return tuple(part[0] for part in parts)
            case "workspace_bytes":
                return tuple(max(part) for part in parts)
            case _:
                return tuple(sum(part) for part in parts)
    raise CostsError(
        f"{name} has {len(given)} values, which cannot be divided evenly among {pieces} stages"
    )


def _implied_messages(schedule: Schedule) -> Floats:
    """Return how many messages each row of a compute-only schedule sends to other ranks."""
    flow, holder = schedule.dataflow, schedule.placement.rank_of_stage
    counts = np.zeros((len(Kind), schedule.num_stages))
    for stage in range(schedule.num_stages):
        remote = [c for c in flow.consumers(stage) if holder[c] != holder[stage]]
        counts[Kind.FORWARD, stage] = len(remote)
        remote = [p for p in flow.producers(stage) if holder[p] != holder[stage]]
        counts[[Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD], stage] = len(remote)
    return counts[schedule.rows.kind, schedule.rows.stage]


def _price_overlaps(duration: Floats, joined: NDArray[np.bool_], gain: float) -> Floats:
    """Give every member of an overlap the duration of the whole."""
    opens = np.flatnonzero(~joined)
    shortest = np.minimum.reduceat(duration, opens)
    size = np.diff(np.append(opens, len(duration)))
    saved: Floats = np.repeat(np.where(size > 1, gain * shortest, 0.0), size)
    return _sum_overlaps(duration, joined) - saved


def _sum_overlaps(column: Floats, joined: NDArray[np.bool_]) -> Floats:
    """Return, for every row, the sum over the piece of work that it is part of."""
    opens = np.flatnonzero(~joined)
    size = np.diff(np.append(opens, len(column)))
    total: Floats = np.add.reduceat(column, opens)
    return np.repeat(total, size)


def _frozen(name: str, value: object) -> object:
    """Check every number, and return numbers as floats and sequences as tuples."""
    if value is None and name == "full_backward":
        return None
    items = None if name in ("send", "overlap_gain") else _items(value)
    if items is None:
        return _number(name, value)
    if not items:
        raise CostsError(f"{name} has no values; give at least one number")
    if name != "transfer":
        return tuple(_number(name, item) for item in items)
    table = tuple(tuple(_number(name, item) for item in _items(row) or ()) for row in items)
    if any(len(row) != len(table) for row in table):
        raise CostsError("transfer must be one number or a square table of numbers")
    return table


def _items(value: object) -> list[object] | None:
    """Return the items of a list or array, or None if the value is neither."""
    if isinstance(value, np.ndarray):
        return list(value) if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return None


def _number(name: str, value: object) -> float:
    number = to_quantity(value)
    if number is None:
        raise CostsError(f"{name} must be from 0 to {LARGEST:g} (got {quote(value)})")
    return number

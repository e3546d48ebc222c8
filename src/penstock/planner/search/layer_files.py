"""Files with the costs of a model's layers, for `search`: TOML or JSON.

transfer = 0.001                a list of layers is for microbatches of one row

[[layers]]
name = "embedding"
forward = 0.002

[[layers]]
name = "block"
repeat = 24                     block.0 to block.23, all alike
forward = 0.010

`host_message` is the host's seconds for each message, whatever its size.
With several microbatch sizes, each has a table `[[sizes]]` with `microbatch_size`, `layers` and,
if there is one, `transfer`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from penstock.atomic_files import write_atomically
from penstock.costs import Costs, PerLink
from penstock.errors import CostsError, ParseError
from penstock.planner.partition.pieces import Piece
from penstock.untrusted import clean_name, quote, read_table

__all__ = ["LayerCosts", "read_layers", "write_layers"]

_KNOWN = {field.name for field in fields(Piece)} | {"repeat"}
# More layers than any model has; a file with more has a typing error.
_MOST_LAYERS = 100_000


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Layers and transfer seconds, by microbatch size, and the host's, as `search` takes them."""

    layers: Mapping[int, tuple[Piece, ...]]
    transfer: Mapping[int, PerLink]
    host_message: float = 0.0


def read_layers(path: Path | str) -> LayerCosts:
    """Read a file of layers; an error names the file and the layer."""
    file = Path(path)
    try:
        return _read(read_table(file))
    except (CostsError, ParseError) as error:
        raise CostsError(f"{file}: {error}") from error


def write_layers(path: Path | str, costs: LayerCosts) -> None:
    """Write a file of layers as JSON, for `read_layers`."""
    sizes = [
        {
            "microbatch_size": size,
            "transfer": costs.transfer.get(size, 0.0),
            "layers": [asdict(piece) for piece in pieces],
        }
        for size, pieces in costs.layers.items()
    ]
    write_atomically(
        path, json.dumps({"host_message": costs.host_message, "sizes": sizes}, indent=1) + "\n"
    )


def _read(values: object) -> LayerCosts:
    found = _table("the file", values, {"layers", "sizes", "transfer", "host_message"})
    if ("layers" in found) == ("sizes" in found):
        raise CostsError("the file must have either layers or sizes")
    host_message = Costs.from_mapping(
        {"host_message": found.get("host_message", 0.0)}
    ).host_message
    if "layers" in found:
        return LayerCosts({1: _layers(found["layers"])}, {1: _transfer(found)}, host_message)
    layers, transfer = {}, {}
    for entry in _list("sizes", found["sizes"]):
        table = _table("a size", entry, {"microbatch_size", "layers", "transfer"})
        size = table.get("microbatch_size")
        if type(size) is not int or size < 1 or size in layers:
            raise CostsError(
                f"every size must have its own microbatch_size, from 1 up (got {quote(size)})"
            )
        layers[size] = _layers(table.get("layers"))
        transfer[size] = _transfer(found | table)
    return LayerCosts(layers, transfer, host_message)


def _layers(value: object) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for number, entry in enumerate(_list("layers", value)):
        table = _table(f"layer {number}", entry, _KNOWN)
        name, repeat = table.pop("name", None), table.pop("repeat", 1)
        if not isinstance(name, str):
            raise CostsError(f"layer {number} must have a name (got {quote(name)})")
        if type(repeat) is not int or repeat < 1:
            raise CostsError(
                f"repeat of layer {quote(name)} must be at least 1 (got {quote(repeat)})"
            )
        if len(found) + repeat > _MOST_LAYERS:
            raise CostsError(
                f"a model must have at most {_MOST_LAYERS:,} layers ({quote(name)} is beyond)"
            )
        name = clean_name(name)
        names = [f"{name}.{copy}" for copy in range(repeat)] if repeat > 1 else [name]
        found += [Piece(one, **table) for one in names]  # type: ignore[arg-type]  # it checks
    return tuple(found)


def _transfer(table: Mapping[str, object]) -> PerLink:
    """Return the transfer seconds of a table, checked as those of `Costs` are."""
    return Costs.from_mapping({"transfer": table.get("transfer", 0.0)}).transfer


def _table(what: str, value: object, known: set[str]) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CostsError(f"{what} must be a table of names and values (got {quote(value)})")
    if unknown := sorted(set(value) - known):
        raise CostsError(
            f"{what} has an unknown field {quote(unknown[0])}; "
            f"known are {', '.join(sorted(known))}"
        )
    return dict(value)


def _list(what: str, value: object) -> list[object]:
    if not isinstance(value, list) or not value:
        raise CostsError(f"{what} must be a list of at least one table (got {quote(value)})")
    return value

"""What all ranks must know of each other before and after a step, exchanged as plain data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import PipelineError
from penstock.runtime.transport import Transport

__all__ = ["agree", "gather_values"]

_LENGTH_BYTES = 8


def gather_values(transport: Transport, value: Any) -> list[Any]:
    """Give a plain value to every rank, and get every rank's, in order of rank."""
    data = json.dumps(value).encode()
    lengths = transport.gather(len(data).to_bytes(_LENGTH_BYTES, "big"))
    sizes = [int.from_bytes(length, "big") for length in lengths]
    padded = transport.gather(data.ljust(max(sizes), b" "))
    return [json.loads(text) for text in padded]


def agree(transport: Transport, facts: Mapping[str, Any]) -> None:
    """Stop on every rank unless all ranks hold the same facts; the error says which differ."""
    everyone: Sequence[dict[str, Any]] = gather_values(transport, dict(facts))
    for name in facts:
        values = [theirs.get(name) for theirs in everyone]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise PipelineError(
                f"the ranks differ in their {name} ({listed}); use the same on all"
            )

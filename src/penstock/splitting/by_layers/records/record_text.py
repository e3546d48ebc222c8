"""Records of calls as the text in which stages send them.

It is one text, so that the formats of messages stay the same from step to step. A call is

    ["model.layers.3", 0, "*", ["T4x128x512 torch.float32"], [""]]

with its path, number, tree, leaves and names; "*" is a single tensor. The inputs of the model are
the call of the path "".
"""

import json
from functools import lru_cache

from penstock.splitting.by_layers.records.call_records import CallRecord, HookRecord, Value

__all__ = ["read_hook_records", "read_records", "replace_sent", "write_records"]


@lru_cache(maxsize=4096)
def write_records(
    earlier: str,
    records: tuple[CallRecord, ...],
    sent: tuple[Value, ...],
    hook_records: tuple[HookRecord, ...] = (),
    changed: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> str:
    """Return the text for the next stage: earlier records, new records and the values sent.

    `changed` has the attributes of units that are known to change when the units are called.
    """
    known = json.loads(earlier) if earlier else {"calls": [], "hooks": []}
    calls = [[r.path, r.call, r.tree, r.leaves, r.names] for r in records]
    hooks = [
        [r.unit, r.call, r.module, r.tree, r.leaves, [_write_value(value) for value in r.values]]
        for r in hook_records
    ]
    return json.dumps(
        {
            "calls": known["calls"] + calls,
            "hooks": known["hooks"] + hooks,
            "sent": [_write_value(value) for value in sent],
            "changed": dict(changed),
        }
    )


@lru_cache(maxsize=4096)
def replace_sent(text: str, sent: tuple[Value, ...]) -> str:
    """Return a text with the same records and other values sent."""
    return json.dumps({**json.loads(text), "sent": [_write_value(value) for value in sent]})


def _write_value(value: Value) -> list[str | int]:
    return [value.path, value.call, value.leaf]


@lru_cache(maxsize=4096)
def read_records(
    text: str,
) -> tuple[dict[tuple[str, int], CallRecord], tuple[Value, ...], dict[str, tuple[str, ...]]]:
    """Return the records by path and call, the values sent with them, and what changes."""
    read = json.loads(text)
    records = [
        CallRecord(path, call, tree, tuple(leaves), tuple(names))
        for path, call, tree, leaves, names in read["calls"]
    ]
    return (
        {(record.path, record.call): record for record in records},
        tuple(Value(*name) for name in read["sent"]),
        {path: tuple(names) for path, names in read["changed"].items()},
    )


@lru_cache(maxsize=4096)
def read_hook_records(text: str) -> dict[tuple[str, int], tuple[HookRecord, ...]]:
    """Return the records of hooks, in order, by the path and call of the unit."""
    found: dict[tuple[str, int], tuple[HookRecord, ...]] = {}
    for unit, call, module, tree, leaves, names in json.loads(text)["hooks"]:
        values = tuple(Value(*name) for name in names)
        record = HookRecord(unit, call, module, tree, tuple(leaves), values)
        found[unit, call] = (*found.get((unit, call), ()), record)
    return found

"""Facts on which all ranks must agree; where they differ, all ranks raise the same error.

As long as the ranks agree, they exchange nothing but digests.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from penstock.errors import PipelineError
from penstock.ranks.control import Control

__all__ = [
    "NOTHING",
    "Fact",
    "agree",
    "agree_where_known",
    "digest_of",
    "group_ranks",
    "plain_fact",
]

_DIGEST_BYTES = 16
# The digest of a fact that a rank does not know.
NOTHING = bytes(_DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that must be the same on every rank that knows it.

    `detail` returns it as plain data, which travels only if ranks differ. `explain` then gets the
    details by rank and says where they differ. A rank that does not know the fact has no `detail`.
    """

    name: str
    digest: bytes
    detail: Callable[[], Any] | None
    explain: Callable[[Mapping[int, Any]], str]


def plain_fact(name: str, value: Any) -> Fact:
    """Return a fact that is one short value."""

    def explain(values: Mapping[int, Any]) -> str:
        return group_ranks({rank: _show(one) for rank, one in values.items()}, name)

    return Fact(name, digest_of(json.dumps(value).encode()), lambda: value, explain)


def digest_of(data: bytes) -> bytes:
    """Return a digest of data of any length."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def group_ranks(values: Mapping[int, str], name: str = "") -> str:
    """Say which ranks have which value, the rarest value first.

    >>> group_ranks({0: "2.13", 1: "2.13", 2: "2.11", 3: "2.13"}, "torch")
    'rank 2 has torch 2.11, ranks 0, 1, 3 have 2.13'
    """
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    parts: list[str] = []
    for value, ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1])):
        what = f"{name} {value}" if name and not parts else value
        parts.append(f"{_name(ranks)} {'has' if len(ranks) == 1 else 'have'} {what}")
    return ", ".join(parts)


def _name(ranks: Sequence[int]) -> str:
    """Name ranks in words: "rank 2", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def agree(control: Control, facts: Sequence[Fact]) -> None:
    """Raise on every rank unless all ranks know the same of each of these facts.

    Every rank gives the same facts in the same order.
    """
    everyone = control.gather_bytes(digest_of(b"".join(fact.digest for fact in facts)))
    if len(set(everyone)) > 1:
        digests = control.gather([fact.digest.hex() for fact in facts])
        columns = enumerate(zip(*digests, strict=True))
        _refuse(control, facts, [number for number, row in columns if len(set(row)) > 1])


def agree_where_known(control: Control, facts: Sequence[Fact]) -> None:
    """Raise on every rank unless the ranks that know a fact agree on it.

    Every rank gives the same facts in the same order, known or not.
    """
    everyone = control.gather_bytes(b"".join(fact.digest for fact in facts))
    differing = []
    for number in range(len(facts)):
        part = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
        if len({digests[part] for digests in everyone} - {NOTHING}) > 1:
            differing.append(number)
    if differing:
        _refuse(control, facts, differing)


def _refuse(control: Control, facts: Sequence[Fact], differing: Sequence[int]) -> None:
    """Raise how the first of these facts differs, and name the others."""
    first, *others = (facts[number] for number in differing)
    details = control.gather([] if first.detail is None else [first.detail()])
    reason = first.explain({rank: known[0] for rank, known in enumerate(details) if known})
    if others:
        reason += f" (and they differ in {', '.join(fact.name for fact in others)})"
    raise PipelineError(f"the ranks do not agree: {reason}; give all ranks the same")


def _show(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)

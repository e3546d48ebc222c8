"""What all ranks must know of each other, exchanged as plain data; where they differ, all stop.

As long as all ranks agree, nothing but digests goes between them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from penstock.errors import PenstockError, PipelineError
from penstock.ranks.transport import Transport

__all__ = [
    "NOTHING",
    "Fact",
    "agree",
    "agree_where_known",
    "digest_of",
    "gather_values",
    "group_ranks",
    "plain_fact",
    "tell_failure",
    "together",
]

_BUILDING = "build its part of the pipeline"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 16
# Stands where a digest would be: for a rank that could not get so far, or that does not know.
NOTHING = bytes(_DIGEST_BYTES)


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that must be the same on every rank that knows it.

    `detail` gives it as plain data, which travels only if ranks differ; `explain` then gets the
    details by rank and says where they do. A rank that does not know it has no `detail`.
    """

    name: str
    digest: bytes
    detail: Callable[[], Any] | None
    explain: Callable[[Mapping[int, Any]], str]


def plain_fact(name: str, value: Any) -> Fact:
    """A fact that is one short value."""

    def explain(values: Mapping[int, Any]) -> str:
        return group_ranks({rank: _show(one) for rank, one in values.items()}, name)

    return Fact(name, digest_of(json.dumps(value).encode()), lambda: value, explain)


def digest_of(data: bytes) -> bytes:
    """A name for data of any length; equal only for equal data."""
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


def group_ranks(values: Mapping[int, str], name: str = "") -> str:
    """Who has what, the fewest ranks first.

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
    """Ranks in words: "rank 2", "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def gather_values(transport: Transport, value: Any) -> list[Any]:
    """Give a plain value to every rank, and get every rank's, in order of rank."""
    data = json.dumps(value).encode()
    lengths = transport.gather(len(data).to_bytes(_LENGTH_BYTES, "big"))
    sizes = [int.from_bytes(length, "big") for length in lengths]
    padded = transport.gather(data.ljust(max(sizes), b" "))
    return [json.loads(text) for text in padded]


def agree(transport: Transport, facts: Sequence[Fact], *, doing: str = _BUILDING) -> None:
    """Stop on every rank unless all ranks know the same of each of these facts.

    Every rank has the same facts in the same order. If a rank has called `tell_failure` instead,
    its error is raised, as one of `doing` this.
    """
    everyone = transport.gather(digest_of(b"".join(fact.digest for fact in facts)))
    if NOTHING in everyone:
        _raise_first_failure(transport, None, doing)
    if len(set(everyone)) > 1:
        told = gather_values(transport, [fact.digest.hex() for fact in facts])
        columns = enumerate(zip(*told, strict=True))
        _refuse(transport, facts, [number for number, row in columns if len(set(row)) > 1])


def agree_where_known(transport: Transport, facts: Sequence[Fact]) -> None:
    """Stop on every rank unless those that know a fact agree on it.

    Every rank has the same facts in the same order, known or not.
    """
    everyone = transport.gather(b"".join(fact.digest for fact in facts))
    differing = []
    for number in range(len(facts)):
        place = slice(number * _DIGEST_BYTES, (number + 1) * _DIGEST_BYTES)
        if len({told[place] for told in everyone} - {NOTHING}) > 1:
            differing.append(number)
    if differing:
        _refuse(transport, facts, differing)


def tell_failure(transport: Transport, error: Exception) -> None:
    """In the place of `agree`: this rank cannot build its part, and the others are to know."""
    transport.gather(NOTHING)
    _raise_first_failure(transport, error, _BUILDING)


@contextmanager
def together(transport: Transport, doing: str = _BUILDING) -> Iterator[None]:
    """Fail on every rank if `doing` this fails on one; nothing inside waits for another rank."""
    try:
        yield
    except Exception as error:
        tell_failure(transport, error)
        raise
    agree(transport, (), doing=doing)


def _raise_first_failure(transport: Transport, error: Exception | None, doing: str) -> None:
    """Raise what another rank has failed with; a rank with an error of its own keeps that."""
    told = gather_values(transport, None if error is None else _say(error))
    failed = {rank: message for rank, message in enumerate(told) if message is not None}
    if error is None:
        rank, message = next(iter(failed.items()))
        raise PipelineError(f"rank {rank} cannot {doing}: {message}")


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _refuse(transport: Transport, facts: Sequence[Fact], differing: Sequence[int]) -> None:
    """Raise how the first of these facts differs, and name the others."""
    first, *others = (facts[number] for number in differing)
    told = gather_values(transport, [] if first.detail is None else [first.detail()])
    reason = first.explain({rank: known[0] for rank, known in enumerate(told) if known})
    if others:
        reason += f" (and they differ in {', '.join(fact.name for fact in others)})"
    raise PipelineError(f"the ranks do not agree: {reason}; give all ranks the same")


def _show(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)

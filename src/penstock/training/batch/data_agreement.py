"""A comparison of the data that ranks were given for the same argument."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import BatchError
from penstock.ranks.agreement import group_ranks
from penstock.ranks.control import Control
from penstock.training.batch.fingerprint import Fingerprint, fingerprints

__all__ = ["compare_data"]

# How much of a digest an error shows: enough to see which ranks have the same.
_DIGITS = 8


def compare_data(control: Control, named: Mapping[str, Any]) -> None:
    """Refuse, on every rank alike, an argument of which ranks have different data.

    Every rank calls this. A rank may leave an argument out, or give None for it.
    """
    mine: dict[str, Any] = {}
    try:
        found = fingerprints(named)
        mine["data"] = {name: [one.form, one.digest] for name, one in found.items()}
    except Exception as error:
        mine["error"] = f"{type(error).__name__}: {error}"
    gathered = control.gather(mine)
    for rank, theirs in enumerate(gathered):
        if "error" in theirs:
            raise BatchError(
                f"rank {rank} cannot compare its batch with that of others: {theirs['error']}; "
                "give RunOptions(compare_data=False) to skip the comparison"
            )
    held: dict[str, dict[int, Fingerprint]] = {}
    for rank, theirs in enumerate(gathered):
        for name, one in theirs["data"].items():
            held.setdefault(name, {})[rank] = Fingerprint(*one)
    differing = [name for name, by_rank in held.items() if len(set(by_rank.values())) > 1]
    if differing:
        raise BatchError(_explain(held[differing[0]], differing))


def _explain(by_rank: Mapping[int, Fingerprint], names: list[str]) -> str:
    """Say which ranks have what of the first argument, and name the others that differ."""
    if len({one.form for one in by_rank.values()}) > 1:
        who = group_ranks({rank: one.form for rank, one in by_rank.items()})
    else:
        short = {rank: one.digest[:_DIGITS] for rank, one in by_rank.items()}
        who = group_ranks(short, "values with the digest")
    others = f" (and for {', '.join(map(repr, names[1:]))})" if names[1:] else ""
    return (
        f"the ranks were given different data for {names[0]!r}: {who}{others}; give all ranks of "
        "a pipeline the same batch (a distributed sampler, and loaders prepared by accelerate or "
        "the Trainer, give each its own), leave out what a rank does not need, or "
        "give RunOptions(compare_data=False)"
    )

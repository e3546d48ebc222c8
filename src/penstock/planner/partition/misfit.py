"""The message for pieces that do not fit: by how much, on which rank, and what would fit."""

from dataclasses import replace

from penstock.ir.placement import Placement
from penstock.planner.partition.cuts import BestCuts, NoCuts
from penstock.planner.partition.demand import Demand
from penstock.planner.partition.fit import bytes_per_rank, closest_cuts, find_fit, guess_fit

__all__ = ["explain_misfit"]


def explain_misfit(demand: Demand) -> str:
    """Return by how much the pieces exceed the caps, on which rank, and what would fit.

    Where a proof would take too long, the numbers are those of the best cuts found.
    """
    chain, caps = demand.chain, demand.caps
    closest = closest_cuts(chain, caps)
    needed = bytes_per_rank(chain, closest.cuts)
    rank = max(range(len(caps)), key=lambda rank: needed[rank] - caps[rank])
    return (
        f"the pieces do not fit: with the cuts that come closest, rank {rank} needs "
        f"{needed[rank]:,} bytes and has {caps[rank]:,}, which is {closest.value:,} too few; "
        f"{_way_out(demand, closest)}"
    )


def _way_out(demand: Demand, closest: BestCuts) -> str:
    caps, more = demand.caps, _enough_more(demand, closest.value)
    if len(set(caps)) > 1:
        return f"{more:,} bytes more on every rank would do"
    is_least = closest.is_proven and more == closest.value
    advice = "is the least that fits" if is_least else "would do"
    ranks = _enough_ranks(demand)
    return f"memory={caps[0] + more} {advice}" + (f", or {ranks} ranks" if ranks else "")


def _enough_more(demand: Demand, more: int) -> int:
    """Return these extra bytes, or more if the search finds no cuts that fit with them."""
    chain = demand.chain
    while isinstance(find_fit(chain, tuple(cap + more for cap in demand.caps)), NoCuts):
        more += more // 50 + 1
    return more


def _enough_ranks(demand: Demand) -> int | None:
    """Return how many ranks fit with the same cap, microbatches in flight and stages per rank."""
    old = demand.placement
    per_rank = old.num_stages // old.num_ranks
    if len(set(demand.in_flight)) > 1 or old not in _regular(old.num_ranks, per_rank):
        return None
    shape = _regular(old.num_ranks, per_rank).index(old)
    for ranks in range(old.num_ranks + 1, len(demand.pieces) // per_rank + 1):
        placement = _regular(ranks, per_rank)[shape]
        in_flight = demand.in_flight[:1] * placement.num_stages
        chain = replace(demand, placement=placement, in_flight=in_flight).chain
        if isinstance(guess_fit(chain, demand.caps[:1] * ranks), BestCuts):
            return ranks
    return None


def _regular(ranks: int, per_rank: int) -> tuple[Placement, Placement]:
    return Placement.loop(ranks, per_rank), Placement.v(ranks, per_rank)

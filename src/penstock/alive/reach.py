"""Which processes watch one another: those of a pipeline, and of pipelines that are its replicas.

A stage may be replicated or sharded over a group of processes, each of a pipeline of its own. So
pipelines are joined by the groups of their stages. The first rank of each pipeline writes which
ranks and groups that has, and follows the groups to the pipelines at their other ends:

    ranks 0 1    stage 0 on ranks 0 2, stage 1 on ranks 1 3      all of 0, 1, 2, 3
    ranks 2 3    the same two groups                             watch one another
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from time import monotonic, sleep
from typing import Any, Protocol, TypeAlias

from penstock.errors import PeerLostError
from penstock.ranks.tree.meeting import Store
from penstock.ranks.tree.values import decode_value, encode_value

__all__ = ["CountingStore", "find_members"]

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
# A group, how often its processes have built pipelines before, and one of these processes.
_Place: TypeAlias = tuple[tuple[int, ...], int, int]
# Returns what is written to a key until some time, or None.
_Wait: TypeAlias = Callable[[str, float], Any]


class CountingStore(Store, Protocol):
    """A store that can count."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first, and return it."""


def find_members(
    store: CountingStore,
    meeting: Store,
    me: int,
    ranks: Sequence[int],
    groups: Sequence[tuple[int, ...]],
    seconds: float,
    *,
    check: Callable[[], None] = lambda: None,
) -> list[int]:
    """Return the ranks that watch one another; every rank of the pipeline calls this.

    All ranks are those of processes. `groups` are those of the stages of this rank, `ranks` those
    of its pipeline, and `meeting` is for these alone. A rank that has not come in time is lost.
    `check` is called again and again, to raise if waiting is in vain.
    """
    end = monotonic() + seconds

    def wait(where: Store, key: str, until: float) -> Any:
        """Return a value as soon as there is one, or None if there is none in time."""
        pause = _SHORTEST_PAUSE
        while not where.check([key]):
            if monotonic() >= until:
                return None
            check()
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return decode_value(where.get(key))

    mine = [(group, store.add(f"{_key(group)}/{me}", 1), me) for group in sorted(set(groups))]
    _write(meeting, f"groups{me}", mine)
    if me != ranks[0]:
        # The first rank may have waited as long for another one.
        answer = wait(meeting, "members", end + seconds / 2)
        return _take(_lost(0, seconds) if answer is None else answer)
    places, missing = _gather(partial(wait, meeting), ranks, end)
    answer = {"ranks": list(ranks), "places": places}
    if missing is not None:
        answer = _lost(missing if places else ranks.index(missing), seconds)
    for place in places:
        _write(store, _key(*place), answer)
    if places and missing is None:
        answer = _follow(partial(wait, store), answer, end + seconds / 2, seconds)
    _write(meeting, "members", answer)
    return _take(answer)


def _gather(wait: _Wait, ranks: Sequence[int], end: float) -> tuple[list[_Place], int | None]:
    """Return where the ranks of this pipeline are replicated, and one that has not come."""
    places: list[_Place] = []
    for rank in ranks:
        found = wait(f"groups{rank}", end)
        if found is None:
            return places, rank
        places += [(tuple(group), count, member) for group, count, member in found]
    return places, None


def _follow(wait: _Wait, own: dict[str, Any], end: float, seconds: float) -> dict[str, Any]:
    """Return the ranks of all pipelines that can be reached from this one."""
    members, seen, waiting = set(own["ranks"]), set(), list(own["places"])
    while waiting:
        group, count, _ = waiting.pop()
        for other in group:
            if other in members or (place := (tuple(group), count, other)) in seen:
                continue
            seen.add(place)
            found = wait(_key(*place), end)
            if found is None:
                return _lost(other, seconds)
            if "lost" in found:
                return {"lost": found["lost"]}
            members |= set(found["ranks"])
            waiting += found["places"]
    ranks = own["ranks"]
    return {"ranks": ranks if members == set(ranks) else sorted(members)}


def _take(answer: dict[str, Any]) -> list[int]:
    if "lost" in answer:
        raise PeerLostError(*answer["lost"])
    ranks: list[int] = answer["ranks"]
    return ranks


def _lost(rank: int, seconds: float) -> dict[str, Any]:
    text = f"rank {rank} has not come to build its pipeline within {seconds:g} s"
    return {"lost": [text, rank]}


def _key(group: Sequence[int], *place: int) -> str:
    name = sha256(repr(tuple(group)).encode()).hexdigest()[:16]
    return "/".join(map(str, ("penstock/replicas", name, *place)))


def _write(store: Store, key: str, value: Any) -> None:
    store.set(key, encode_value(value).decode())

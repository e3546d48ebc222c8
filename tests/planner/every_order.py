"""The best step of a tiny problem by looking at every order: what no bound may exceed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import inf

from penstock.ir.actions import Kind
from penstock.planner.problem import SchedulingProblem

__all__ = ["Step", "all_orders", "least_seconds"]

# Kind, stage and microbatch.
Step = tuple[Kind, int, int]

SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
MERGED = (Kind.FORWARD, Kind.FULL_BACKWARD)


@dataclass(frozen=True, slots=True)
class _Tables:
    """What each step takes, and what it needs from other stages: looked up very often."""

    problem: SchedulingProblem
    seconds: dict[Step, float]
    bytes: dict[Step, float]
    # The steps of which one has to have ended, and the transfer seconds after it.
    needs: dict[Step, tuple[tuple[Step, ...], float]]

    @classmethod
    def of(cls, problem: SchedulingProblem) -> "_Tables":
        works = list(product(range(problem.stages), range(problem.microbatches)))
        steps = [(kind, *work) for kind in (*SPLIT, MERGED[1]) for work in works]
        return cls(
            problem,
            {step: _seconds(problem, step) for step in steps},
            {step: _bytes(problem, step) for step in steps},
            {step: _needs(problem, step) for step in steps},
        )


def least_seconds(
    problem: SchedulingProblem, *, with_merged: bool = False, in_order: bool = False
) -> float:
    """Return the step of the best order, also of those that merge I and W if asked to."""
    tables = _Tables.of(problem)
    orders = _all_orders(tables, with_merged, in_order)
    return min(_step(tables, choice) for choice in product(*orders))


def all_orders(problem: SchedulingProblem, *, with_merged: bool) -> list[list[tuple[Step, ...]]]:
    """Return, per rank, every order that keeps its limit."""
    return _all_orders(_Tables.of(problem), with_merged, in_order=False)


def _all_orders(
    tables: _Tables, with_merged: bool, in_order: bool
) -> list[list[tuple[Step, ...]]]:
    programs = (SPLIT, MERGED) if with_merged else (SPLIT,)
    ranks = range(tables.problem.ranks)
    return [list(_orders(tables, rank, programs, in_order)) for rank in ranks]


def _orders(
    tables: _Tables, rank: int, programs: Sequence[tuple[Kind, ...]], in_order: bool
) -> Iterator[tuple[Step, ...]]:
    """Yield every order of a rank that keeps its limit and in which no step needs a later one."""
    problem = tables.problem
    works = list(product(problem.placement.stages(rank), range(problem.microbatches)))
    capacity = problem.capacity[rank] * (1 + 1e-12)
    for chosen in product(programs, repeat=len(works)):
        chains = [
            [(kind, *work) for kind in program]
            for program, work in zip(chosen, works, strict=True)
        ]
        steps = {step for chain in chains for step in chain}
        before = {
            step: [one for one in steps if _is_before(one, step, in_order)] for step in steps
        }
        yield from _interleave(tables.bytes, capacity, chains, before, 0.0)


def _interleave(
    bytes_of: dict[Step, float],
    capacity: float,
    chains: list[list[Step]],
    before: dict[Step, list[Step]],
    held: float,
) -> Iterator[tuple[Step, ...]]:
    if not any(chains):
        yield ()
    left = {step for chain in chains for step in chain}
    for number, chain in enumerate(chains):
        if chain and left.isdisjoint(before[chain[0]]):
            now = held + bytes_of[chain[0]]
            if now <= capacity:
                rest = [*chains[:number], chain[1:], *chains[number + 1 :]]
                for others in _interleave(bytes_of, capacity, rest, before, now):
                    yield (chain[0], *others)


def _is_before(one: Step, other: Step, in_order: bool) -> bool:
    """Whether a step of the same rank has to come before another, directly or through others."""
    kind, stage, number = one
    other_kind, other_stage, other_number = other
    if number == other_number:
        if kind == other_kind == Kind.FORWARD:
            return stage < other_stage
        backwards = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
        return kind in backwards and other_kind in backwards and stage > other_stage
    return in_order and kind == other_kind and stage == other_stage and number < other_number


def _bytes(problem: SchedulingProblem, step: Step) -> float:
    kind, stage, number = step
    activation, stash = (
        float(problem.costs.per_stage(name, problem.stages)[stage] * problem.scales[number])
        for name in ("activation_bytes", "weight_stash_bytes")
    )
    return {
        Kind.FORWARD: activation,
        Kind.BACKWARD_INPUT: stash - activation,
        Kind.BACKWARD_WEIGHT: -stash,
        Kind.FULL_BACKWARD: -activation,
    }[kind]


def _seconds(problem: SchedulingProblem, step: Step) -> float:
    kind, stage, number = step
    table = {
        Kind.FORWARD: problem.forward_each,
        Kind.BACKWARD_INPUT: problem.backward_input_each,
        Kind.BACKWARD_WEIGHT: problem.backward_weight_each,
        Kind.FULL_BACKWARD: problem.full_backward_each,
    }[kind]
    return float(table[stage, number])


def _step(tables: _Tables, orders: Sequence[tuple[Step, ...]]) -> float:
    """Return the seconds of a step for the problem's boundary; infinite if ranks wait for ever."""
    problem = tables.problem
    if problem.boundary == "nothing":
        return _period(tables, orders)
    first, last = _run(tables, orders, [0.0] * problem.ranks)
    if problem.boundary == "papers":
        return max(end - begin for end, begin in zip(last, first, strict=True))
    return max(last)


def _period(tables: _Tables, orders: Sequence[tuple[Step, ...]]) -> float:
    """Return the largest mean over cycles of ranks, from the longest path between any two."""
    long_ago, ranks = -1e6, range(tables.problem.ranks)
    paths = []
    for origin in ranks:
        begin = [0.0 if rank == origin else long_ago for rank in ranks]
        paths.append(_run(tables, orders, begin)[1])
    cycles = [cycle for size in ranks for cycle in permutations(ranks, size + 1)]
    return max(
        sum(paths[cycle[at - 1]][rank] for at, rank in enumerate(cycle)) / len(cycle)
        for cycle in cycles
    )


def _run(
    tables: _Tables, orders: Sequence[tuple[Step, ...]], begin: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return when each rank starts and ends; infinite if ranks wait for ever."""
    seconds, needs = tables.seconds, tables.needs
    end: dict[Step, float] = {}
    clock, first = list(begin), [inf] * len(orders)
    place = [0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            now = clock[rank]
            for step in order[place[rank] :]:
                needed, lag = needs[step]
                if needed:
                    arrival = min([end.get(one, inf) for one in needed]) + lag
                    if arrival == inf:
                        break
                    now = max(now, arrival)
                if first[rank] == inf:
                    first[rank] = now
                now = end[step] = now + seconds[step]
                place[rank] += 1
                is_moving = True
            clock[rank] = now
    if any(done < len(order) for done, order in zip(place, orders, strict=True)):
        return [0.0] * len(orders), [inf] * len(orders)
    return first, clock


def _needs(problem: SchedulingProblem, step: Step) -> tuple[tuple[Step, ...], float]:
    """Return what a step needs from other stages; its rank's order does the rest."""
    kind, stage, number = step
    if kind == Kind.FORWARD and stage:
        return ((kind, stage - 1, number),), _lag(problem, 0, stage - 1, number)
    if kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) and stage < problem.stages - 1:
        ways = (SPLIT[1], stage + 1, number), (MERGED[1], stage + 1, number)
        return ways, _lag(problem, 1, stage, number)
    return (), 0.0


def _lag(problem: SchedulingProblem, way: int, stage: int, number: int) -> float:
    """Return the transfer seconds of a microbatch between a stage and the next one."""
    return float(problem.lags_of_size_one[way][stage] * problem.scales[number])

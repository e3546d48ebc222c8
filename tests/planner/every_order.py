"""The best step of a tiny problem by looking at every order: what no bound may exceed."""

from collections.abc import Iterator, Sequence
from itertools import permutations, product
from math import inf

from penstock.ir.actions import Kind
from penstock.planner.problem import SchedulingProblem

__all__ = ["least_seconds"]

# Kind, stage and microbatch.
Step = tuple[Kind, int, int]

SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
MERGED = (Kind.FORWARD, Kind.FULL_BACKWARD)


def least_seconds(
    problem: SchedulingProblem, *, with_merged: bool = False, in_order: bool = False
) -> float:
    """Return the step of the best order, also of those that merge I and W if asked to."""
    programs = (SPLIT, MERGED) if with_merged else (SPLIT,)
    orders = [list(_orders(problem, rank, programs, in_order)) for rank in range(problem.ranks)]
    return min(_step(problem, choice) for choice in product(*orders))


def _orders(
    problem: SchedulingProblem, rank: int, programs: Sequence[tuple[Kind, ...]], in_order: bool
) -> Iterator[tuple[Step, ...]]:
    """Yield every order of a rank that keeps its limit and in which no step needs a later one."""
    works = list(product(problem.placement.stages(rank), range(problem.microbatches)))
    for chosen in product(programs, repeat=len(works)):
        chains = [
            [(kind, *work) for kind in program]
            for program, work in zip(chosen, works, strict=True)
        ]
        yield from _interleave(problem, rank, chains, 0.0, in_order)


def _interleave(
    problem: SchedulingProblem, rank: int, chains: list[list[Step]], held: float, in_order: bool
) -> Iterator[tuple[Step, ...]]:
    if not any(chains):
        yield ()
    left = {step for chain in chains for step in chain}
    for number, chain in enumerate(chains):
        if chain and not any(_is_before(step, chain[0], in_order) for step in left):
            now = held + _bytes(problem, chain[0])
            if now <= problem.room[rank] * (1 + 1e-12):
                rest = [*chains[:number], chain[1:], *chains[number + 1 :]]
                for others in _interleave(problem, rank, rest, now, in_order):
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


def _step(problem: SchedulingProblem, orders: Sequence[tuple[Step, ...]]) -> float:
    """Return the seconds of a step for the problem's boundary; infinite if ranks wait for ever."""
    if problem.boundary == "nothing":
        return _period(problem, orders)
    first, last = _run(problem, orders, [0.0] * problem.ranks)
    if problem.boundary == "papers":
        return max(end - begin for end, begin in zip(last, first, strict=True))
    return max(last)


def _period(problem: SchedulingProblem, orders: Sequence[tuple[Step, ...]]) -> float:
    """Return the largest mean over cycles of ranks, from the longest path between any two."""
    long_ago, ranks = -1e6, range(problem.ranks)
    paths = []
    for origin in ranks:
        begin = [0.0 if rank == origin else long_ago for rank in ranks]
        paths.append(_run(problem, orders, begin)[1])
    cycles = [cycle for size in ranks for cycle in permutations(ranks, size + 1)]
    return max(
        sum(paths[cycle[at - 1]][rank] for at, rank in enumerate(cycle)) / len(cycle)
        for cycle in cycles
    )


def _run(
    problem: SchedulingProblem, orders: Sequence[tuple[Step, ...]], begin: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return when each rank starts and ends; infinite if ranks wait for ever."""
    end: dict[Step, float] = {}
    clock, first = list(begin), [inf] * problem.ranks
    place = [0] * problem.ranks
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                step = order[place[rank]]
                arrival = _arrival(problem, step, end)
                if arrival == inf:
                    break
                start = max(clock[rank], arrival)
                first[rank] = min(first[rank], start)
                clock[rank] = end[step] = start + _seconds(problem, step)
                place[rank] += 1
                is_moving = True
    if any(done < len(order) for done, order in zip(place, orders, strict=True)):
        return [0.0] * problem.ranks, [inf] * problem.ranks
    return first, clock


def _arrival(problem: SchedulingProblem, step: Step, end: dict[Step, float]) -> float:
    """Return when a step has what it needs from other stages; its rank's order does the rest."""
    kind, stage, number = step
    if kind == Kind.FORWARD and stage:
        return end.get((kind, stage - 1, number), inf) + _lag(problem, 0, stage - 1, number)
    if kind in (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD) and stage < problem.stages - 1:
        ends = [end.get((one, stage + 1, number), inf) for one in (SPLIT[1], MERGED[1])]
        return min(ends) + _lag(problem, 1, stage, number)
    return -inf


def _lag(problem: SchedulingProblem, way: int, stage: int, number: int) -> float:
    """Return the transfer seconds of a microbatch between a stage and the next one."""
    return float(problem.lags_of_size_one[way][stage] * problem.scales[number])

"""Choose cuts, placement, microbatches, checkpoints and order together.

every combination -> bounds and known families rule most out -> the few best are solved
                                                                    |
    the best, with one stage more or less checkpointed  <-----------+   and the same again
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.costs import PerLink
from penstock.errors import ArgumentError, MemoryLimitError, SizeError
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.effort_clock import EffortClock, require_effort, require_seconds
from penstock.planner.order.families import fixed_schedules
from penstock.planner.order.solver import Progress, solve
from penstock.planner.partition.pieces import Piece
from penstock.planner.plans import Plan, require_plans
from penstock.planner.search.findings import Finding, Findings, describe_refusal
from penstock.planner.search.replicas import Reduction, divide_devices
from penstock.planner.search.space import Candidate, Space
from penstock.schedules.sizes import require_whole_number
from penstock.sim.period import DEFAULT_BOUNDARY, Boundary

__all__ = ["search"]

# How many of the most promising candidates are solved briefly, how many of these for longer, and
# how many neighbours of the best; each with its share of the time.
_MOST_TRIED, _SHARE_TO_TRY = 24, 0.4
_MOST_SOLVED, _SHARE_TO_SOLVE = 4, 0.35
_MOST_NEIGHBOURS, _SHARE_FOR_NEIGHBOURS = 3, 0.25
# The number of plans in the result.
_MOST_REPORTED = 10


def search(
    layers: Sequence[Piece] | Mapping[int, Sequence[Piece]],
    *,
    batch: int,
    ranks: int | None = None,
    devices: int | None = None,
    memory: float | Sequence[float] | None = None,
    transfer: PerLink | Mapping[int, PerLink] = 0.0,
    host_message: float = 0.0,
    rank_factors: Sequence[float] | None = None,
    reduction_bandwidth: float | None = None,
    reduction_seconds: float | Mapping[int, float] = 0.0,
    shard_optimizer: bool = False,
    boundary: Boundary = DEFAULT_BOUNDARY,
    seconds: float = 20.0,
    effort: float | None = None,
    known: Sequence[Plan] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Findings:
    """Find the fastest way to train a model of these layers on these ranks.

    `layers` has what one microbatch costs in every layer: one list, for microbatches of one row,
    or a list for every microbatch size to choose from; `transfer` likewise. `batch` is the rows of
    a step, `memory` the bytes per rank. Chosen are the microbatch size, the placement, the stages
    per rank, which layers make which stage, which stages are checkpointed, and the order.

    `host_message` is the host's seconds for each message, on its sender and on its receiver; those
    for each action are those of the layers.

    `rank_factors` has what stages take on each rank, as a multiple of the layers' seconds.

    With `devices` in place of `ranks`, the number of ranks of a pipeline is chosen too: the
    devices are divided among replicas of it, each of which has its part of the batch. What their
    reduction costs is `reduction_seconds`, one number or one by number of replicas, or follows
    from the bytes per second between replicas (`reduction_bandwidth`); it comes after a step, with
    nothing beside it. With `shard_optimizer` a replica holds its part of the optimizer's state.

    A step lasts until the last rank is done, since ranks of a `Pipeline` meet then. `boundary`
    names what happens between two steps if it is something else, as in `plan`. `seconds` is how
    long to solve, in processor seconds, and `effort` how many rows of orders to build instead, for
    all candidates together.

    The best is never slower than one of `known` that is possible here: plans of earlier searches,
    with less memory for example.
    """
    require_seconds(seconds)
    require_effort(effort)
    require_plans(known)
    require_whole_number("batch", batch)
    if (ranks is None) == (devices is None):
        raise ArgumentError(f"give either ranks or devices (got {ranks} and {devices})")
    reduction = Reduction(reduction_bandwidth, reduction_seconds, shard_optimizer)

    def make_space(ranks: int, replicas: int) -> Space:
        part = batch // replicas
        space = Space.of(layers, ranks, part, memory, transfer, boundary, rank_factors)
        return replace(space, replicas=replicas, reduction=reduction, host_message=host_message)

    if ranks is not None:
        spaces = {ranks: make_space(ranks, 1)}
    else:
        assert devices is not None, "ranks or devices are given"
        _check_devices(devices, batch, memory, transfer, rank_factors)
        ways = _divide(devices, batch, layers)
        spaces = {ranks: make_space(ranks, replicas) for ranks, replicas in ways}
    return _explore(spaces, known, _Work(seconds, effort, progress))


def _explore(spaces: Mapping[int, Space], known: Sequence[Plan], work: "_Work") -> Findings:
    """Find orders for the most promising candidates, then for neighbours of the best."""
    candidates = [one for space in spaces.values() for one in space.candidates()]
    refused = tuple(one for one in candidates if one.missing_bytes > 0)
    recalled = [one for space in spaces.values() for one in _recall(space, known)]
    promising = [*recalled, *_screen(candidates, min(map(_step, recalled), default=inf))]
    if not promising:
        raise MemoryLimitError(_nothing_fits(refused))
    tried = work.solve(promising[:_MOST_TRIED], _SHARE_TO_TRY)
    solved = work.solve(tried[:_MOST_SOLVED], _SHARE_TO_SOLVE)
    space = spaces[solved[0].candidate.problem.ranks]
    neighbours = _screen(space.neighbours(solved[0].candidate), solved[0].seconds)
    near = work.solve(neighbours[:_MOST_NEIGHBOURS], _SHARE_FOR_NEIGHBOURS)
    found = [*solved, *near, *tried[_MOST_SOLVED:], *promising[_MOST_TRIED:]]
    plans = [one.known for one in _best_first(found) if one.known is not None]
    return Findings(
        found=tuple(map(Finding, plans[:_MOST_REPORTED])),
        refused=refused,
        num_slower=len(candidates) - len(refused) - len(promising),
    )


@dataclass(frozen=True)
class _Evaluated:
    """A candidate with its lower bound, and its best order, if one is known."""

    candidate: Candidate
    lower_bound: float
    known: Plan | None

    @property
    def seconds(self) -> float:
        """What a step costs with the known order, if there is one."""
        reduction = self.candidate.choices.reduction_seconds
        return inf if self.known is None else self.known.seconds + reduction

    @property
    def least_seconds(self) -> float:
        """What a step costs at least."""
        return self.lower_bound + self.candidate.choices.reduction_seconds


def _recall(space: Space, known: Sequence[Plan]) -> Iterator[_Evaluated]:
    """Yield what was chosen in known plans, with their orders, where they are possible."""
    for plan in known:
        choices, placement = plan.choices, plan.problem.placement
        if choices is None or not space.has(placement, choices):
            continue
        candidate = space.candidate(placement, choices)
        bound = lower_bound(candidate.problem)
        again = Plan(candidate.problem, plan.schedule, bound, candidate.choices)
        if plan.problem.microbatches == candidate.problem.microbatches and again.keeps_limit:
            yield _Evaluated(candidate, bound, again)


def _step(one: _Evaluated) -> float:
    return one.seconds


def _best_first(evaluated: Sequence[_Evaluated]) -> list[_Evaluated]:
    return sorted(evaluated, key=lambda one: (one.seconds, one.least_seconds))


def _screen(candidates: Sequence[Candidate], best: float) -> list[_Evaluated]:
    """Return those that fit and could beat the best known, the most promising first."""
    kept: list[_Evaluated] = []
    fitting = [one for one in candidates if one.missing_bytes <= 0]
    for candidate in sorted(fitting, key=_least_work):
        if _least_work(candidate) >= best:
            break
        bound = lower_bound(candidate.problem)
        if bound + candidate.choices.reduction_seconds < best:
            kept.append(_Evaluated(candidate, bound, _best_family(candidate, bound)))
            best = min(best, kept[-1].seconds)
    promising = [one for one in kept if one.least_seconds < best or one.seconds == best]
    return sorted(promising, key=lambda one: (one.least_seconds, one.seconds))


def _least_work(candidate: Candidate) -> float:
    return float(candidate.problem.work.max()) + candidate.choices.reduction_seconds


def _best_family(candidate: Candidate, bound: float) -> Plan | None:
    """Return the fastest family that keeps the limit."""
    plans = [
        Plan(candidate.problem, schedule, bound, candidate.choices)
        for schedule in fixed_schedules(candidate.problem)
    ]
    return min((plan for plan in plans if plan.keeps_limit), key=_seconds, default=None)


@dataclass(frozen=True)
class _Work:
    """The solving of candidates within a number of seconds, or an effort, in all."""

    seconds: float
    effort: float | None
    progress: Callable[[Progress], None] | None

    def solve(self, evaluated: Sequence[_Evaluated], share: float) -> list[_Evaluated]:
        """Solve each, unless it is proven to be slower than another; the best first.

        Seconds that one leaves go to those after it; of an effort each gets the same part.
        """
        clock, most = EffortClock(), share * self.seconds
        effort = None if self.effort is None else share * self.effort / max(1, len(evaluated))
        best = min((one.seconds for one in evaluated), default=inf)
        solved = []
        for number, one in enumerate(evaluated):
            left = max(0.0, most - clock.seconds) / (len(evaluated) - number)
            solved.append(self._solve(one, left, effort) if one.least_seconds < best else one)
            best = min(best, solved[-1].seconds)
        return _best_first(solved)

    def _solve(self, one: _Evaluated, seconds: float, effort: float | None) -> _Evaluated:
        """Return the better of what the solver finds and of what is known."""
        candidate = one.candidate
        orders = [] if one.known is None else [one.known.schedule]
        found = solve(
            candidate.problem,
            seconds=seconds,
            effort=effort,
            known=orders,
            progress=self.progress,
        )
        bound = max(found.lower_bound, one.lower_bound)
        plans = [replace(found, choices=candidate.choices)]
        plans += [] if one.known is None else [one.known]
        best = replace(min(plans, key=_seconds), lower_bound=bound)
        return replace(one, lower_bound=bound, known=best)


def _divide(
    devices: int, batch: int, layers: Sequence[Piece] | Mapping[int, Sequence[Piece]]
) -> list[tuple[int, int]]:
    """Return ranks and replicas for every way to use all devices and divide the batch."""
    fewest = min(map(len, layers.values())) if isinstance(layers, Mapping) else len(layers)
    ways = list(divide_devices(devices, batch, max(1, fewest)))
    if not ways:
        raise SizeError(
            f"the batch cannot be divided among {devices} devices (batch: {batch}, layers: "
            f"{fewest}); use a batch that is a multiple of the replicas, or fewer devices"
        )
    return ways


def _check_devices(
    devices: int,
    batch: int,
    memory: object,
    transfer: object,
    rank_factors: object,
) -> None:
    require_whole_number("devices", devices)
    if devices < 1 or batch < 1:
        raise SizeError(
            f"devices and batch must be at least 1 (devices: {devices}, batch: {batch})"
        )
    tables = transfer.values() if isinstance(transfer, Mapping) else [transfer]
    per_rank = {
        "memory": isinstance(memory, Sequence) and not isinstance(memory, str),
        "transfer": any(isinstance(table, Sequence) for table in tables),
        "rank_factors": rank_factors is not None,
    }
    for name, is_given in per_rank.items():
        if is_given:
            raise ArgumentError(
                f"{name} must be one number if the number of ranks is chosen; give ranks instead "
                "of devices to have it per rank"
            )


def _seconds(plan: Plan) -> float:
    return plan.seconds


def _nothing_fits(refused: Sequence[Candidate]) -> str:
    closest = min(refused, key=lambda one: one.missing_bytes)
    needed = float(closest.problem.least_bytes.max())
    return (
        f"no choice fits; the closest is {describe_refusal(closest)}; a limit of {needed:,.0f} "
        "bytes per rank would do, or more ranks"
    )

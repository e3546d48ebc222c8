"""Costs from recorded timelines: what each stage's actions really took."""

from dataclasses import replace

import numpy as np

from penstock.costs import COLLECTIVES, Costs, Gains, name_pair, scale_of_rows
from penstock.errors import CostsError
from penstock.ir.actions import COMPUTE_KINDS, Kind
from penstock.ir.graph import build_graph
from penstock.ir.rows import Bools, Floats
from penstock.sim.timeline import Timeline

__all__ = ["costs_of", "middle_mean"]

_HALVES = ("input", "weight")
_KINDS = dict(zip(COLLECTIVES, (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD), strict=True))


def costs_of(timeline: Timeline, *more: Timeline, like: Costs | None = None) -> Costs:
    """Return seconds per stage and kind of compute, per send, and per transfer of each link.

    Several steps of one schedule give better costs than one. Seconds are means over the middle
    half of what was recorded. A transfer takes as long as the fastest message of its link in a
    step, since others had arrived before anybody waited for them; a link without messages gets the
    mean of all links.
    Where `like` gives microbatches different sizes, these are the seconds of size 1.

    Recorded collectives occupied their rank, so they come with a `collective_overlap` of 0: what
    of them ran beside compute was not recorded.

    Overlapped actions say what their pairs saved, by kinds (`overlap_gain`), and not what each of
    them takes by itself.

    A timeline has no bytes per stage and no seconds of kinds that never ran: these come from
    `like`, in proportion to what did run. Without it there are no bytes, a full backward is the
    sum of its parts, and the parts of a backward that was never split are equal.

    >>> from penstock.assembly import build
    >>> from penstock.sim.engine import simulate
    >>> schedule = build("ZB-H1", ranks=2, microbatches=4)
    >>> costs_of(simulate(schedule, Costs(forward=[2, 3]))).forward
    (2.0, 3.0)
    """
    steps = (timeline, *more)
    if any(step.schedule != timeline.schedule for step in more):
        raise CostsError(
            "the timelines must be of one schedule (got several); take the costs of each by itself"
        )
    known = (Costs() if like is None else like).of_stages(timeline.schedule)
    scale = scale_of_rows(known, timeline.schedule)
    scale = np.where(scale > 0, scale, 1.0)
    forward, halves, full = _compute_seconds(steps, known, scale)
    return replace(
        known,
        forward=forward.tolist(),
        backward_input=halves[0].tolist(),
        backward_weight=halves[1].tolist(),
        full_backward=full.tolist(),
        send=_send_seconds(steps, scale),
        transfer=_transfer_seconds(steps, like, scale),
        overlap_gain=_gains(steps, known.overlap_gain, (forward, *halves, full), scale),
        **_collectives(steps, known),  # type: ignore[arg-type]  # names of seconds
    )


def _collectives(steps: tuple[Timeline, ...], known: Costs) -> dict[str, object]:
    """Return the seconds of each kind of collective per stage, where there were any."""
    rows, stages = steps[0].schedule.rows, steps[0].schedule.num_stages
    ran = {name: kind for name, kind in _KINDS.items() if rows.has_kind(kind)}
    found: dict[str, object] = {
        name: _first_known(
            _seconds(steps, kind, np.ones(len(rows))), known.per_stage(name, stages)
        ).tolist()
        for name, kind in ran.items()
    }
    is_recorded = all(step.program is None for step in steps)
    return found | ({"collective_overlap": 0.0} if ran and is_recorded else {})


def _gains(
    steps: tuple[Timeline, ...], known: Gains, alone: tuple[Floats, ...], scale: Floats
) -> Gains:
    """Return what overlapped pairs saved, by their kinds; what is known where there were none.

    `alone` has the seconds of each kind of compute by itself, per stage.
    """
    rows = steps[0].schedule.rows
    opens = np.flatnonzero(~rows.joined)
    pairs = opens[np.diff(np.append(opens, len(rows))) == 2]
    if not pairs.size:
        return known
    by_kind = dict(zip(COMPUTE_KINDS, alone, strict=True))
    saved: dict[str, list[float]] = {}
    for row in pairs.tolist():
        both = (row, row + 1)
        kinds = [Kind(rows.kind[member]) for member in both]
        seconds = [by_kind[k][rows.stage[m]] * scale[m] for k, m in zip(kinds, both, strict=True)]
        if not min(seconds) > 0:
            continue
        for step in steps:
            taken = (
                step.end[row : row + 2].max() - step.start[row : row + 2].min() - _host(step)[row]
            )
            saved.setdefault(name_pair(*kinds), []).append((sum(seconds) - taken) / min(seconds))
    means = {name: middle_mean(np.array(shares)) for name, shares in saved.items()}
    found = {name: min(max(mean, 0.0), 1.0) for name, mean in means.items()}
    return ({} if isinstance(known, float) else dict(known)) | found


def _host(step: Timeline) -> Floats:
    """Return the host's seconds of each row, which only simulated ones include."""
    size = len(step.schedule.rows)
    return np.zeros(size) if step.program is None else step.program.prices.host[:size]


def middle_mean(values: Floats) -> float:
    """Return the mean without the lowest and the highest quarter.

    >>> middle_mean(np.array([1.0, 2.0, 4.0, 99.0]))
    3.0
    """
    cut = len(values) // 4
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _compute_seconds(
    steps: tuple[Timeline, ...], like: Costs, scale: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return, per stage, the seconds of F, of I and W, and of B; from `like` if one never ran."""
    stages = steps[0].schedule.num_stages
    forward, first, second, full = (_seconds(steps, kind, scale) for kind in COMPUTE_KINDS)
    halves = np.stack([first, second])
    old_forward = like.per_stage("forward", stages)
    old_halves = np.stack([like.per_stage(f"backward_{half}", stages) for half in _HALVES])
    old_full = np.array([like.full_backward_seconds(stage) for stage in range(stages)])
    full_if_split = old_full * _ratio(halves.sum(axis=0), old_halves.sum(axis=0))
    halves_if_full = old_halves * _ratio(full, old_full)
    return (
        _first_known(forward, old_forward),
        _first_known(halves, halves_if_full, old_halves),
        _first_known(full, full_if_split, old_full),
    )


def _ratio(new: Floats, old: Floats) -> Floats:
    """Return how much slower than before, or NaN where either is unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Floats = np.where(old > 0, new / old, np.nan)
    return ratio


def _first_known(*columns: Floats) -> Floats:
    known = columns[0]
    for column in columns[1:]:
        known = np.where(np.isnan(known), column, known)
    return known


def _seconds(steps: tuple[Timeline, ...], kind: Kind, scale: Floats) -> Floats:
    """Return, per stage, the seconds of this kind, or NaN where it never ran by itself."""
    rows, stages = steps[0].schedule.rows, steps[0].schedule.num_stages
    is_kind = rows.is_kind(kind) & ~rows.in_overlap()
    found = np.full(stages, np.nan)
    for stage in np.unique(rows.stage[is_kind]):
        found[stage] = _middle(steps, is_kind & (rows.stage == stage), scale)
    return found


def _middle(steps: tuple[Timeline, ...], wanted: Bools, scale: Floats) -> float:
    return middle_mean(np.concatenate([(_lengths(step) / scale)[wanted] for step in steps]))


def _lengths(step: Timeline) -> Floats:
    """Return the seconds of each row without the host's, which only simulated ones include."""
    return step.end - step.start - _host(step)


def _send_seconds(steps: tuple[Timeline, ...], scale: Floats) -> float:
    sends = steps[0].schedule.rows.is_kind(Kind.SEND_F, Kind.SEND_B)
    return _middle(steps, sends, scale) if sends.any() else 0.0


def _transfer_seconds(
    steps: tuple[Timeline, ...], like: Costs | None, scale: Floats
) -> list[list[float]]:
    """Return, per link, the seconds from the end of a send to the start of its use."""
    schedule = steps[0].schedule
    ranks, rows, graph = schedule.num_ranks, schedule.rows, build_graph(schedule)
    user = np.repeat(np.arange(len(rows)), np.diff(graph.first))
    is_message = rows.is_kind(Kind.SEND_F, Kind.SEND_B)[graph.need] & (graph.link >= 0)
    links, needs = graph.link[is_message], graph.need[is_message]
    # By step: the more steps, the faster the fastest message of all.
    found = np.full((len(steps), ranks * ranks), np.inf)
    for fastest_of_step, step in zip(found, steps, strict=True):
        waits = step.start[user[is_message]] - step.end[needs]
        np.minimum.at(fastest_of_step, links, waits / scale[needs])
    # Clocks of ranks differ a little, so that a message may seem to arrive before it was sent.
    fastest = np.maximum([middle_mean(column) for column in found.T], 0.0)
    is_known = np.isfinite(fastest)
    typical = float(fastest[is_known].mean()) if is_known.any() else 0.0
    others = np.full(ranks * ranks, typical) if like is None else like.per_link(ranks).ravel()
    table = np.where(is_known, fastest, others).reshape(ranks, ranks)
    np.fill_diagonal(table, 0.0)
    seconds: list[list[float]] = table.tolist()
    return seconds

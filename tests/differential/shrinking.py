"""Makes a case that fails small: whatever can be left out, while it fails in the same way, is."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.differential.case import Block, Case, Order, Part, Step
from tests.differential.orders import num_parts
from tests.differential.rules import is_valid

__all__ = ["shrink"]

_MOST_CHECKS = 500
_Item = TypeVar("_Item")
# Tried in place of any other order, from the simplest on; every second one splits backwards.
_SIMPLE_FAMILIES = ("GPipe", "ZB-H1", "LoopedBFS", "InterleavedZeroBubble", "ZBV")


def shrink(case: Case, still_fails: Callable[[Case], bool], *, ranks: int | None = None) -> Case:
    """The smallest case that is found in bounded time; the number of ranks stays if it is given.

    `still_fails` is asked about valid cases only, and about none twice.
    """
    seen, checks = {case}, 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(case, ranks):
            if candidate in seen or not is_valid(candidate):
                continue
            seen.add(candidate)
            checks += 1
            if checks > _MOST_CHECKS:
                return case
            if still_fails(candidate):
                case, is_smaller = candidate, True
                break
    return case


def _smaller(case: Case, ranks: int | None) -> Iterator[Case]:
    """Cases with something less, those with much less first."""
    yield from _with_fewer_steps(case)
    yield from _with_fewer_parts(case, ranks)
    yield from _with_simpler_orders(case, ranks)
    yield from _with_plain_settings(case)
    for number, part in enumerate(case.parts):
        for simpler in _simpler_parts(part):
            parts = (*case.parts[:number], simpler, *case.parts[number + 1 :])
            yield replace(case, parts=parts)
    for number, step in enumerate(case.steps):
        for shorter in _simpler_steps(step):
            steps = (*case.steps[:number], shorter, *case.steps[number + 1 :])
            yield replace(case, steps=steps)


def _with_fewer_steps(case: Case) -> Iterator[Case]:
    for number in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:number] + case.steps[number + 1 :])


def _with_fewer_parts(case: Case, ranks: int | None) -> Iterator[Case]:
    count = len(case.parts) - 1
    for number in range(count + 1):
        kept = case.parts[:number] + case.parts[number + 1 :]
        renumbered = replace(
            case,
            parts=kept,
            skips=_renumber(case.skips, number),
            ties=_renumber(case.ties, number),
            steps=tuple(_without_part(step, number) for step in case.steps),
        )
        for order in _orders(count, case.order, ranks):
            yield replace(renumbered, order=order)


def _renumber(pairs: tuple[tuple[int, int], ...], gone: int) -> tuple[tuple[int, int], ...]:
    return tuple((a - (a > gone), b - (b > gone)) for a, b in pairs if gone not in (a, b))


def _without_part(step: Step, gone: int) -> Step:
    kept = (edit for edit in step.edits if edit.part != gone or not edit.part)
    return replace(step, edits=tuple(replace(e, part=e.part - (e.part > gone)) for e in kept))


def _with_simpler_orders(case: Case, ranks: int | None) -> Iterator[Case]:
    for order in _orders(len(case.parts), case.order, ranks):
        if _rank_of(order) < _rank_of(case.order):
            yield replace(case, order=order)
    order = case.order
    if order.has_additions:
        yield replace(case, order=replace(order, recomputed=(), offloaded=(), joined=()))
        yield from (replace(case, order=less) for less in _with_fewer_additions(order))
        return
    for microbatches in range(1, case.order.microbatches):
        if not case.order.actions:
            yield replace(case, order=replace(case.order, microbatches=microbatches))


def _with_fewer_additions(order: Order) -> Iterator[Order]:
    """Leave out all of one kind, and then one at a time."""
    for fewer in _fewer(order.recomputed):
        yield replace(order, recomputed=fewer)
    for fewer in _fewer(order.offloaded):
        yield replace(order, offloaded=fewer)
    for rows in _fewer(order.joined):
        yield replace(order, joined=rows)


def _fewer(items: tuple[_Item, ...]) -> Iterator[tuple[_Item, ...]]:
    if items:
        yield ()
    for number in range(len(items)):
        yield items[:number] + items[number + 1 :]


def _rank_of(order: Order) -> tuple[int, int, int]:
    """How far from simple an order is."""
    known = order.family in _SIMPLE_FAMILIES
    family = _SIMPLE_FAMILIES.index(order.family) if known else len(_SIMPLE_FAMILIES)
    return family, order.ranks, order.microbatches


def _orders(parts: int, like: Order, ranks: int | None) -> Iterator[Order]:
    """Yield orders for `parts` parts, simple ones first."""
    for family in (*_SIMPLE_FAMILIES, *([] if like.actions else [like.family])):
        for count in range(1, parts + 1) if ranks is None else [ranks]:
            if count and parts % count == 0:
                order = Order(family, count, parts // count, like.microbatches)
                if _exists(order) and num_parts(order) == parts:
                    yield order


def _exists(order: Order) -> bool:
    match order.family:
        case "GPipe" | "ZB-H1" | "ZB-H2" | "1F1B":
            return order.per_rank == 1
        case "LoopedBFS" | "Interleaved1F1B" | "InterleavedZeroBubble":
            return True
        case "DualPipe":
            return order.per_rank == 2 and order.ranks % 2 == 0
        case _:
            return order.per_rank == 2


def _with_plain_settings(case: Case) -> Iterator[Case]:
    yield replace(case, loss="mse")
    yield replace(case, door="list")
    yield replace(case, inputs="floats")
    for number in range(len(case.skips)):
        yield replace(case, skips=case.skips[:number] + case.skips[number + 1 :])
    for number in range(len(case.ties)):
        yield replace(case, ties=case.ties[:number] + case.ties[number + 1 :])


def _simpler_parts(part: Part) -> Iterator[Part]:
    for number, block in enumerate(part.blocks):
        yield replace(part, blocks=part.blocks[:number] + part.blocks[number + 1 :])
        for simpler in _simpler_blocks(block):
            blocks = (*part.blocks[:number], simpler, *part.blocks[number + 1 :])
            yield replace(part, blocks=blocks)
    yield replace(part, sends="tensor")
    for trait in part.traits:
        yield replace(part, traits=tuple(t for t in part.traits if t != trait))


def _simpler_blocks(block: Block) -> Iterator[Block]:
    yield replace(block, kind="linear")
    for trait in block.traits:
        yield replace(block, traits=tuple(t for t in block.traits if t != trait))


def _simpler_steps(step: Step) -> Iterator[Step]:
    for edit in step.edits:
        yield replace(step, edits=tuple(e for e in step.edits if e != edit))
    yield replace(step, given="plain")
    for rows in range(1, step.rows):
        yield replace(step, rows=rows)
    for length in range(step.length):
        yield replace(step, length=length)

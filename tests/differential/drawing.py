"""Draws cases: everything that a case has depends on its seed alone."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from tests.differential.case import Block, Case, Door, Edit, Part, Step
from tests.differential.edits import EDITS
from tests.differential.losses import LOSSES
from tests.differential.model.blocks import HOOKS, KINDS, OWN_LINEAR, REWEIGHINGS
from tests.differential.model.building import SPLIT_DOORS
from tests.differential.model.forms import FORMS
from tests.differential.orders import draw_additions, draw_order, num_parts
from tests.differential.rules import LATE_LOSSES, TRACED, has_square_layer, is_valid
from tests.differential.ways import draw_ways

__all__ = ["draw_case"]

# How often each door is drawn; tracing takes seconds.
_DOORS: tuple[Door, ...] = ("list", "pipe", "mapping", "layers", "traced")
_SHARES_OF_DOORS = (0.6, 0.15, 0.1, 0.147, 0.003)

_GIVEN = ("plain", "ready", "nested", "along", "mixed")
_SHARES_OF_GIVEN = (0.6, 0.1, 0.1, 0.1, 0.1)

_KINDS = tuple(KINDS)
_FORMS = tuple(FORMS)
_LOSSES = tuple(LOSSES)
_BLOCK_TRAITS = ("frozen", "checkpoint", "reentrant", "offloaded", "write", *HOOKS)
_PART_TRAITS = ("writes", "keyword", "adds_loss", "frozen", "routes")
_EDITS_OF_ALL = ("zero", "sgd", "eval", "clip", "scaled", "outputs")
_EDITS_OF_ANY_PART = ("freeze", "thaw", "still")
# How often a case may have compiled blocks, which take seconds.
_SHARE_COMPILED = 0.003
_SHARE_TIED = 0.25
_SHARE_ADDED = 0.25
_SHARE_WITH_WAYS = 0.33


def draw_case(seed: int, *, ranks: int | None = None) -> Case:
    """Draw the case with this seed, on `ranks` ranks or on any number of them.

    >>> draw_case(3) == draw_case(3)
    True
    """
    chance = Random(seed)
    while True:
        case = _draw(chance, seed, ranks)
        if is_valid(case):
            case = _with_additions(Random(f"additions {seed}"), case)
            return _with_ways(Random(f"ways {seed}"), case)


def _with_ways(chance: Random, case: Case) -> Case:
    """Run the steps of every third case in other ways."""
    if chance.random() >= _SHARE_WITH_WAYS:
        return case
    ways = draw_ways(chance, case)
    steps = (replace(s, edits=(*s.edits, *w)) for s, w in zip(case.steps, ways, strict=True))
    run_so = replace(case, steps=tuple(steps))
    return run_so if is_valid(run_so) else case


def _with_additions(chance: Random, case: Case) -> Case:
    """Add to the order of every fourth case; its blocks may communicate, which lets others run.

    The numbers are of another stream, so that a seed that was found keeps its model.
    """
    if chance.random() >= _SHARE_ADDED:
        return case
    added = replace(case, order=draw_additions(chance, case))
    if case.door != "traced":
        added = replace(added, parts=tuple(_communicating(chance, part) for part in case.parts))
    return added if is_valid(added) else case


def _communicating(chance: Random, part: Part) -> Part:
    blocks = tuple(
        replace(block, traits=(*block.traits, *_some(chance, ["exchange"], 0.4)))
        for block in part.blocks
    )
    return replace(part, blocks=blocks)


def _draw(chance: Random, seed: int, ranks: int | None) -> Case:
    order = draw_order(chance, ranks or chance.choice([1, 1, 2, 2, 2, 3, 4]))
    count = num_parts(order)
    # Most cases have few features, so that combinations come up but do not hide one another.
    share = chance.choice([0.0, 0.1, 0.3])
    door = chance.choices(_DOORS, _SHARES_OF_DOORS)[0]
    if door in SPLIT_DOORS:
        parts = tuple(_draw_layers(chance, share, door) for _ in range(count))
    else:
        parts = tuple(_draw_part(chance, share) for _ in range(count))
        if chance.random() < _SHARE_COMPILED:
            parts = (Part((Block("linear", ("compiled",)), *parts[0].blocks)), *parts[1:])
    case = Case(
        seed,
        parts,
        order,
        chance.choice(["mse", *_LOSSES]),
        skips=_draw_skips(chance, count),
        door=door,
        inputs=chance.choice(["floats", "floats", "tokens", "trained"]),
    )
    if door not in SPLIT_DOORS and chance.random() < _SHARE_TIED:
        case = replace(case, ties=_draw_tie(chance, case))
    return _with_steps(chance, case)


def _draw_layers(chance: Random, share: float, door: Door) -> Part:
    """A part of a model that Penstock cuts itself."""
    blocks = [_draw_block(chance, share) for _ in range(chance.choice([1, 1, 2]))]
    if door == "traced":
        kinds = sorted(TRACED)
        blocks = [Block(chance.choice(kinds), _some(chance, ["skip"], 0.5)) for _ in blocks]
    return Part(tuple(blocks))


def _draw_part(chance: Random, share: float) -> Part:
    blocks = tuple(_draw_block(chance, share) for _ in range(chance.choice([0, 1, 1, 2])))
    sends = chance.choice(_FORMS) if chance.random() < 0.4 else "tensor"
    return Part(blocks, sends, _some(chance, _PART_TRAITS, share))


def _draw_block(chance: Random, share: float) -> Block:
    kind = "linear" if chance.random() < 0.3 else chance.choice(_KINDS)
    traits = _some(chance, _BLOCK_TRAITS, share / 2)
    if chance.random() < 0.5:
        traits += ("skip",)
    if kind in OWN_LINEAR and chance.random() < share:
        traits += (chance.choice(tuple(REWEIGHINGS)),)
    return Block(kind, traits)


def _some(chance: Random, names: Sequence[str], share: float) -> tuple[str, ...]:
    return tuple(name for name in names if chance.random() < share)


def _draw_skips(chance: Random, count: int) -> tuple[tuple[int, int], ...]:
    pairs = [(a, b) for a in range(count) for b in range(a + 2, count)]
    return tuple(sorted(chance.sample(pairs, min(len(pairs), chance.choice([0, 0, 0, 1, 2])))))


def _draw_tie(chance: Random, case: Case) -> tuple[tuple[int, int], ...]:
    able = [part for part in range(len(case.parts)) if has_square_layer(case, part)]
    pairs = [(a, b) for a in able for b in able if a < b]
    return (chance.choice(pairs),) if pairs else ()


def _with_steps(chance: Random, case: Case) -> Case:
    """The case with steps whose edits fit its parts."""
    count = chance.choice([1, 2, 2, 3])
    has_time = chance.random() < 0.75
    rows, length = _draw_size(chance, case, has_time)
    steps = []
    for number in range(count):
        if number and chance.random() < 0.3:
            rows, length = _draw_size(chance, case, has_time)
        given = chance.choices(_GIVEN, _SHARES_OF_GIVEN)[0]
        edits = _draw_edits(chance, case) if number else ()
        steps.append(Step(rows, length, "plain" if case.door == "traced" else given, edits))
    return replace(case, steps=tuple(steps))


def _draw_size(chance: Random, case: Case, has_time: bool) -> tuple[int, int]:
    if case.door == "traced":
        # A size of one would become a constant of the graph.
        return 2 * case.order.microbatches + chance.randint(0, 3), chance.randint(2, 3)
    least = max(1, case.order.microbatches - 1)
    return chance.randint(least, 2 * least + 2), chance.randint(1, 3) if has_time else 0


def _draw_edits(chance: Random, case: Case) -> tuple[Edit, ...]:
    edits = [Edit(kind) for kind in _some(chance, _EDITS_OF_ALL, 0.2)]
    if case.loss in LATE_LOSSES:
        edits.append(Edit("late"))
    if case.door != "traced" and chance.random() < 0.4:
        part = chance.randrange(len(case.parts))
        kinds = ("fail", *(EDITS if has_square_layer(case, part) else _EDITS_OF_ANY_PART))
        edits.append(Edit(chance.choice(kinds), part))
    return tuple(edits)

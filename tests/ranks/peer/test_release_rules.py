"""Whatever happens when, no device takes the bytes of one message for those of another.

Two hosts queue messages, two devices carry them, a rank is lost, and what is left of the two ends
waits. A model of that is run in every order in which it can happen. The places of messages and
the rules for ending waits are those of the package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

import pytest

from penstock.ranks.peer.release_rules import LastQueued, has_reached, may_overwrite, may_read_nan
from penstock.ranks.peer.ring import ALIGNMENT, Ring, RingEntry

NAN, STALE = 0, -1
FAR = 2**30
NOTHING = LastQueued(0, is_final=False)


# Like `may_read_nan` and `may_overwrite`.
Rule: TypeAlias = Callable[..., bool]


class Loss(Enum):
    """What happens to which end."""

    ELSEWHERE = "another rank is lost"
    SENDER_KILLED = "the sender is killed"
    RECEIVER_KILLED = "the receiver is killed"
    SENDER_STOPS = "the sender's host stops"
    RECEIVER_STOPS = "the receiver's host stops"
    SENDER_PAUSES = "the sender's host stops and continues"
    RECEIVER_PAUSES = "the receiver's host stops and continues"

    @property
    def end(self) -> int | None:
        """The end that it happens to: 0 for the sender, 1 for the receiver."""
        return None if self is Loss.ELSEWHERE else int(self.name.startswith("RECEIVER"))

    @property
    def is_kill(self) -> bool:
        return self.name.endswith("KILLED")

    @property
    def is_pause(self) -> bool:
        return self.name.endswith("PAUSES")


@dataclass(frozen=True, slots=True)
class Host:
    """A host: its place in its program, what it has queued, and what it knows."""

    place: int = 0
    queued: int = 0
    is_queueing: bool = False
    is_aborted: bool = False
    has_failed: bool = False
    is_still: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """Everything: hosts, devices (the entry they are at, and how far), memory and counters."""

    hosts: tuple[Host, Host] = (Host(), Host())
    has_struck: bool = False
    sending: tuple[int, int] = (1, 0)
    taking: tuple[int, int] = (1, 0)
    ready: int = 0
    freed: int = 0
    cells: tuple[tuple[int, int], ...] = ()
    offered: int = 0
    completed: int = 0
    sent: LastQueued = NOTHING
    taken: LastQueued = NOTHING
    # 0: not to be filled, 1: to be filled, 2: half filled, 3: filled and released.
    filling: int = 0
    is_space_released: bool = False
    wrong: frozenset[int] = frozenset()


class Model:
    """Every next world of a world, for messages in steps of these sizes."""

    def __init__(
        self,
        steps: tuple[int, ...],
        loss: Loss,
        places: int,
        *,
        may_read: Rule = may_read_nan,
        may_write: Rule = may_overwrite,
    ) -> None:
        self.loss = loss
        self.may_read, self.may_write = may_read, may_write
        self.first = World(cells=((STALE, STALE),) * places)
        self.program = [word for size in steps for word in (*["queue"] * size, "end", "meet")]
        ring = Ring(places * ALIGNMENT)
        self.oldest_kept = [ring.oldest_kept]
        self.entries: list[RingEntry] = []
        for _ in range(sum(steps)):
            self.entries += ring.place(ALIGNMENT)
            self.oldest_kept.append(ring.oldest_kept)

    def count_returned(self, world: World) -> int:
        """Return up to which entry the steps go that have returned to the receiver's user."""
        program = self.program[: world.hosts[1].place]
        if "meet" not in program:
            return 0
        last = len(program) - program[::-1].index("meet")
        return program[:last].count("queue")

    def next(self, world: World) -> Iterator[World]:
        yield from self._strike(world)
        for end in (0, 1):
            if not world.hosts[end].is_still:
                yield from self._run_host(world, end)
        if not (self.loss is Loss.SENDER_KILLED and world.has_struck):
            yield from self._send(world)
        if not (self.loss is Loss.RECEIVER_KILLED and world.has_struck):
            yield from self._take(world)
        if self._may_release(world, 0):
            yield from self._release_sender(world)
        if self._may_release(world, 1):
            yield from self._release_receiver(world)

    # ---- hosts

    def _with_host(self, world: World, end: int, **changes: object) -> World:
        hosts = list(world.hosts)
        hosts[end] = replace(hosts[end], **changes)  # type: ignore[arg-type]  # fields of Host
        return replace(world, hosts=(hosts[0], hosts[1]))

    def _strike(self, world: World) -> Iterator[World]:
        end = self.loss.end
        if not world.has_struck:
            struck = replace(world, has_struck=True)
            yield struck if end is None else self._with_host(struck, end, is_still=True)
        elif end is not None and self.loss.is_pause and world.hosts[end].is_still:
            yield self._with_host(world, end, is_still=False)

    def _run_host(self, world: World, end: int) -> Iterator[World]:
        host = world.hosts[end]
        if world.has_struck and not host.is_aborted:
            yield self._with_host(world, end, is_aborted=True)
        if host.has_failed or host.place == len(self.program):
            return
        match self.program[host.place]:
            case "queue" if host.is_queueing:
                yield self._with_host(
                    world, end, is_queueing=False, queued=host.queued + 1, place=host.place + 1
                )
            case "queue":
                changes = {"has_failed": True} if host.is_aborted else {"is_queueing": True}
                yield self._with_host(world, end, **changes)
            case "end":
                noted = replace(world, offered=host.queued)
                if end == 1:
                    noted = replace(world, taken=LastQueued(host.queued, host.is_aborted))
                yield self._with_host(noted, end, place=host.place + 1)
            case "meet":
                if host.is_aborted:
                    yield self._with_host(world, end, has_failed=True)
                if world.hosts[1 - end].place >= host.place:
                    # What a receiver has completed it notes before it looks for an abort.
                    noted = replace(world, completed=host.queued) if end == 1 else world
                    if host.is_aborted:
                        yield self._with_host(noted, end, has_failed=True)
                    else:
                        yield self._with_host(noted, end, place=host.place + 1)

    # ---- devices

    def _send(self, world: World) -> Iterator[World]:
        number, stage = world.sending
        if number > world.hosts[0].queued:
            return
        entry = self.entries[number - 1]
        if stage == 0 and entry.after and not has_reached(world.freed, entry.after):
            return
        if stage == 2:
            yield replace(world, sending=(number + 1, 0), ready=number)
            return
        yield replace(
            world, sending=(number, stage + 1), cells=self._write(world, entry, stage, number)
        )

    def _write(
        self, world: World, entry: RingEntry, half: int, value: int
    ) -> tuple[tuple[int, int], ...]:
        cells = [list(cell) for cell in world.cells]
        cells[entry.offset // ALIGNMENT][half] = value
        return tuple((cell[0], cell[1]) for cell in cells)

    def _take(self, world: World) -> Iterator[World]:
        number, stage = world.taking
        if number > world.hosts[1].queued:
            return
        if stage == 0 and not has_reached(world.ready, number):
            return
        if stage == 2:
            yield replace(world, taking=(number + 1, 0), freed=number)
            return
        found = world.cells[self.entries[number - 1].offset // ALIGNMENT][stage]
        wrong = world.wrong if found in (number, NAN) else world.wrong | {number}
        yield replace(world, taking=(number, stage + 1), wrong=wrong)

    # ---- what ends waits

    def _may_release(self, world: World, end: int) -> bool:
        host = world.hosts[end]
        return host.is_aborted and not host.is_still

    def _knows(self, other: int) -> dict[str, bool]:
        is_lost = self.loss.end == other
        return {"is_given_up": is_lost, "is_gone": is_lost and self.loss.is_kill}

    def _release_sender(self, world: World) -> Iterator[World]:
        host, note = world.hosts[0], LastQueued(world.hosts[0].queued, True)
        if not host.is_queueing and world.sent != note:
            yield replace(world, sent=note)
        if world.is_space_released:
            if world.freed != FAR:
                yield replace(world, freed=FAR)
        elif self.may_write(world.freed, world.taken, offered=world.offered, **self._knows(1)):
            yield replace(world, is_space_released=True)

    def _release_receiver(self, world: World) -> Iterator[World]:
        host, note = world.hosts[1], LastQueued(world.hosts[1].queued, True)
        if not host.is_queueing and world.taken != note:
            yield replace(world, taken=note)
        if world.filling == 3:
            if world.ready != FAR:
                yield replace(world, ready=FAR)
        elif world.filling:
            half = world.filling - 1
            cells = tuple((NAN, NAN) if half else (NAN, old[1]) for old in world.cells)
            yield replace(world, filling=world.filling + 1, cells=cells)
        elif self.may_read(
            world.freed,
            world.sent,
            completed=world.completed,
            # What is about to be queued has its place already.
            oldest_kept=self.oldest_kept[host.queued + host.is_queueing],
            **self._knows(0),
        ):
            yield replace(world, filling=1)


def explore(model: Model) -> tuple[set[World], list[World]]:
    """Return every world that can come about, and those after which nothing happens."""
    seen, stack, last = {model.first}, [model.first], []
    while stack:
        world = stack.pop()
        following = [following for following in model.next(world) if following != world]
        if not following:
            last.append(world)
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen, last


def find_problems(model: Model) -> set[str]:
    """Return what goes wrong in some order of events."""
    seen, last = explore(model)
    assert last, "something is always left to do"
    end, found = model.loss.end, set()
    for world in seen:
        # With both hosts there, not even the numbers of a step that fails are wrong.
        counted = len(model.entries) if end is None else model.count_returned(world)
        if model.loss is not Loss.RECEIVER_KILLED and min(world.wrong, default=FAR) <= counted:
            found.add("a wrong number")
    for world in last:
        if end != 0 and world.sending[0] <= world.hosts[0].queued:
            found.add("a sender that waits forever")
        if end != 1 and world.taking[0] <= world.hosts[1].queued:
            found.add("a receiver that waits forever")
    return found


# Rings were filled once and waits ended after some seconds, while a slow device still wrote into
# them or had not read from them.
@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        (Loss.ELSEWHERE, (2,)),
        (Loss.SENDER_KILLED, (1, 1)),
        (Loss.RECEIVER_KILLED, (1, 1)),
        (Loss.SENDER_STOPS, (1, 1)),
        (Loss.RECEIVER_STOPS, (1, 1)),
    ],
)
def test_no_order_of_events_gives_a_wrong_number_or_waits_forever(
    loss: Loss, steps: tuple[int, ...]
) -> None:
    assert find_problems(Model(steps, loss, places=1)) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "places"), [((1, 1), 1), ((1, 2), 2), ((2, 2), 2), ((3,), 1)])
@pytest.mark.parametrize("loss", Loss)
def test_nor_does_any_with_more_messages(loss: Loss, steps: tuple[int, ...], places: int) -> None:
    assert find_problems(Model(steps, loss, places)) == set()


def always(*_: object, **__: object) -> bool:
    return True


def never(*_: object, **__: object) -> bool:
    return False


def test_reading_without_the_rule_gives_wrong_numbers() -> None:
    model = Model((1, 1), Loss.SENDER_STOPS, places=1, may_read=always)
    assert find_problems(model) == {"a wrong number"}


@pytest.mark.slow
def test_overwriting_without_the_rule_gives_wrong_numbers() -> None:
    model = Model((2,), Loss.ELSEWHERE, places=1, may_write=always)
    assert find_problems(model) == {"a wrong number"}


def test_waits_that_nobody_ends_last_forever() -> None:
    model = Model((2,), Loss.ELSEWHERE, places=1, may_read=never, may_write=never)
    assert find_problems(model) == {"a sender that waits forever", "a receiver that waits forever"}


@pytest.mark.parametrize(
    "word", [LastQueued(0, False), LastQueued(7, True), LastQueued(2**40, False)]
)
def test_a_note_is_one_word(word: LastQueued) -> None:
    assert LastQueued.from_word(word.to_word()) == word

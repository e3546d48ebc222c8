"""A second opinion on schedules: runs one the slow way, by the words of DESIGN and nothing else.

No graph, no clock, no lookup: every rank has a place in its list, and the ranks take turns until
nobody gets any further. Sends are unbuffered, channels are first in, first out.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.ir.actions import Action, Kind, Overlap, Work
from penstock.ir.schedule import Schedule

__all__ = ["find_fault"]

# A value that a stage makes: "F" its output, "I" the gradient of its inputs, "W" of its weights.
Value = tuple[str, int, int]
# A value on its way: what it is, the stage that made it, the stage that takes it, microbatch.
Message = tuple[str, int, int, int]

_MAKES = {
    Kind.FORWARD: "F",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.FULL_BACKWARD: "IW",
}


class _FaultError(Exception):
    """The schedule is wrong, and this is why."""


def find_fault(schedule: Schedule, channels: str) -> str | None:
    """Return why a schedule must not run, or None if it runs to its end and is complete."""
    try:
        world = _World(schedule, channels)
        world.run()
        world.look_back()
    except _FaultError as fault:
        return str(fault)
    return None


def _members(work: Work) -> tuple[Action, ...]:
    return work.actions if isinstance(work, Overlap) else (work,)


def _message(action: Action) -> Message:
    assert action.peer is not None
    assert action.microbatch is not None
    what = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "I"
    ends = (action.stage, action.peer)
    if action.kind in (Kind.RECV_F, Kind.RECV_B):
        ends = ends[::-1]
    return (what, *ends, action.microbatch)


@dataclass
class _World:
    """All ranks of a schedule under way."""

    schedule: Schedule
    channels: str
    place: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    made: dict[Value, int] = field(default_factory=dict)
    posted: set[Message] = field(default_factory=set)
    arrived: set[Message] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)
    # What a forward saved: where it is now, by stage and microbatch.
    saved: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.orders = self.schedule.orders
        self.holder = self.schedule.placement.rank_of_stage
        self.flow = self.schedule.dataflow
        actions = [a for order in self.orders for work in order for a in _members(work)]
        kinds = {action.kind for action in actions}
        self.is_lowered = any(kind.is_communication for kind in kinds)
        self.is_sharded = bool(kinds & {Kind.UNSHARD, Kind.RESHARD})
        self.has_reductions = Kind.REDUCE_GRAD in kinds
        self.has_backwards = any(kind.is_compute for kind in kinds - {Kind.FORWARD})
        self.again = {(a.stage, a.microbatch or 0) for a in actions if a.kind is Kind.RECOMPUTE}
        self.look_at_numbers()
        self.ahead_of = self.match_messages()

    def look_at_numbers(self) -> None:
        for rank, order in enumerate(self.orders):
            for work in order:
                for action in _members(work):
                    if not 0 <= action.stage < len(self.holder):
                        raise _FaultError(f"{action}: no such stage")
                    if self.holder[action.stage] != rank:
                        raise _FaultError(f"{action}: not on rank {rank}")
                    last = self.schedule.microbatches - 1
                    if action.microbatch is not None and not 0 <= action.microbatch <= last:
                        raise _FaultError(f"{action}: no such microbatch")
                    if action.kind.is_communication:
                        self.look_at_edge(_message(action))

    def look_at_edge(self, message: Message) -> None:
        what, maker, taker, _ = message
        edge = (maker, taker) if what == "F" else (taker, maker)
        if edge not in self.flow.edges:
            raise _FaultError(f"{message}: no such edge")
        if self.holder[maker] == self.holder[taker]:
            raise _FaultError(f"{message}: stays on its rank")

    def match_messages(self) -> dict[Message, Message | None]:
        """Map each message to the one ahead of it in its queue; both sides must agree on it."""
        queues: dict[tuple[int, ...], list[Message]] = defaultdict(list)
        for rank, order in enumerate(self.orders):
            for work in order:
                for action in _members(work):
                    if action.kind.is_communication:
                        message = _message(action)
                        ends = (self.holder[message[1]], self.holder[message[2]])
                        pair = tuple(sorted(ends)) if self.channels == "shared" else ends
                        queues[(*pair, rank)].append(message)
        ahead: dict[Message, Message | None] = {}
        for (one, two, rank), queue in queues.items():
            if queue != queues.get((one, two, one + two - rank)):
                raise _FaultError(f"ranks {one} and {two} do not list the same messages")
            if len(set(queue)) < len(queue):
                raise _FaultError(f"ranks {one} and {two} list a message twice")
            ahead.update(zip(queue, [None, *queue], strict=False))
        return ahead

    def run(self) -> None:
        while sum(self.advance(rank) for rank in range(len(self.orders))):
            pass
        for rank, order in enumerate(self.orders):
            if self.place[rank] < len(order):
                raise _FaultError(f"rank {rank} never gets past {order[self.place[rank]]}")

    def advance(self, rank: int) -> bool:
        """Do what this rank can do now; whether that was anything."""
        began_at = self.place[rank]
        while self.place[rank] < len(self.orders[rank]):
            if not self.do(rank, _members(self.orders[rank][self.place[rank]])):
                break
            self.place[rank] += 1
        return self.place[rank] > began_at

    def do(self, rank: int, actions: tuple[Action, ...]) -> bool:
        if any(action.kind.is_compute for action in actions):
            if not all(self.has_inputs(rank, action) for action in actions):
                return False
            for action in actions:
                self.compute(rank, action)
            return True
        if len(actions) > 1:
            raise _FaultError(f"{actions}: only compute overlaps")
        (action,) = actions
        match action.kind:
            case Kind.RECOMPUTE:
                if self.is_sharded and action.stage not in self.whole:
                    raise _FaultError(f"{action}: stage is not whole")
                self.move(action, "inputs", "device")
            case Kind.OFFLOAD:
                self.move(action, "device", "host")
            case Kind.RELOAD:
                self.move(action, "host", "reloaded")
            case Kind.SEND_F | Kind.SEND_B:
                return self.send(rank, _message(action))
            case Kind.RECV_F | Kind.RECV_B:
                self.posted.add(_message(action))
            case Kind.UNSHARD:
                if action.stage in self.whole:
                    raise _FaultError(f"{action}: whole already")
                self.whole.add(action.stage)
            case Kind.RESHARD:
                if action.stage not in self.whole:
                    raise _FaultError(f"{action}: not whole")
                self.whole.remove(action.stage)
            case Kind.REDUCE_GRAD:
                self.reduced.append(action.stage)
            case _:
                raise AssertionError(action)
        return True

    def move(self, action: Action, before: str, after: str) -> None:
        place = (action.stage, action.microbatch or 0)
        if self.saved.get(place) != before:
            raise _FaultError(f"{action}: what was saved is {self.saved.get(place)}")
        # What was recomputed must stay, because its forward saved only inputs to offload.
        self.saved[place] = "recomputed" if action.kind is Kind.RECOMPUTE else after

    def send(self, rank: int, message: Message) -> bool:
        what, maker, _, microbatch = message
        if self.made.get((what, maker, microbatch)) != rank:
            raise _FaultError(f"{message}: sent before it is made")
        ahead = self.ahead_of[message]
        is_first = self.channels == "directed" or ahead is None or ahead in self.arrived
        if message not in self.posted or not is_first:
            return False
        self.arrived.add(message)
        return True

    def has_inputs(self, rank: int, action: Action) -> bool:
        """Whether an action can start; it is a fault if it precedes what its rank makes for it."""
        microbatch = action.microbatch
        assert microbatch is not None
        own = {Kind.FORWARD: "", Kind.BACKWARD_WEIGHT: "I"}.get(action.kind, "F")
        if own and (own, action.stage, microbatch) not in self.made:
            raise _FaultError(f"{action}: before its own {own}")
        if action.kind is Kind.BACKWARD_WEIGHT:
            return True
        is_forward = action.kind is Kind.FORWARD
        what = "F" if is_forward else "I"
        ask = self.flow.producers if is_forward else self.flow.consumers
        for maker in ask(action.stage):
            at = self.made.get((what, maker, microbatch))
            is_remote = self.holder[maker] != rank
            if is_remote and self.is_lowered:
                if (what, maker, action.stage, microbatch) not in self.arrived:
                    return False
            elif at is None:
                return False
        return True

    def compute(self, rank: int, action: Action) -> None:
        if self.is_sharded and action.stage not in self.whole:
            raise _FaultError(f"{action}: stage is not whole")
        if action.kind is not Kind.FORWARD and action.stage in self.reduced:
            raise _FaultError(f"{action}: after the reduction")
        assert action.microbatch is not None
        place = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            self.saved[place] = "inputs" if place in self.again else "device"
        elif action.kind is Kind.BACKWARD_WEIGHT:
            pass
        elif self.saved.pop(place, "") in ("inputs", "host"):
            raise _FaultError(f"{action}: what was saved is not there")
        for what in _MAKES[action.kind]:
            value = (what, action.stage, action.microbatch)
            if value in self.made:
                raise _FaultError(f"{action}: made twice")
            self.made[value] = rank

    def look_back(self) -> None:
        """Require that all work was done, nothing is left unsharded, and all was reduced once."""
        if self.whole:
            raise _FaultError(f"stages {self.whole} are still whole")
        for microbatch in range(self.schedule.microbatches):
            self.look_at_microbatch(microbatch)
        with_gradients = {stage for what, stage, _ in self.made if what == "W"}
        if self.has_reductions and sorted(self.reduced) != sorted(with_gradients):
            raise _FaultError(f"reduced {self.reduced}, with gradients {with_gradients}")

    def look_at_microbatch(self, microbatch: int) -> None:
        """Require that a microbatch went through all stages of one copy of the model only."""
        kinds = "FIW" if self.has_backwards else "F"
        made = {(what, stage) for what, stage, number in self.made if number == microbatch}
        for copy in self.copies():
            if made == {(what, stage) for what in kinds for stage in copy}:
                return
        raise _FaultError(f"microbatch {microbatch} is incomplete")

    def copies(self) -> Iterable[list[int]]:
        """Return each copy's stages: the first stage of every part, the second ones, and so on."""
        seen: dict[int, list[int]] = defaultdict(list)
        for stage, part in enumerate(self.flow.parts):
            seen[part].append(stage)
        return map(list, zip(*seen.values(), strict=True))

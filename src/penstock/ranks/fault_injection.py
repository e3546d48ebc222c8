"""A transport with injected faults, for tests: slow links, reordered messages, a lost rank.

Values are never changed. The same seed gives the same faults in every run. What is held back is
sent before this rank waits for anything, so that a schedule that finishes still does:

    asked of us      send a   send b   post c   post d   receive c
    the transport                                        post d  post c  send b  send a  receive c

Two limits keep that a legal order. Sends that are held back together have one destination and are
few: a transport may make the next send to a peer wait for an older one, and the peer takes older
ones first. Receives from one source stay in order, because their shapes are learned in that order.
"""

import os
from dataclasses import dataclass
from math import isfinite
from random import Random
from time import sleep
from typing import Literal, TypeAlias

from penstock.errors import ArgumentError
from penstock.ranks.transport import Message, NoteSent, Transport
from penstock.tensors.packet import Packet

__all__ = ["Drop", "FaultInjectingTransport", "FaultInjection"]

# How many sends to one peer may be held back; transports start as many without waiting.
_MOST_HELD = 4
# The longest delay, in average ones.
_LONGEST_DELAY = 10.0
# The exit code of a rank that is dropped.
_EXIT_CODE = 75

_How: TypeAlias = Literal["exit", "silence"]


@dataclass(frozen=True, slots=True)
class Drop:
    """A rank that is lost at its `after`-th message, counted from 0 over all steps.

    "exit" ends its process at once, without a goodbye; with "silence" it never sends again.
    """

    rank: int
    after: int
    how: _How = "exit"

    def __post_init__(self) -> None:
        if self.rank < 0 or self.after < 0:
            raise ArgumentError(
                f"rank and after must be 0 or more (got {self.rank} and {self.after})"
            )
        if self.how not in ("exit", "silence"):
            raise ArgumentError(f"how must be 'exit' or 'silence' (got {self.how!r})")


@dataclass(frozen=True, slots=True)
class FaultInjection:
    """Faults of the links between the ranks; the same for the same seed.

    Messages take `delay_seconds` longer on average: every link is drawn fast or slow, and so is
    every message. `reorders` lets messages overtake one another wherever that is legal. With
    `by_order` messages have no names and are matched by order alone, as they are on NCCL.

    >>> FaultInjection(seed=7, delay_seconds=0.001, reorders=True).drop is None
    True
    """

    seed: int = 0
    delay_seconds: float = 0.0
    reorders: bool = False
    drop: Drop | None = None
    by_order: bool = False

    def __post_init__(self) -> None:
        if self.by_order and self.reorders:
            raise ArgumentError(
                "messages that are matched by order must not overtake one another (got by_order "
                "and reorders); leave out one of them"
            )
        if not (self.delay_seconds >= 0 and isfinite(self.delay_seconds)):
            raise ArgumentError(f"delay_seconds must be 0 or more (got {self.delay_seconds!r})")


class FaultInjectingTransport:
    """Another transport with faults: what is sent and received through it may be late."""

    def __init__(self, transport: Transport, faults: FaultInjection) -> None:
        self._transport = transport
        self._faults = faults
        self.ranks = transport.ranks
        self.num_ranks = transport.num_ranks
        # With every rank in this process no other one waits, so anything may be held back.
        self._runs_all = len(self.ranks) == self.num_ranks
        if self._runs_all and faults.drop is not None:
            raise ArgumentError(
                "drop must be used with a process for each rank (got all ranks in one process); "
                "leave it out, or give every rank a process"
            )
        if self._runs_all and faults.by_order:
            raise ArgumentError(
                "by_order must be used with a process for each rank (got all ranks in one "
                "process); leave it out, or give every rank a process"
            )
        self._step = 0
        self._sent = 0
        self._held: dict[Message, Packet] = {}
        self._posted: list[Message] = []

    @property
    def has_unknown_hooks(self) -> bool:
        """Whether the other transport has sent hooks that their receivers do not know of."""
        return self._transport.has_unknown_hooks

    def begin_step(self, signature: bytes) -> None:
        """Start with nothing held back, even if the last step failed."""
        self._step += 1
        self._held.clear()
        self._posted.clear()
        self._transport.begin_step(signature)

    def send(self, message: Message, packet: Packet) -> None:
        """Send the packet, now or together with the next ones."""
        if self._is_lost():
            return
        if not self._faults.reorders:
            self._deliver(message, packet)
            return
        if not self._may_hold(message):
            self._release()
        self._held[message] = packet

    def send_failure(self, message: Message) -> None:
        """Announce the failure, after everything that came before."""
        self._release()
        if not self._is_lost():
            self._transport.send_failure(message)

    def post_receive(self, message: Message) -> None:
        """Prepare to receive a message, at the latest when this rank waits for something."""
        if not message.is_forward:
            # The form of a gradient is known from its activation, once that has been sent.
            self._release()
        if self._faults.reorders:
            self._posted.append(message)
        else:
            self._transport.post_receive(message)

    def receive(self, message: Message) -> Packet:
        """Wait for a message, and then a little longer."""
        self._release_for(message)
        packet = self._transport.receive(message)
        self._delay("arrival", message)
        return packet

    def discard(self, message: Message) -> None:
        """Take a message that is no longer needed, if it is on its way."""
        self._release_for(message)
        self._transport.discard(message)

    def release_sends(self) -> None:
        """Send what is held back: copies of a stage may wait for it before they meet this one."""
        self._release()
        self._transport.release_sends()

    def end_step(self) -> None:
        """Send what is held back, and end the step."""
        self._release()
        self._transport.end_step()

    def watch_sends(self, note: NoteSent | None) -> None:
        """Watch the sends of the other transport, which are when messages leave."""
        self._transport.watch_sends(note)

    def remember_shapes(self) -> None:
        """Leave the shapes to the transport."""
        self._transport.remember_shapes()

    def forget_shapes(self) -> None:
        """Leave the shapes to the transport."""
        self._transport.forget_shapes()

    def _is_lost(self) -> bool:
        """Count a message, and say whether this rank is dropped by now."""
        drop = self._faults.drop
        self._sent += 1
        if drop is None or drop.rank not in self.ranks or self._sent <= drop.after:
            return False
        if drop.how == "exit":
            os._exit(_EXIT_CODE)
        return True

    def _may_hold(self, message: Message) -> bool:
        if self._runs_all:
            return True
        is_same_way = all(held.destination == message.destination for held in self._held)
        return is_same_way and len(self._held) < _MOST_HELD

    def _release_for(self, message: Message) -> None:
        """Send what is held back: all of it, or until this message is on its way."""
        if self._runs_all:
            self._post_held()
            for held in self._shuffled(self._held) if message in self._held else ():
                self._deliver(held, self._held.pop(held))
                if held == message:
                    return
        else:
            self._release()

    def _release(self) -> None:
        """Send all that is held back; receives first, because a peer may wait for them."""
        self._post_held()
        errors: list[Exception] = []
        for message in self._shuffled(self._held):
            try:
                self._deliver(message, self._held.pop(message))
            except Exception as error:
                # Its sender has moved on, so nothing else would notify the receiver.
                self._transport.send_failure(message)
                errors.append(error)
        if errors:
            raise errors[0]

    def _post_held(self) -> None:
        """Post receives from several sources in another order; those from one stay in order."""
        waiting: dict[int, list[Message]] = {}
        for message in self._posted:
            waiting.setdefault(message.source, []).append(message)
        sources = [message.source for message in self._shuffled(self._posted)]
        self._posted.clear()
        for source in sources:
            self._transport.post_receive(waiting[source].pop(0))

    def _deliver(self, message: Message, packet: Packet) -> None:
        self._delay("departure", message)
        self._transport.send(message, packet)

    def _shuffled(self, messages: dict[Message, Packet] | list[Message]) -> list[Message]:
        order = list(messages)
        self._random(len(order), *order).shuffle(order)
        return order

    def _delay(self, end: str, message: Message) -> None:
        """Half of a message's delay is at its departure and half at its arrival, on average."""
        mean = self._faults.delay_seconds / 2
        if mean:
            link = Random(f"{self._faults.seed} {message.source} {message.destination}")
            times = link.expovariate(1) * self._random(end, message).expovariate(1)
            sleep(mean * min(times, _LONGEST_DELAY))

    def _random(self, *what: object) -> Random:
        """Return a generator that depends on the seed, the step and what is drawn alone."""
        return Random(f"{self._faults.seed} {self._step} {what}")

"""Routes of a traced model, if some of its stages share a rank."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.ir.dataflow import Dataflow, Routed
from penstock.ir.relays import relay_sources
from penstock.splitting.placed_routes import PlacedRoutes

__all__ = ["LinkedValues"]

# The numbers of the values that each link carries, by producer and consumer.
_Links: TypeAlias = Mapping[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class LinkedValues:
    """The values between the stages of a traced model, by the links that carry them.

    `links` has them as the stages send them, each from stage to stage. Those in `written` are
    changed on their way by stages that write to them in place, so that every stage must get them
    from the one before it.
    """

    num_stages: int
    links: _Links
    written: frozenset[int] = frozenset()

    def place(self, ranks: Sequence[Hashable]) -> PlacedRoutes | None:
        """Return the routes if stages with equal `ranks` share a rank; None if none change.

        A stage that something went through, and that feeds no other stage without it, would look
        like the end of the model. Then no route changes.
        """
        links = self._links_on(ranks)
        if links == self.links:
            return None
        before, flow = (Dataflow(self.num_stages, list(found)) for found in (self.links, links))
        stages = range(self.num_stages)
        if any(before.consumers(stage) and not flow.consumers(stage) for stage in stages):
            return None
        return PlacedRoutes(
            flow, tuple(_LinkRerouting.of(stage, self.links, links) for stage in stages)
        )

    def _links_on(self, ranks: Sequence[Hashable]) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the links, in which a value goes to each rank once."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for link, values in self.links.items():
            for value in values:
                ends.setdefault(value, []).append(link)
        found: dict[tuple[int, int], list[int]] = {}
        for value, uses in sorted(ends.items()):
            origin = min(producer for producer, _ in uses)
            places = range(self.num_stages) if value in self.written else ranks
            sources = relay_sources(origin, [consumer for _, consumer in uses], places)
            for consumer, producer in sources.items():
                found.setdefault((producer, consumer), []).append(value)
        return {link: tuple(values) for link, values in found.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _LinkRerouting:
    """Sends the values of one stage along other links.

    `order` has the position of each argument of the module among what comes along the links.
    `made` has the values that the module returns for each stage, and `sent` where to find the
    values that each stage gets: for which stage they were made, at which position.
    """

    order: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, stage: int, old: _Links, new: _Links) -> "_LinkRerouting":
        """Return how one stage gets from its old links to the new ones."""
        coming = _received(stage, new)
        place = {
            value: (consumer, at)
            for (producer, consumer), values in sorted(old.items())
            if producer == stage
            for at, value in enumerate(values)
        }
        return cls(
            tuple(coming.index(value) for value in _received(stage, old)),
            tuple((c, len(values)) for (p, c), values in sorted(old.items()) if p == stage),
            tuple(
                (c, tuple(place[value] for value in values))
                for (p, c), values in sorted(new.items())
                if p == stage
            ),
        )

    def arguments(self, received: list[Any]) -> list[Any]:
        """Return the arguments in the order of the module; the first stage gets the model's."""
        return [received[at] for at in self.order] if self.order else received

    def output(self, output: Any) -> Any:
        """Return the values for the stages that this one feeds now."""
        found = {
            consumer: self._values(output, consumer, number) for consumer, number in self.made
        }
        payloads = {
            consumer: tuple(found[source][at] for source, at in places)
            for consumer, places in self.sent
        }
        return Routed({c: each[0] if len(each) == 1 else each for c, each in payloads.items()})

    def _values(self, output: Any, consumer: int, number: int) -> Sequence[Any]:
        """Return the values that the module made for a stage."""
        made = output.values[consumer] if isinstance(output, Routed) else output
        return (made,) if number == 1 else tuple(made)


def _received(stage: int, links: _Links) -> list[int]:
    """Return the values that come to a stage, in the order of its producers."""
    return [
        v for (_, consumer), values in sorted(links.items()) if consumer == stage for v in values
    ]

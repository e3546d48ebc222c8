"""Routes of a model split by layers, if some of its stages share a rank."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from penstock.ir.dataflow import Dataflow, Routed
from penstock.ir.relays import relay_sources
from penstock.splitting.by_layers.records.call_records import Value
from penstock.splitting.by_layers.records.record_text import (
    read_records,
    replace_sent,
    write_records,
)
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.placed_routes import PlacedRoutes

__all__ = ["LayerValues"]

# A message: its stage, its text, and where each value was: for which stage, at which position.
_Message: TypeAlias = tuple[int, str, tuple[tuple[int, int], ...]]
# As many texts are kept as the stages keep of their own.
_MOST_TEXTS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class LayerValues:
    """The values that layers return and other stages need."""

    routes: LayerRoutes

    def place(self, ranks: Sequence[Hashable]) -> PlacedRoutes | None:
        """Return the routes if stages with equal `ranks` share a rank; None if none change."""
        routes = self.routes
        sources = {
            value: relay_sources(routes.origin(value), stages, ranks)
            for value, stages in routes.needed_by.items()
        }
        apart = range(routes.num_stages)
        if all(
            found == relay_sources(routes.origin(value), found, apart)
            for value, found in sources.items()
        ):
            return None
        links = {(stage, stage + 1) for stage in range(routes.num_stages - 1)}
        links.update(
            (source, stage) for found in sources.values() for stage, source in found.items()
        )
        flow = Dataflow(routes.num_stages, sorted(links))
        stages = range(routes.num_stages)
        reroutings = tuple(_LayerRerouting(routes, sources, flow, stage) for stage in stages)
        return PlacedRoutes(flow, reroutings)


class _LayerRerouting:
    """Sends the values of one stage along the edges of another dataflow."""

    def __init__(
        self,
        routes: LayerRoutes,
        sources: Mapping[Value, Mapping[int, int]],
        dataflow: Dataflow,
        stage: int,
    ) -> None:
        self._routes, self._sources, self._stage = routes, sources, stage
        self._consumers = dataflow.consumers(stage)
        # The texts repeat from microbatch to microbatch.
        self._find_messages = lru_cache(maxsize=_MOST_TEXTS)(self._plan)

    def arguments(self, received: list[Any]) -> list[Any]:
        """Return the messages unchanged, because a stage finds the values in them by name."""
        return received

    def output(self, output: Any) -> Any:
        """Return the messages for the stages that this one feeds now."""
        made = output.values
        texts = tuple((consumer, message["records"]) for consumer, message in made.items())
        return Routed(
            {
                stage: {"records": text, "values": [made[c]["values"][at] for c, at in places]}
                for stage, text, places in self._find_messages(texts)
            }
        )

    def _plan(self, texts: tuple[tuple[int, str], ...]) -> tuple[_Message, ...]:
        """Return what goes to each stage, as places in the messages that the module made."""
        sent: dict[int, dict[Value, tuple[int, int]]] = {stage: {} for stage in self._consumers}
        for consumer, text in texts:
            _, values, _ = read_records(text)
            for at, value in enumerate(values):
                for stage in self._targets(value):
                    sent[stage][value] = consumer, at
        records = dict(texts)[self._stage + 1]
        return tuple(
            (
                stage,
                replace_sent(records, tuple(places))
                if stage == self._stage + 1
                else write_records("", (), tuple(places)),
                tuple(places.values()),
            )
            for stage, places in sent.items()
        )

    def _targets(self, value: Value) -> list[int]:
        """Return the stages that take a value from this one."""
        if value not in self._sources:
            following = self._routes.next_stage(value, self._stage)
            return [] if following is None else [following]
        found = self._sources[value].items()
        return [stage for stage, source in found if source == self._stage]

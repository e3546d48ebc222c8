"""Random numbers that depend on seed, step, microbatch and layer, and on nothing else.

    between    layers.0    between    layers.1    between        torch's generators are seeded
    ---------|===========|----------|===========|---------       at every bar

The seed of each stretch is a hash of what it belongs to, so that it does not matter which rank
runs it, what ran before, or whether it runs again in the backward. Around each piece of work the
user's own generators are put away and given back.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["KnowsLayers", "LayerRandom", "StageRandom", "find_generators", "stream_seed"]

# The highest bit of a seed separates a layer's own stream from those between layers. A generator
# keeps its seed in its state, so a layer that runs again can find its position.
_INSIDE = 1 << 63


@runtime_checkable
class KnowsLayers(Protocol):
    """A stage module that knows the layers of the whole model by name."""

    def announce_layers(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Call `enter` before each layer and `leave` after it, with its name.

        The layers of other stages are announced too, in the model's order.
        """


def stream_seed(*key: int | str) -> int:
    """Return the seed of a stream: 63 bits of the BLAKE2b hash of its key as JSON.

    >>> stream_seed(1234, "step", 0, 0, "layers.0", 0)
    233153272701390205
    """
    digest = blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & ~_INSIDE


@dataclass(slots=True, eq=False)
class _Running:
    """An action that draws from our streams: what their keys share, and the layers it is in."""

    owner: "LayerRandom"
    generators: Sequence[torch.Generator]
    key: tuple[int | str, ...]
    is_forward: bool
    calls: Counter[str] = field(default_factory=Counter)
    entered: list[tuple[str, int | None]] = field(default_factory=list)

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        for generator in self.generators:
            generator.manual_seed(seed)


# The action of this thread; two of an overlapped pair run in two threads.
_running: ContextVar[_Running | None] = ContextVar("penstock_random", default=None)


class LayerRandom:
    """The seeding of torch's generators for every layer that this process runs."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._step = 0
        # The call number of a layer at this position, kept only where it is not the first.
        self._later_calls: dict[tuple[str, int], int] = {}

    def begin_step(self, step: int) -> None:
        """Draw the numbers of this step from now on."""
        self._step = step
        self._later_calls.clear()

    def observe(self, module: KnowsLayers) -> None:
        """Give each layer of this module a stream of its own."""
        module.announce_layers(self._enter, self._leave)

    @contextmanager
    def running(
        self, name: str | None, microbatch: int, *, is_training: bool, is_forward: bool
    ) -> Iterator[None]:
        """Draw from our streams while one action runs, then from the user's again.

        Work with a name is one layer as a whole.
        """
        generators = find_generators(self._device)
        states = [(generator, generator.get_state()) for generator in generators]
        key = (self._seed, "step" if is_training else "eval", self._step, microbatch)
        running = _Running(self, generators, key, is_forward)
        if name is None:
            running.seed(stream_seed(*key, "between", "", 0))
        else:
            running.seed(_INSIDE | stream_seed(*key, name, 0))
        token = _running.set(running)
        try:
            yield
        finally:
            _running.reset(token)
            for generator, state in states:
                generator.set_state(state)

    def _own(self) -> _Running | None:
        """Return the action of this thread, if it draws from these streams."""
        running = _running.get()
        return running if running is not None and running.owner is self else None

    def _enter(self, name: str) -> None:
        running = self._own()
        if running is None:
            return
        place = torch.default_generator.initial_seed()
        if place & _INSIDE:
            # A layer inside another one draws from the outer stream.
            running.entered.append((name, None))
            return
        call = self._number(running, name, place)
        running.entered.append((name, call))
        running.seed(_INSIDE | stream_seed(*running.key, name, call))

    def _number(self, running: _Running, name: str, place: int) -> int:
        """Count the earlier calls of this layer; a repeated run is recognised by its position."""
        if not running.is_forward:
            return self._later_calls.get((name, place), 0)
        call = running.calls[name]
        running.calls[name] += 1
        if call:
            self._later_calls[name, place] = call
        return call

    def _leave(self, name: str) -> None:
        running = self._own()
        if running is None:
            return
        # Compiled code that stops halfway through a repeated run never calls `leave`.
        while running.entered:
            entered, call = running.entered.pop()
            if entered == name:
                if call is not None:
                    running.seed(stream_seed(*running.key, "between", name, call + 1))
                return


def find_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that modules on a device draw from: the host's and its own."""
    if device.type != "cuda":
        return [torch.default_generator]
    # A tensor knows which device is meant by "cuda" alone.
    index = torch.empty(0, device=device).device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


class StageRandom:
    """The random numbers of one stage: of its layers, or of the stage as a whole.

    A stage that knows no layers draws from one stream, named after its part of the model.
    """

    def __init__(self, random: LayerRandom, module: nn.Module, part: int) -> None:
        self._random = random
        self._name = None if isinstance(module, KnowsLayers) else f"stage {part}"

    def forward(self, microbatch: int, *, is_training: bool) -> AbstractContextManager[None]:
        """Seed a forward."""
        return self._random.running(
            self._name, microbatch, is_training=is_training, is_forward=True
        )

    def backward(self, microbatch: int) -> AbstractContextManager[None]:
        """Seed a backward, which may run forwards again."""
        return self._random.running(self._name, microbatch, is_training=True, is_forward=False)

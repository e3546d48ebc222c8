"""Random numbers that depend on seed, step, microbatch and layer, and on nothing else.

    between    layers.0    between    layers.1    between        torch's generators are seeded
    ---------|===========|----------|===========|---------       at every bar

The seed of each stretch is a hash of what it belongs to, so that it does not matter which rank
runs it, what ran before, or whether it runs again in the backward. Around each piece of work the
user's own generators are put away and given back.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import nn

__all__ = ["KnowsLayers", "LayerRandom", "StageRandom", "stream_seed"]

# The highest bit of a seed tells a layer's own stream from those between layers; a generator
# keeps its seed in its state, so that a layer that is run again can tell where it is called.
_INSIDE = 1 << 63


@runtime_checkable
class KnowsLayers(Protocol):
    """A stage module that knows the layers of the whole model by names."""

    def announce_layers(self, enter: Callable[[str], None], leave: Callable[[str], None]) -> None:
        """Call `enter` before each layer and `leave` after it, with its name.

        The layers of other stages are announced too, in the model's order.
        """


def stream_seed(*key: int | str) -> int:
    """The seed of a stream of random numbers: the BLAKE2b hash of its key as JSON, 63 bits.

    >>> stream_seed(1234, "step", 0, 0, "layers.0", 0)
    233153272701390205
    """
    digest = blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & ~_INSIDE


class LayerRandom:
    """Seeds torch's generators for every layer that a pipeline runs in this process."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._step = 0
        self._is_active = False
        self._generators: list[torch.Generator] = []
        # What all streams of the piece of work that is running have in common.
        self._key: tuple[int | str, ...] = ()
        self._is_forward = False
        self._calls: Counter[str] = Counter()
        # Which call of a layer it is that was made from here; told only where it is not the first.
        self._later_calls: dict[tuple[str, int], int] = {}
        self._entered: list[tuple[str, int | None]] = []

    def begin_step(self, step: int) -> None:
        """From now on draw the numbers of this step."""
        self._step = step
        self._later_calls.clear()

    def watch(self, module: KnowsLayers) -> None:
        """Give each layer of this module a stream of its own."""
        module.announce_layers(self._enter, self._leave)

    @contextmanager
    def running(
        self, name: str | None, microbatch: int, *, is_training: bool, is_forward: bool
    ) -> Iterator[None]:
        """Draw from our streams while one piece of work runs, then from the user's again.

        Work with a name is one layer as a whole.
        """
        self._generators = _find_generators(self._device)
        states = [(generator, generator.get_state()) for generator in self._generators]
        self._key = (self._seed, "step" if is_training else "eval", self._step, microbatch)
        self._is_forward = is_forward
        self._calls.clear()
        self._entered.clear()
        if name is None:
            self._seed_all(stream_seed(*self._key, "between", "", 0))
        else:
            self._seed_all(_INSIDE | stream_seed(*self._key, name, 0))
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False
            self._generators = []
            for generator, state in states:
                generator.set_state(state)

    def _enter(self, name: str) -> None:
        if not self._is_active:
            return
        place = torch.default_generator.initial_seed()
        if place & _INSIDE:
            # A layer inside another draws from that one's stream.
            self._entered.append((name, None))
            return
        call = self._number(name, place)
        self._entered.append((name, call))
        self._seed_all(_INSIDE | stream_seed(*self._key, name, call))

    def _number(self, name: str, place: int) -> int:
        """How many calls of this layer came before; a layer run again is known by its place."""
        if not self._is_forward:
            return self._later_calls.get((name, place), 0)
        call = self._calls[name]
        self._calls[name] += 1
        if call:
            self._later_calls[name, place] = call
        return call

    def _leave(self, name: str) -> None:
        if not self._is_active:
            return
        # Compiled code that stops half-way while it is run again is never left.
        while self._entered:
            entered, call = self._entered.pop()
            if entered == name:
                if call is not None:
                    self._seed_all(stream_seed(*self._key, "between", name, call + 1))
                return

    def _seed_all(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def _find_generators(device: torch.device) -> list[torch.Generator]:
    """Those that modules on a device draw from: the host's, and the device's own."""
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
        """Around a forward."""
        return self._random.running(
            self._name, microbatch, is_training=is_training, is_forward=True
        )

    def backward(self, microbatch: int) -> AbstractContextManager[None]:
        """Around a backward, which may run forwards again."""
        return self._random.running(self._name, microbatch, is_training=True, is_forward=False)

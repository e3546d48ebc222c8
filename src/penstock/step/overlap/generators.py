"""The random numbers of overlapped actions: each draws what it would draw if it ran alone.

One member continues the user's stream, as if it were the only one. Each of the others begins a
stream of its own, whose seed is a hash of where the user's stream was. Backwards draw nothing,
as a rule; a checkpoint that runs a forward again sets the state that the forward had.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch

__all__ = ["MemberGenerators"]


class MemberGenerators:
    """The states of torch's generators, of every member that does not run now."""

    def __init__(self, generators: Sequence[torch.Generator], *, members: int, main: int) -> None:
        """`main` is the member that continues the user's streams."""
        self._generators = generators
        self._main = main
        self._states: list[Sequence[torch.Tensor]] = [()] * members

    def begin(self) -> None:
        """Begin a stream for each member; member 0 runs first."""
        given = [generator.get_state() for generator in self._generators]
        for member in range(len(self._states)):
            self._states[member] = given if member == self._main else self._branch(given, member)
        if self._main != 0:
            self._load(0)

    def switch(self, member: int, following: int) -> None:
        """Put one member's states away, and load another's."""
        self._states[member] = [generator.get_state() for generator in self._generators]
        self._load(following)

    def end(self) -> None:
        """Continue the user's streams; member 0 has run last."""
        if self._main != 0:
            self._load(self._main)

    def _load(self, member: int) -> None:
        for generator, state in zip(self._generators, self._states[member], strict=True):
            generator.set_state(state)

    def _branch(self, given: Sequence[torch.Tensor], member: int) -> list[torch.Tensor]:
        branched = []
        for generator, state in zip(self._generators, given, strict=True):
            place = blake2b(state.numpy().tobytes(), digest_size=8, salt=bytes([member % 256]))
            own = torch.Generator(generator.device)
            branched.append(
                own.manual_seed(int.from_bytes(place.digest(), "big") >> 1).get_state()
            )
        return branched

"""A text that ships with the package, letter by letter, in batches for the next-letter game."""

from dataclasses import dataclass
from importlib.resources import files

import torch

__all__ = ["Batch", "Letters", "load_text", "sample_batch"]


@dataclass(frozen=True, slots=True)
class Letters:
    """The letters of a text, numbered in order.

    >>> letters = Letters.of("banana")
    >>> letters.encode("nab"), letters.decode([2, 0, 1])
    ([2, 0, 1], 'nab')
    """

    known: str

    @classmethod
    def of(cls, text: str) -> "Letters":
        """Every letter that a text holds."""
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.known)

    def encode(self, text: str) -> list[int]:
        """The numbers of the letters of a text."""
        number = {letter: index for index, letter in enumerate(self.known)}
        return [number[letter] for letter in text]

    def decode(self, numbers: list[int]) -> str:
        """The letters with these numbers."""
        return "".join(self.known[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of a text as rows of numbers, and the same one letter further on."""

    tokens: torch.Tensor
    target: torch.Tensor


def load_text() -> str:
    """The text: eleven short chapters about a river and what was built along it."""
    return files("penstock.examples").joinpath("river.txt").read_text(encoding="utf-8")


def sample_batch(numbers: torch.Tensor, *, rows: int, length: int, seed: int) -> Batch:
    """Random pieces of a text; the same seed gives the same pieces on every rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(numbers) - length, (rows, 1), generator=generator)
    places = starts + torch.arange(length + 1)
    pieces = numbers[places]
    return Batch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())

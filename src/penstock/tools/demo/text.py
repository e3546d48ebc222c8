"""A text that ships with the package, word by word, in batches for the next-word game."""

import re
from dataclasses import dataclass
from importlib.resources import files

import torch

__all__ = ["TextBatch", "Words", "load_text", "sample_batch"]


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text, numbered in order: with the space before them; signs by themselves.

    >>> words = Words.of("the mill, the wheel")
    >>> words.known
    (' mill', ' the', ' wheel', ',', 'the')
    >>> words.encode("the wheel, the mill")
    [4, 2, 3, 1, 0]
    """

    known: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Words":
        """Every word that a text holds."""
        return cls(tuple(sorted(set(_split(text)))))

    def __len__(self) -> int:
        return len(self.known)

    def encode(self, text: str) -> list[int]:
        """The numbers of the words of a text."""
        number = {word: index for index, word in enumerate(self.known)}
        return [number[word] for word in _split(text)]

    def decode(self, numbers: list[int]) -> str:
        """The words with these numbers, as a text."""
        return "".join(self.known[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Pieces of a text as rows of numbers, and the same one word further on."""

    tokens: torch.Tensor
    target: torch.Tensor


def load_text() -> str:
    """The text: eleven short chapters about a river and what was built along it."""
    return files("penstock.tools.demo").joinpath("river.txt").read_text(encoding="utf-8")


def sample_batch(numbers: torch.Tensor, *, rows: int, length: int, seed: int) -> TextBatch:
    """Random pieces of a text; the same seed gives the same pieces on every rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(numbers) - length, (rows, 1), generator=generator)
    places = starts + torch.arange(length + 1)
    pieces = numbers[places]
    return TextBatch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


def _split(text: str) -> list[str]:
    return re.findall(r" ?\w+|\W", text)

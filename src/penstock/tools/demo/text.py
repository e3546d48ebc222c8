"""A text that ships with the package, word by word, in batches for next-word prediction."""

import re
from dataclasses import dataclass
from importlib.resources import files

import torch

__all__ = ["TextBatch", "Words", "load_text", "sample_batch"]


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text in order, each with the space before it; signs are words of their own.

    >>> words = Words.of("the mill, the wheel")
    >>> words.known
    (' mill', ' the', ' wheel', ',', 'the')
    >>> words.encode("the wheel, the mill")
    [4, 2, 3, 1, 0]
    """

    known: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Words":
        """Return every word of a text."""
        return cls(tuple(sorted(set(_split(text)))))

    def __len__(self) -> int:
        return len(self.known)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the words of a text."""
        number = {word: index for index, word in enumerate(self.known)}
        return [number[word] for word in _split(text)]

    def decode(self, numbers: list[int]) -> str:
        """Return the text of these numbers."""
        return "".join(self.known[number] for number in numbers)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Pieces of a text as rows of numbers, and the same pieces shifted by one word."""

    tokens: torch.Tensor
    target: torch.Tensor


def load_text() -> str:
    """Return the text: eleven short chapters about a river and what was built along it."""
    return files("penstock.tools.demo").joinpath("river.txt").read_text(encoding="utf-8")


def sample_batch(numbers: torch.Tensor, *, rows: int, length: int, seed: int) -> TextBatch:
    """Return random pieces of a text; the same seed gives the same pieces on every rank."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(numbers) - length, (rows, 1), generator=generator)
    pieces = numbers[starts + torch.arange(length + 1)]
    return TextBatch(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


def _split(text: str) -> list[str]:
    return re.findall(r" ?\w+|\W", text)

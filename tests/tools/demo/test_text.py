"""The text that ships with the package, and batches of it."""

import pytest

pytest.importorskip("torch")

import torch

from penstock.tools.demo.text import Words, load_text, sample_batch


def test_text_is_ascii() -> None:
    text = load_text()
    assert 20_000 < len(text) < 40_000
    assert text.isascii()
    assert text.startswith("THE WATER AND THE WHEEL\n")


def test_words_decode_to_the_text() -> None:
    text = load_text()
    words = Words.of(text)
    numbers = words.encode(text)
    assert set(numbers) == set(range(len(words)))
    assert words.decode(numbers) == text


def test_target_is_shifted_by_one_word() -> None:
    batch = sample_batch(torch.arange(50), rows=4, length=6, seed=3)
    assert batch.tokens.shape == batch.target.shape == (4, 6)
    assert torch.equal(batch.target, batch.tokens + 1)


def test_seed_decides_which_pieces_are_drawn() -> None:
    numbers = torch.arange(1000)
    one, same, other = (sample_batch(numbers, rows=4, length=6, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.tokens, same.tokens)
    assert not torch.equal(one.tokens, other.tokens)


def test_every_piece_can_be_drawn() -> None:
    batch = sample_batch(torch.arange(4), rows=200, length=2, seed=0)
    assert set(batch.tokens[:, 0].tolist()) == {0, 1}

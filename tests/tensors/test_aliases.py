"""Microbatches share the memory of their batch, but not its version counter."""

import torch

from penstock.tensors.aliases import Aliases


def test_writing_to_a_part_writes_to_the_whole_but_leaves_other_parts_at_their_version() -> None:
    # Views share one version counter; autograd then refuses what it saved of other parts.
    whole = torch.zeros(4, 2)
    first, second = Aliases().split(whole, [2, 2], 0)
    first.add_(1)
    assert whole.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert (first._version, second._version, whole._version) == (1, 0, 0)


def test_arguments_that_share_memory_share_a_version_within_a_microbatch() -> None:
    # Otherwise writing to one would go unnoticed by what autograd saved of the other.
    whole, aliases = torch.zeros(4, 3), Aliases()
    tokens = aliases.split(whole[:, :-1], [2, 2], 0)
    labels = aliases.split(whole[:, 1:], [2, 2], 0)
    tokens[0].add_(1)
    assert [part._version for part in (*tokens, *labels)] == [1, 0, 1, 0]
    assert labels[0].tolist() == [[1, 0], [1, 0]]
    assert labels[1].shape == (2, 2)


def test_parts_of_a_tensor_that_requires_a_gradient_are_views() -> None:
    whole = torch.zeros(4, requires_grad=True)
    first, second = Aliases().split(whole, [2, 2], 0)
    torch.autograd.backward(first.sum() + 2 * second.sum())
    assert whole.grad is not None
    assert whole.grad.tolist() == [1, 1, 2, 2]


def test_parts_along_another_dimension_and_of_other_types_are_right() -> None:
    whole = torch.arange(12).reshape(3, 4)
    parts = Aliases().split(whole.T, [1, 3], 0)
    assert [part.tolist() for part in parts] == [
        [[0, 4, 8]],
        [[1, 5, 9], [2, 6, 10], [3, 7, 11]],
    ]
    conjugate = torch.tensor([1j, 2j, 3j]).conj()
    twice = [Aliases(), Aliases()]
    assert [p.tolist() for p in twice[0].split(conjugate, [1, 2], 0)] == [[-1j], [-2j, -3j]]
    with torch.inference_mode():
        assert [p.tolist() for p in twice[1].split(torch.ones(2), [1, 1], 0)] == [[1], [1]]

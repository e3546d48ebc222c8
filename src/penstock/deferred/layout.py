"""The gradient of a product's input, in the memory layout that autograd gives it.

Autograd gives the gradient of a matrix that lies in memory by columns the same layout. Numbers
depend on it: torch's batch norm on a CPU has wrong gradients where its input and the gradient of
its output lie in different orders, so a model that is right by itself would be wrong here.
"""

import torch

__all__ = ["as_matrix", "lies_by_columns", "multiply_by_columns"]


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor of any number of dimensions."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def lies_by_columns(value: torch.Tensor) -> bool:
    """Return whether the rows of a tensor lie in memory as columns.

    >>> lies_by_columns(torch.ones(2, 3).t()), lies_by_columns(torch.ones(2, 3))
    (True, False)
    """
    return not value.is_contiguous() and value.movedim(-1, 0).is_contiguous()


def multiply_by_columns(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `gradient @ factor` with its rows as columns.

    >>> gradient, factor = torch.randn(2, 4, 3), torch.randn(3, 5)
    >>> product = multiply_by_columns(gradient, factor)
    >>> torch.testing.assert_close(product, gradient @ factor)
    >>> lies_by_columns(product)
    True
    """
    product = factor.t().mm(as_matrix(gradient).t()).t()
    return product.view(*gradient.shape[:-1], factor.shape[1])

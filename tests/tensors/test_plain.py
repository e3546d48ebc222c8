"""Lazy tensors get their values, special tensors are refused, plain ones stay unchanged."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from penstock.errors import BoundaryError
from penstock.parallel.replica import replica_of
from penstock.ranks.transport import LocalTransport, Message
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet
from penstock.tensors.plain import dense_value, plain_value


def test_a_plain_tensor_is_returned_itself() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert plain_value(tensor) is tensor


@pytest.mark.parametrize(
    "lazy",
    [
        torch.tensor([[1 + 2j, 3 - 1j]]).conj(),
        torch._neg_view(torch.arange(4.0).reshape(2, 2)),
        torch.tensor([[1 + 2j], [3 - 1j]]).conj().imag,
        torch.tensor([[1 + 2j, 3 - 1j]]).conj().T,
    ],
    ids=["conjugate", "negative", "imaginary part", "conjugate and transposed"],
)
def test_a_lazy_tensor_gets_its_values(lazy: torch.Tensor) -> None:
    for value in (plain_value(lazy), dense_value(lazy)):
        assert not value.is_conj()
        assert not value.is_neg()
        assert torch.equal(value, lazy)
    assert dense_value(lazy).is_contiguous()


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.eye(3)[:1].expand(3, 3), torch.ones(2, 3, 4, 5)],
    ids=["sparse", "expanded", "plain"],
)
def test_a_dense_value_is_contiguous(tensor: torch.Tensor) -> None:
    value = dense_value(tensor)
    assert value.is_contiguous()
    assert torch.equal(value, tensor.to_dense())


class _Subclass(torch.Tensor):
    pass


class Returns(nn.Module):
    """Returns whatever its function makes."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self) -> torch.Tensor:
        return self.make()


def depart(make: Callable[[], torch.Tensor]) -> Packet:
    stage = Stage(2, module := Returns(make), replica_of(module))
    return stage.depart(0, stage.evaluate(0, [], (), {}), [3])[0]


def make_jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def make_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: torch.eye(2).to_sparse(),
            "dense tensors (got the layout torch.sparse_coo); return .to_dense()",
        ),
        (
            lambda: torch.eye(2).to_mkldnn(),
            "dense tensors (got the layout torch._mkldnn); return .to_dense()",
        ),
        (
            make_jagged,
            "plain tensors (got a nested one, layout torch.jagged); return "
            ".to_padded_tensor(0.0), or its values and lengths",
        ),
        (
            lambda: torch.ones(2, device="meta"),
            "tensors with values (got one on the meta device); put the model on a real device, "
            "for example with pipe.materialize",
        ),
        (
            lambda: torch.ones(2).as_subclass(_Subclass),
            "plain tensors (got a _Subclass); return .as_subclass(torch.Tensor), or the tensors "
            "that it is made of",
        ),
    ],
)
def test_special_tensors_are_refused(make: Callable[[], torch.Tensor], reason: str) -> None:
    with pytest.raises(BoundaryError) as caught:
        depart(make)
    assert str(caught.value) == f"stage 2 must give part 3 {reason}"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(BoundaryError, match=r"got a quantized one, .*; return \.dequantize\(\)"):
        depart(make_quantized)


def test_a_parameter_may_be_returned_as_output() -> None:
    (tensor,) = depart(lambda: nn.Parameter(torch.ones(2))).tensors
    assert type(tensor) is torch.Tensor
    assert tensor.requires_grad


def test_ranks_in_one_process_copy_values_too() -> None:
    # A copy kept the bit of a lazy negation, so the receiver negated its values once more.
    transport, message = LocalTransport(2), Message(True, 0, 0, 0, 1)
    lazy = torch.tensor([1 + 2j]).conj().imag.requires_grad_()
    transport.send(message, Packet("T", [lazy]))
    (found,) = transport.receive(message).tensors
    assert (found.is_neg(), found.requires_grad, found.tolist()) == (False, True, [-2.0])

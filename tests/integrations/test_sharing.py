"""A value of one process on all of them, in real processes, without pickling."""

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PipelineError
from penstock.integrations.sharing import share
from tests.processes import Processes


@dataclass
class Output:
    logits: torch.Tensor
    names: list[str]
    states: Any = None


class Pair(NamedTuple):
    first: Any
    second: Any


def fail_to_unpickle(*_: object, **__: object) -> None:
    raise AssertionError("nothing that a process sends is unpickled")


def make_output() -> Output:
    dtypes = (torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.float64)
    states = Pair(
        {str(dtype): torch.arange(6).reshape(2, 3).t().to(dtype) for dtype in dtypes},
        (torch.tensor(3.5), torch.empty(0, 4), None, 0.1),
    )
    return Output(torch.randn(2, 3, requires_grad=True), ["a", "b"], states)


def share_output(rank: int, source: int) -> bytes:
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "loads", fail_to_unpickle)
        patch.setattr("torch.distributed.distributed_c10d._unpickler", fail_to_unpickle)
        found = share(make_output, "outputs", source=source)
    assert isinstance(found, Output)
    assert isinstance(found.states, Pair)
    return pickle.dumps(found)


@pytest.mark.parametrize("source", [0, 1])
def test_every_process_has_the_value_of_one(two_processes: Processes, source: int) -> None:
    torch.manual_seed(source)
    expected = make_output()
    # Other processes have tensors without a graph.
    expected.logits = expected.logits.detach()
    for data in two_processes.run(share_output, source):
        found = pickle.loads(data)
        assert found.names == expected.names
        assert found.states.second[2:] == (None, 0.1)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)
        for key, tensor in expected.states.first.items():
            assert found.states.first[key].dtype is tensor.dtype
            assert torch.equal(found.states.first[key], tensor)
        assert found.states.second[0].item() == 3.5
        assert found.states.second[1].shape == (0, 4)


def fail() -> Any:
    raise KeyError("logits")


class Unknown:
    """A class of no kind that can travel."""


def nested() -> Any:
    return {"hidden": [torch.ones(2), Unknown()]}


def make_empty_output() -> Any:
    return Output(torch.ones(1), [])


def share_and_catch(rank: int, make: Any, unknown_on: tuple[int, ...]) -> str:
    hidden = globals().pop("Output") if rank in unknown_on else None
    try:
        with pytest.raises(PipelineError) as caught:
            share(make, "outputs")
    finally:
        if hidden is not None:
            globals()["Output"] = hidden
    # Nothing of the failed exchange is left for the next one.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    assert share(lambda: "next", "a word", source=1) == "next"
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "unknown_on", "message"),
    [
        (fail, (), "process 0 cannot share outputs: KeyError: 'logits'"),
        (
            nested,
            (),
            "process 0 cannot share outputs: outputs['hidden'][1] must be a tensor, number, "
            "string or None, or a list, tuple, dict, named tuple or dataclass of them (got "
            "Unknown); return one of these",
        ),
        (
            make_empty_output,
            (1,),
            "process 1 cannot share outputs: a value of another process must be of a class that "
            f"this one has imported (got {__name__}.Output); import it in every process",
        ),
    ],
)
def test_an_error_of_any_process_is_the_same_error_on_all(
    two_processes: Processes, make: Any, unknown_on: tuple[int, ...], message: str
) -> None:
    # A process whose value could not be made left the others waiting for it.
    assert two_processes.run(share_and_catch, make, unknown_on) == [message, message]

"""Outputs of microbatches, put together as what the model returns."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from penstock.errors import BatchError, BoundaryError
from penstock.loss.weigher import Share
from penstock.step.microbatches import merge_outputs
from penstock.step.outputs import KeptOutput, keep_output

Extremes = namedtuple("Extremes", ["low", "high"])


class Pair(NamedTuple):
    """A named tuple with a type of its own."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be changed, and makes something of what it is given."""

    states: Any
    count: int = field(default=0, init=False)
    loss: Any = None


ONE, TWO = torch.ones(1, 2), torch.zeros(2, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: Pair(tensor, [tensor]),
        lambda tensor: Extremes(tensor, None),
        lambda tensor: Frozen(tensor),
        lambda tensor: OrderedDict(states=tensor, name="a"),
        lambda tensor: CausalLMOutputWithPast(logits=tensor, hidden_states=(tensor, tensor)),
        lambda tensor: torch.max(tensor, dim=1),
        lambda tensor: {"inner": Pair(tensor, Frozen(tensor))},
    ],
    ids=["typed", "named", "frozen", "ordered", "transformers", "of torch", "nested"],
)
def test_outputs_keep_the_classes_of_the_model(make: Any) -> None:
    # They went through plain data, as if to another rank, and came back as dicts and tuples.
    merged = merge_outputs([keep_output(make(part), None, Share(0.5)) for part in (ONE, TWO)])
    expected = make(torch.cat([ONE, TWO]))
    assert type(merged) is type(expected)
    assert str(merged) == str(expected)


def causal(logits: Any) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits)


def test_a_field_without_a_value_stays_without_one() -> None:
    kept = [keep_output(causal(part), None, Share(1.0)) for part in (ONE, TWO)]
    merged = merge_outputs(kept)
    assert (merged.loss, merged.past_key_values, list(merged)) == (None, None, ["logits"])
    assert merged.logits.shape == (3, 2)


def output(loss: float, extra: float) -> dict[str, Any]:
    return {
        "loss": torch.tensor(loss),
        "aux_loss": torch.tensor(loss),
        "extra": torch.tensor(extra),
        "rows": torch.full((1,), extra),
    }


def test_losses_are_weighed_and_added_and_other_single_numbers_are_stacked() -> None:
    kept = [
        keep_output(output(2.0, 1.0), None, Share(0.25)),
        keep_output(output(4.0, 5.0), None, Share(0.75)),
    ]
    merged = {name: value.tolist() for name, value in merge_outputs(kept).items()}
    assert merged == {"loss": 3.5, "aux_loss": 3.5, "extra": [1.0, 5.0], "rows": [1.0, 5.0]}


def test_the_loss_of_the_step_is_known_by_what_it_is() -> None:
    losses = [torch.tensor(2.0), torch.tensor(4.0)]
    kept = [keep_output((loss, ONE), loss, Share(0.5)) for loss in losses]
    assert merge_outputs(kept)[0].item() == 3.0
    assert merge_outputs([keep_output(loss, loss, Share(1.0)) for loss in losses]).item() == 6.0


def test_a_loss_over_nothing_counts_for_nothing() -> None:
    kept = [
        keep_output(output(float("nan"), 1.0), None, Share(0.0)),
        keep_output(output(4.0, 5.0), None, Share(1.0)),
    ]
    assert merge_outputs(kept)["loss"].item() == 4.0
    assert merge_outputs(kept[:1])["loss"].item() == 0.0


def test_a_reducer_gets_losses_too() -> None:
    kept = [keep_output(output(2.0, 1.0), None, Share(0.25))] * 2
    assert merge_outputs(kept, lambda tensors: tensors[0])["loss"].item() == 2.0


def test_kept_outputs_have_no_graph() -> None:
    x = torch.ones(1, requires_grad=True)
    kept = keep_output(Frozen(x * 2), None, Share(1.0))
    assert isinstance(kept, KeptOutput)
    assert not kept.value.states.requires_grad


def test_what_cannot_be_put_together_is_refused_by_name() -> None:
    with pytest.raises(BoundaryError, match="the model's output has a object, of which"):
        keep_output({"cache": object()}, None, Share(1.0))
    with pytest.raises(BatchError, match="differ in structure or constants"):
        merge_outputs([Frozen(ONE, ONE), Frozen(ONE)])

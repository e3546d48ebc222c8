"""What `transformers` collects from layers by hooks: hidden states, router logits, features."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

import penstock as ps
from penstock.errors import ModelError
from penstock.splitting.by_layers.layers import split_layers
from tests.processes import Processes
from tests.splitting import zoo
from tests.splitting.checking import assert_same_gradients
from tests.splitting.zoo import ZOO

TOWERS = ["model.vision_tower.encoder.layers", "model.language_model.layers"]
STATES = replace(
    ZOO["Llama"],
    inputs=lambda: {**zoo.words(), **zoo.padding(), "output_hidden_states": True},
)


def test_hidden_states_are_collected_over_all_stages() -> None:
    example = STATES.build()
    pipe = split_layers(example.model, example.lists, 4, (), example.kwargs)
    expected, found = example.model(**example.kwargs), pipe(**example.kwargs)
    assert len(found.hidden_states) == 5
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("has_example", [False, True])
def test_hidden_states_that_the_example_did_not_ask_for_are_refused(
    has_example: bool, has_run: bool
) -> None:
    # After the model had run once it had its hooks, and stages had none for the layers of
    # others: 3 of 5 states, and no error.
    example = STATES.build()
    if has_run:
        example.model(**example.kwargs)
    plain = {name: value for name, value in example.kwargs.items() if "output" not in name}
    pipe = split_layers(example.model, example.lists, 2, *(((), plain) if has_example else ()))
    pipe(**plain)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"depends on what 'model\.embed_tokens' returned"):
            pipe(**example.kwargs)
    assert len(example.model(**example.kwargs).hidden_states) == 5


@pytest.mark.parametrize(("stages", "feature"), [([2, 6], 1), (4, -2)])
def test_features_of_a_layer_of_the_first_tower_are_right(
    stages: list[int] | int, feature: int
) -> None:
    # The state of that index was another layer's where both towers were cut: logits off by 0.15.
    example = ZOO["LLaVA"].build()
    given = {**example.kwargs, "vision_feature_layer": feature}
    pipe = ps.split(example.model, layers=TOWERS, stages=stages, example_kwargs=given)
    assert torch.equal(pipe(**given).logits, example.model(**given).logits)
    schedules = ("1F1B",) if isinstance(stages, list) else ("ZBV",)
    assert_same_gradients(example.model, pipe, (), given, schedules=schedules)


def dpt() -> tuple[Any, torch.Tensor]:
    config = hf.DPTConfig(
        **{k: v for k, v in zoo.SIZES.items() if k != "vocab_size"},
        **zoo.NO_DROPOUT,
        image_size=16,
        patch_size=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        use_batch_norm_in_fusion_residual=False,
    )
    torch.manual_seed(0)
    kind: Any = hf.DPTForDepthEstimation
    return kind(config).double().eval(), zoo.signal("pixel_values", 3, 16, 16)[
        "pixel_values"
    ].double()


class Depth(nn.Module):
    """Calls another model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        depth: torch.Tensor = self.model(pixels).predicted_depth
        return depth


def test_features_of_all_layers_are_refused_or_right() -> None:
    # A list that was too short gave a bare IndexError or ValueError.
    model, pixels = dpt()
    pipe = ps.split(model, layers="dpt.encoder.layer", stages=4, example=[pixels])
    expected = model(pixels).predicted_depth
    assert torch.equal(pipe(pixels).predicted_depth, expected)
    # It says by itself that it takes pictures; what calls it does not.
    own = ps.split(model, layers="dpt.encoder.layer", stages=4)
    assert torch.equal(own(pixels).predicted_depth, expected)
    caller = Depth(model)
    pipe = ps.split(caller, layers="model.dpt.encoder.layer", stages=4)
    with pytest.raises(ModelError, match=r"what 'model\.dpt\.encoder\.layer\.0', .* returned"):
        pipe(pixels)


IDS = torch.arange(4 * 8).reshape(4, 8) * 7 % 19


def mixtral() -> Any:
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        **zoo.EXPERTS, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    kind: Any = hf.MixtralForCausalLM
    return kind(config).double()


def router_reference(microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Run the unsplit model on one microbatch after the other.

    The auxiliary loss is a product of means over tokens, so it differs from that of the whole
    batch; with one microbatch this is the model on the batch.
    """
    model, total = mixtral(), 0.0
    for part in IDS.chunk(microbatches):
        loss = model(part, labels=part).loss / microbatches
        torch.autograd.backward(loss)
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_router_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # The auxiliary loss is computed in float32, whatever the model is.
        assert (found[name] - gradient).abs().max().item() <= 1e-9, name


@pytest.mark.parametrize("has_example", [True, False], ids=["example", "none"])
@pytest.mark.parametrize(
    ("stages", "schedule", "microbatches"),
    [
        (2, "1F1B", 1),
        (2, "ZBV", 2),
        (4, "1F1B", 4),
        (4, "ZBV", 1),
    ],
)
def test_router_losses_over_all_layers_have_the_models_gradients(
    stages: int, schedule: str, microbatches: int, has_example: bool
) -> None:
    # Router logits are collected by hooks on a part of each layer, and were refused. The model's
    # own example was left out, since tokens per expert could not be counted on the meta device.
    model = mixtral()
    example, labels = ([IDS[:2]], {"labels": IDS[:2]}) if has_example else (None, None)
    pipe = ps.split(
        model, layers="model.layers", stages=stages, example=example, example_kwargs=labels
    )
    pipeline = ps.Pipeline(pipe, schedule, microbatches=microbatches, loss=ps.find_loss)
    result = pipeline.step(IDS, labels=IDS, return_outputs=True)
    loss, expected = router_reference(microbatches)
    assert result.loss == pytest.approx(loss, abs=1e-9)
    assert result.outputs.loss.item() == pytest.approx(loss, abs=1e-6)
    assert len(result.outputs.router_logits) == 4
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_router_gradients(found, expected)


def train_mixtral(_rank: int, schedule: str) -> tuple[float | None, dict[str, torch.Tensor]]:
    """Router losses over two ranks."""
    stages = 4 if schedule == "ZBV" else 2
    pipe = ps.split(
        mixtral(),
        layers="model.layers",
        stages=stages,
        example=[IDS[:2]],
        example_kwargs={"labels": IDS[:2]},
    )
    pipeline = ps.Pipeline(
        pipe, schedule, microbatches=2, loss=ps.find_loss, group=dist.group.WORLD
    )
    loss = pipeline.step(IDS, labels=IDS).loss
    return loss, {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_router_losses_are_sent_between_processes(two_processes: Processes, schedule: str) -> None:
    loss, expected = router_reference(2)
    found: dict[str, torch.Tensor] = {}
    for told, held in two_processes.run(train_mixtral, schedule):
        assert told == pytest.approx(loss, abs=1e-9)
        found.update(held)
    assert_router_gradients(found, expected)

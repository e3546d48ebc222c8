"""What models of diffusers say they take: noise, steps, and words that another model embedded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.splitting.by_layers.example.diffusion_inputs import diffusion_examples
from tests.splitting.checking import assert_same_gradients
from tests.splitting.small import WIDTH, Block, Chain


class Denoiser(nn.Module):
    """Adds embedded steps to tokens of noise in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(in_channels=6, joint_attention_dim=5, sample_size=4)
        self.inward = nn.Linear(6, WIDTH, dtype=torch.float64)
        self.steps = nn.Linear(1, WIDTH, dtype=torch.float64)
        self.words = nn.Linear(5, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        class_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert class_labels is None
        if hidden_states.ndim != 3:
            raise ValueError("tokens are needed")
        steps = self.steps(timestep[:, None].to(hidden_states.dtype))[:, None]
        x: torch.Tensor = self.inward(hidden_states)
        x = x + self.words(encoder_hidden_states).sum(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, steps)
        return x


def test_noise_comes_in_all_forms_with_what_is_beside_it() -> None:
    shapes = [
        {name: tuple(value.shape) for name, value in one.items()}
        for one in diffusion_examples(Denoiser())
    ]
    beside = {"timestep": (2,), "encoder_hidden_states": (2, 6, 5)}
    assert shapes == [
        {"hidden_states": shape, **beside}
        for shape in ((2, 6, 4, 4), (2, 6, 2, 4, 4), (2, 2, 6, 4, 4), (2, 16, 6))
    ]


def test_a_model_without_steps_has_no_example() -> None:
    assert list(diffusion_examples(Chain())) == []


def test_embedded_steps_are_sent_without_an_example() -> None:
    # The first step said that later stages need them, not the split.
    torch.manual_seed(0)
    model, generator = Denoiser(), torch.Generator().manual_seed(1)
    noise = torch.randn(8, 3, 6, dtype=torch.float64, generator=generator)
    words = torch.randn(8, 2, 5, dtype=torch.float64, generator=generator)
    pipe = ps.split(model, stages=4)
    assert_same_gradients(model, pipe, (noise, torch.arange(8), words))


@pytest.mark.parametrize("name", ["num_embeds_ada_norm", "num_class_embeds"])
def test_a_model_with_classes_gets_labels(name: str) -> None:
    model: Any = Denoiser()
    setattr(model.config, name, 3)
    assert all(one["class_labels"].tolist() == [0, 0] for one in diffusion_examples(model))

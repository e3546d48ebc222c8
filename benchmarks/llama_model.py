"""A Llama of Hugging Face cut into stages, with two ways to train it: Penstock and torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.nn.functional as F  # noqa: N812  # torch's own custom
import transformers
from torch import nn
from transformers.utils import logging

import penstock as ps
from penstock.ir.dataflow import Routed
from penstock.tensors.packet import as_arguments

LAYERS = "model.layers"
# Names of torch's fixed families: our name, its class, and which placement it runs on.
FAMILIES = {
    "GPipe": ("ScheduleGPipe", "loop"),
    "1F1B": ("Schedule1F1B", "loop"),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", "interleaved"),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", "interleaved"),
    "ZBV": ("ScheduleZBVZeroBubble", "v"),
    "DualPipeV": ("ScheduleDualPipeV", "v"),
}
MOST_NORM, LEARNING_RATE = 1.0, 1e-5


@dataclass(frozen=True)
class Shape:
    """The model and its batch; one microbatch is one row of tokens."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    microbatches: int

    def __str__(self) -> str:
        return (
            f"LlamaForCausalLM: {self.layers} layers of width {self.width} with {self.inner} "
            f"inside, vocabulary {self.vocabulary}, {self.tokens} tokens a microbatch, "
            f"{self.microbatches} microbatches"
        )

    def model(self, device: torch.device) -> Any:
        """Return the model with the same random weights on every rank."""
        logging.set_verbosity_error()
        torch.manual_seed(0)
        config: Any = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 4),
            max_position_embeddings=self.tokens,
            use_cache=False,
            tie_word_embeddings=False,
        )
        with device:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, and for each the next one."""
        generator = torch.Generator().manual_seed(1)
        size = self.microbatches, self.tokens + 1
        words = torch.randint(self.vocabulary, size, generator=generator).to(device)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()

    def split(self, device: torch.device, sizes: Sequence[int]) -> ps.Pipe:
        """Cut a new model into stages of these numbers of layers."""
        example = self.batch(device)[0][:1]
        return ps.split(self.model(device), layers=LAYERS, stages=sizes, example=(example,))


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of logits, which the model itself wraps."""
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class TensorStage(nn.Module):
    """A stage of a pipe with tensors in and out, as torch wants them.

    A stage gets a text with its tensors that describes what was not sent; it only depends on
    shapes, so that it is noted once.
    """

    def __init__(self, stage: nn.Module, received: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.stage, self.received = stage, received

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        given = value if self.received is None else {**self.received, "values": [value]}
        output = self.stage(given)
        if isinstance(output, Routed):
            (message,) = output.values.values()
            sent: torch.Tensor
            (sent,) = message["values"]
            return sent
        logits: torch.Tensor = output.logits
        return logits


def as_tensor_stages(pipe: ps.Pipe, row: torch.Tensor) -> list[TensorStage]:
    """Return the stages of a pipe for torch, after one forward of a row that notes the texts."""
    made, received = [], None
    value: Any = row
    with torch.no_grad():
        for number, stage in enumerate(pipe.stages):
            made.append(TensorStage(stage, received))
            output = stage(*as_arguments([value]))
            if number + 1 < pipe.num_stages:
                value = output.values[number + 1]
                received = {name: kept for name, kept in value.items() if name != "values"}
    return made


@dataclass
class Runner:
    """One way to run a training step: what it is called, a step, and how to end it.

    A step returns the norm of the whole model's gradients, on a device or not.
    """

    schedule: str
    who: str
    step: Callable[[], Any]
    close: Callable[[], None]
    routes: str = ""
    # Bytes that it keeps between steps: weights, the optimizer's state, buffers for messages.
    held: int = 0


def _optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def train_ours(
    shape: Shape,
    device: torch.device,
    name: str,
    schedule: ps.Schedule,
    sizes: Sequence[int],
    transport: Any,
) -> Runner:
    """Return a training step of Penstock."""
    pipeline = ps.Pipeline(
        shape.split(device, sizes),
        schedule,
        loss=loss_of,
        reduction="mean",
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(transport=transport, compare_data=False),
    )
    tokens, target = shape.batch(device)
    optimizer = _optimizer(list(pipeline.parameters()))

    def step() -> float:
        optimizer.zero_grad()
        pipeline.step(tokens, target=target)
        norm = pipeline.clip_grad_norm_(MOST_NORM)
        optimizer.step()
        return norm

    routes = ", ".join(sorted(set(pipeline.routes.values())))
    return Runner(name, "penstock", step, pipeline.close, routes)


def train_theirs(
    shape: Shape, device: torch.device, name: str, placement: ps.Placement, sizes: Sequence[int]
) -> Runner:
    """Return a training step of torch.distributed.pipelining on the same stages."""
    tokens, target = shape.batch(device)
    whole = as_tensor_stages(shape.split(device, sizes), tokens[:1])
    own = {stage: whole[stage] for stage in placement.stages(dist.get_rank())}
    last = len(whole) - 1
    del whole
    stages = [
        torch_pipelining.PipelineStage(module, index, last + 1, device, group=dist.group.WORLD)
        for index, module in own.items()
    ]
    kind = getattr(torch_pipelining, FAMILIES[name][0])
    schedule = kind(stages[0] if len(stages) == 1 else stages, shape.microbatches, loss_fn=loss_of)
    args = (tokens,) if 0 in own else ()
    named = {"target": target, "losses": []} if last in own else {}
    parameters = [parameter for module in own.values() for parameter in module.parameters()]
    optimizer = _optimizer(parameters)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        schedule.step(*args, **named, return_outputs=False)
        norm = _clip(parameters)
        optimizer.step()
        return norm

    return Runner(name, "torch", step, lambda: None, dist.get_backend())


def _clip(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Clip by the norm of the whole model's gradients, without a wait of the host."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = torch.nn.utils.get_total_norm(gradients).float() ** 2
    dist.all_reduce(square)
    norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, MOST_NORM, norm)
    return norm

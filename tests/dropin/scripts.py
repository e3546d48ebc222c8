"""A training script as users write it, for either package: torch's own, or ours."""

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

THEIRS, OURS = "torch.distributed.pipelining", "penstock.dropin"
WIDTH = 6
SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Before 2.13 torch's stages know no meshes, and its Vs do not run over gloo.
IS_OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def load(package: str) -> Any:
    """Return the modules of a package under short names."""
    names = ("stage", "schedules", "microbatch", "_utils", "_backward")
    return SimpleNamespace(
        **{name.lstrip("_"): importlib.import_module(f"{package}.{name}") for name in names}
    )


class Block(nn.Module):
    """A layer with a skip and a norm, so that gradients go several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        output: torch.Tensor = x + self.down(gate.sigmoid() * value)
        return output


def make_blocks(number: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(number)]).double()


def make_batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator),
        torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator),
    )


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    if name in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank, rank + ranks]


@dataclass
class Run:
    """What one rank has after a script: its losses, outputs, and the gradients of its blocks."""

    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


def build(
    package: str,
    name: str,
    rank: int,
    ranks: int,
    microbatches: int,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    **settings: Any,
) -> tuple[Any, dict[int, nn.Module]]:
    """Return a schedule of this name with blocks as stages, and the blocks."""
    modules = load(package)
    indices = stages_of(name, rank, ranks)
    num_stages = ranks * len(indices)
    blocks = make_blocks(num_stages)
    held = {index: wrap(copy.deepcopy(blocks[index])) for index in indices}
    cpu = torch.device("cpu")
    stages = [modules.stage.PipelineStage(held[i], i, num_stages, cpu) for i in indices]
    settings.setdefault("loss_fn", nn.functional.mse_loss)
    schedule_class = modules.schedules.get_schedule_class(name)
    given = stages[0] if name in SINGLE else stages
    return schedule_class(given, microbatches, **settings), held


def step(
    schedule: Any, held: dict[int, nn.Module], ranks: int, batch: Any, *, evaluate: bool = False
) -> tuple[list[torch.Tensor], Any]:
    """Run one step, in which each rank gives what its stages take."""
    x, target = batch
    num_stages = ranks * len(held)
    args = (x,) if 0 in held else ()
    losses: list[torch.Tensor] = []
    given = {"target": target, "losses": losses} if num_stages - 1 in held else {}
    with warnings.catch_warnings():
        # Torch reads .grad of chunks of the batch, and warns of it.
        warnings.simplefilter("ignore")
        run = schedule.eval if evaluate else schedule.step
        outputs = run(*args, **given)
    return [loss.detach() for loss in losses], outputs


def gradients(held: dict[int, nn.Module]) -> dict[str, torch.Tensor | None]:
    return {
        f"{index}.{name}": None if weight.grad is None else weight.grad.clone()
        for index, module in held.items()
        for name, weight in module.named_parameters()
    }

"""Modules and trainers with all ranks in one process; loading Lightning takes seconds."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from penstock.integrations.lightning import PipelineConfig, PipelineStrategy

ROWS = torch.arange(32.0).reshape(8, 4) / 10


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows


class Fits(LightningModule):
    """Trains to return zeros; what it does with the loss is up to a test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Blocks()
        self.norms: list[float] = []

    def training_step(self, rows: torch.Tensor) -> Any:
        return self.model(rows, target=torch.zeros_like(rows)).loss

    def predict_step(self, rows: torch.Tensor) -> Any:
        return self.model(rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halves(Fits):
    def training_step(self, rows: torch.Tensor) -> Any:
        return 0.5 * super().training_step(rows)


class Keeps(Fits):
    """Never resets its gradients."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass


class Frozen(Fits):
    """Has a dropout that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.model.layers
        layers[2] = nn.Sequential(layers[2], nn.Dropout(0.9).eval())


class Clips(Fits):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Asks(Fits):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat([grad.flatten() for grad in grads]).norm()))


def make_trainer(strategy: PipelineStrategy | None = None, **settings: Any) -> Trainer:
    strategy = strategy or make_strategy()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, **{**quiet, **settings})


def make_strategy(**settings: Any) -> PipelineStrategy:
    config = PipelineConfig("1F1B", microbatches=2, ranks=2)
    return PipelineStrategy(config, **{"loss": nn.functional.mse_loss, **settings})


def fit(trainer: Trainer, module: LightningModule) -> None:
    trainer.fit(module, DataLoader(ROWS, 4))  # type: ignore[arg-type]  # a tensor has rows


def trained_alone(kind: type[Fits]) -> dict[str, torch.Tensor]:
    """Return the state that a module's model has after the same steps without Lightning."""
    model, scale = kind().model, 0.5 if kind is Halves else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.split(ROWS, 4):
        if kind is not Keeps:
            optimizer.zero_grad()
        torch.autograd.backward(scale * model(rows).square().mean())
        optimizer.step()
    return dict(model.state_dict())


def trained_in_pipelines(kind: type[Fits]) -> dict[str, torch.Tensor]:
    """Return the state of a module's model after a fit."""
    trainer = make_trainer()
    fit(trainer, kind())
    strategy: Any = trainer.strategy
    state: dict[str, torch.Tensor] = strategy.pipeline.full_state_dict()
    return state


class Manual(Fits):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Several(Fits):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)


class Own(Fits):
    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        torch.autograd.backward(loss)


class Newton(Fits):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


REFUSED: dict[str, tuple[type[Fits], dict[str, Any]]] = {
    "manual": (Manual, {}),
    "fp16": (Fits, {"plugins": [MixedPrecision("16-mixed", "cpu")]}),
    "parameters elsewhere": (Several, {}),
    "a backward": (Own, {}),
    "LBFGS": (Newton, {}),
}

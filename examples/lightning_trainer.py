"""The Trainer of Lightning, with pipelines: one argument is added.

The module is an ordinary one. Logging, evaluation, clipping, accumulation, callbacks, checkpoints
and resuming are Lightning's own. Add a checkpoint to resume from, with any number of processes.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

import sys
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from transformers import BloomConfig, BloomForCausalLM

from penstock.integrations.lightning import PipelineConfig, PipelineStrategy
from penstock.integrations.pretrained import save_pretrained

seed_everything(0, verbose=False)


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=8))

    def training_step(self, batch: Any) -> Any:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("held", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


strategy = PipelineStrategy(PipelineConfig("ZBV", microbatches=4))
steps: dict[str, Any] = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
place: dict[str, Any] = {"logger": CSVLogger("."), "log_every_n_steps": 1, "accelerator": "cpu"}
trainer = Trainer(strategy=strategy, devices=2, **steps, **place)
rows, held = (DataLoader(TensorDataset(torch.randint(256, (n, 16))), 8) for n in (80, 16))
module = Language()
trainer.fit(module, rows, held, ckpt_path=sys.argv[1] if sys.argv[1:] else None)
save_pretrained(strategy.pipeline, "trained", model=module.model)

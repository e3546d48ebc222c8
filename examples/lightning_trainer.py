"""The Trainer of Lightning, with pipelines: one argument is added.

The module is an ordinary one. Logging, evaluation, clipping, accumulation, callbacks, checkpoints
and resuming are Lightning's own.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py
"""

from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.integrations.lightning import PipelineConfig, PipelineStrategy
from penstock.integrations.pretrained import save_pretrained

seed_everything(0, verbose=False)
data = torch.randint(256, (96, 16))
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **sizes))

    def training_step(self, batch: Any) -> Any:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("held", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


strategy = PipelineStrategy(PipelineConfig("ZBV", microbatches=4))
steps: dict[str, Any] = {"max_epochs": 4, "accumulate_grad_batches": 2, "log_every_n_steps": 1}
trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", gradient_clip_val=0.5, **steps)
module = Language()
rows, held = TensorDataset(data[:80]), TensorDataset(data[80:])
trainer.fit(module, DataLoader(rows, 8, shuffle=True), DataLoader(held, 8))
save_pretrained(strategy.pipeline, "trained", model=module.model)

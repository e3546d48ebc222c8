"""A loop with Lightning's Fabric, and a model that is trained by a pipeline.

Two lines are changed: the strategy, and how the whole model is saved.

    torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

from typing import Any

import torch
from lightning import Fabric
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.integrations.lightning import PipelineConfig, PipelineFabricStrategy
from penstock.integrations.pretrained import save_pretrained

strategy = PipelineFabricStrategy(PipelineConfig("ZBV", microbatches=4))
fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
fabric.launch()
fabric.seed_everything(0, verbose=False)
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
whole = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **sizes))
model, optimizer = fabric.setup(whole, torch.optim.AdamW(whole.parameters(), lr=3e-3))
data = TensorDataset(torch.randint(256, (80, 16)))
loader = fabric.setup_dataloaders(DataLoader(data, 8, shuffle=True))

for epoch in range(4):
    for number, (rows,) in enumerate(loader):
        loss = model(input_ids=rows, labels=rows).loss
        fabric.backward(loss / 2)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch + 1}: loss {loss:.6f}")
    fabric.save("state", {"model": model, "optimizer": optimizer, "epoch": epoch})
save_pretrained(strategy.pipeline, "trained", model=whole)

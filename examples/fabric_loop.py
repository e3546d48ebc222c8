"""A loop with Lightning's Fabric, and a model that is trained by a pipeline.

Two lines are changed: the strategy, and how the whole model is saved. Add the number of an epoch
to resume after it, with any number of processes.

    torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

import sys

import torch
from lightning import Fabric
from torch.utils.data import DataLoader, TensorDataset
from transformers import BloomConfig, BloomForCausalLM

from penstock.integrations.lightning import PipelineConfig, PipelineFabricStrategy
from penstock.integrations.pretrained import save_pretrained

strategy = PipelineFabricStrategy(PipelineConfig("ZBV", microbatches=4))
fabric = Fabric(strategy=strategy, devices=2, accelerator="cpu")
fabric.launch()
fabric.seed_everything(0, verbose=False)
whole = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=8))
model, optimizer = fabric.setup(whole, torch.optim.AdamW(whole.parameters(), lr=3e-3))
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randint(256, (80, 16))), 8))
held = torch.randint(256, (8, 16))
if done := int(sys.argv[1]) if sys.argv[1:] else 0:
    fabric.load(f"state-{done}", {"model": model, "optimizer": optimizer})

for epoch in range(done + 1, 5):
    for number, (rows,) in enumerate(loader):
        loss = model(input_ids=rows, labels=rows).loss
        fabric.backward(loss / 2)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            fabric.print(f"epoch {epoch}: loss {loss:.6f}")
    with torch.no_grad():
        fabric.print(f"held: loss {model(input_ids=held, labels=held).loss:.6f}")
    fabric.save(f"state-{epoch}", {"model": model, "optimizer": optimizer})
save_pretrained(strategy.pipeline, "trained", model=whole)

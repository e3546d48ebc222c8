"""A loop with the Accelerator of Hugging Face, and a model that is trained by a pipeline.

One line is changed: the one that makes the accelerator. Add the number of an epoch to resume after
it, with any number of processes.

    torchrun --nproc-per-node 2 examples/accelerator_loop.py
"""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BloomConfig, BloomForCausalLM, set_seed

from penstock.integrations.hugging_face import PipelineAccelerator, PipelineConfig

pipeline = PipelineConfig("ZBV", microbatches=4)
accelerator = PipelineAccelerator(pipeline=pipeline, gradient_accumulation_steps=2, cpu=True)
set_seed(0)
model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=64, n_layer=8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(torch.randint(256, (80, 16))), 8)
held = torch.randint(256, (8, 16))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if done := int(sys.argv[1]) if sys.argv[1:] else 0:
    accelerator.load_state(f"state-{done}")

for epoch in range(done + 1, 5):
    for (rows,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                accelerator.print(f"epoch {epoch}: loss {loss:.6f}")
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accelerator.print(f"held: loss {model(input_ids=held, labels=held).loss:.6f}")
    accelerator.save_state(f"state-{epoch}")
accelerator.save_model(model, "trained")
accelerator.end_training()

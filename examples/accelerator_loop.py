"""A loop with the Accelerator of Hugging Face, and a model that is trained by a pipeline.

One line is changed: the one that makes the accelerator.

    torchrun --nproc-per-node 2 examples/accelerator_loop.py
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from penstock.integrations.hugging_face import PipelineAccelerator, PipelineConfig

pipeline = PipelineConfig("ZBV", microbatches=4)
accelerator = PipelineAccelerator(pipeline=pipeline, gradient_accumulation_steps=2, cpu=True)
set_seed(0)
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader: Any = DataLoader(TensorDataset(torch.randint(256, (80, 16))), 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    for (rows,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}: loss {loss:.6f}")
    accelerator.save_state("state")
accelerator.save_model(model, "trained")
accelerator.end_training()

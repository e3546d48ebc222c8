"""LoRA: train small adapters inside a frozen model, in a pipeline.

The adapters come from `peft`, put into the model before it is split. Only they get gradients and
go to the optimizer; stages whose weights are all frozen need nothing special. Under
`torchrun --nproc-per-node 2` the same script trains on two ranks.

    python examples/lora.py
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock as ps

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    use_cache=False,
)
adapted = get_peft_model(
    AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
)
pipe = ps.split(adapted, layers="layers", stages=4)
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
group = dist.group.WORLD if dist.is_initialized() else None
pipeline = ps.Pipeline(pipe, "ZBV", microbatches=4, loss=ps.find_loss, group=group)

# Each process has the parameters of its own stages.
trained = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
whole = sum(parameter.numel() for parameter in pipeline.parameters())
print(f"{sum(p.numel() for p in trained):,} of {whole:,} parameters are trained")
optimizer = torch.optim.AdamW(trained, lr=1e-2)
tokens = torch.randint(256, (8, 32))

for step in range(10):
    loss = pipeline.step(input_ids=tokens, labels=tokens).loss
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2}: loss {loss:.4f}")

# All ranks together give the whole model to the first, which saves the adapters only.
state = pipeline.full_state_dict()
if state:
    adapted.save_pretrained("adapters", state_dict=state)
if dist.is_initialized():
    dist.destroy_process_group()

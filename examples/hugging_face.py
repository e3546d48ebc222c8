"""A Hugging Face model, split and trained.

A small Llama, made from its configuration so that nothing is downloaded; with `from_pretrained`
the rest stays the same. It is split by its list of layers, without tracing and without a line of
it changed: names, ties and gradients are the model's own. Under `torchrun --nproc-per-node 2` the
same script trains on two ranks.

    python examples/hugging_face.py
"""

import torch
import torch.distributed as dist
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
model = AutoModelForCausalLM.from_config(config)
pipe = ps.split(model, layers="model.layers", stages=4)
print(pipe)

# The model makes its loss from the labels; `find_loss` takes it out of the output.
if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
group = dist.group.WORLD if dist.is_initialized() else None
pipeline = ps.Pipeline(pipe, "ZBV", microbatches=4, loss=ps.find_loss, group=group)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
tokens = torch.randint(256, (8, 32))

for step in range(10):
    loss = pipeline.step(tokens, labels=tokens).loss
    pipeline.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2}: loss {loss:.4f}")

# Every rank has trained its own stages; all together give the whole model to the first.
state = pipeline.full_state_dict()
if state:
    model.save_pretrained("trained", state_dict=state)
if dist.is_initialized():
    dist.destroy_process_group()

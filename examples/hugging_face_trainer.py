"""The Trainer of Hugging Face, with pipelines: two lines are changed.

Arguments, logging, evaluation, checkpoints and resuming are the Trainer's own. With more processes
than `ranks`, the others are replicas that get other data. Add a checkpoint to resume from, as in
`trained/checkpoint-10`, with any number of processes.

    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py
"""

import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from penstock.integrations.hugging_face import PipelineConfig, PipelineTrainer

set_seed(0)
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **sizes))
data = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 16))]
args = TrainingArguments(
    "trained",
    use_cpu=True,
    report_to="none",
    max_steps=20,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    learning_rate=3e-3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
)
pipeline = PipelineConfig("ZBV", microbatches=4)
trainer = PipelineTrainer(
    model, args, train_dataset=data[:48], eval_dataset=data[48:], pipeline=pipeline
)
trainer.train(resume_from_checkpoint=sys.argv[1] if sys.argv[1:] else None)
trainer.save_model("trained/final")

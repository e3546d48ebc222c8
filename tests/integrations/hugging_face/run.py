"""One run of a Trainer, in processes of its own: python run.py WHAT FOLDER [name=value ...].

WHAT is "trainer" for the Trainer of the library, or the schedule of a PipelineTrainer. The first
process writes what was logged to FOLDER/logs.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from penstock.errors import PipelineError

WORDS = 64


def main(what: str, folder: Path, *settings: str) -> None:
    warnings.simplefilter("ignore")
    chosen = dict(setting.split("=") for setting in settings)
    ranks = int(chosen.pop("ranks", 0)) or None
    steps = int(chosen.pop("steps", 20))
    held = int(chosen.pop("held", 20))
    stop = int(chosen.pop("stop", 0))
    set_seed(3)
    model = make_model(tied=chosen.pop("tied", "") == "yes")
    if chosen.pop("lora", ""):
        model = with_adapters(model)
    rows = torch.randint(3, WORDS, (84, 12), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": mask_some(row)} for row in rows]
    best: dict[str, Any] = {"save_steps": 8}
    if chosen.pop("best", ""):
        best = {"save_steps": 7, "load_best_model_at_end": True, "save_total_limit": 1}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        max_steps=steps,
        per_device_train_batch_size=int(chosen.pop("batch", 4)),
        per_device_eval_batch_size=int(chosen.pop("eval_batch", 6)),
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=7,
        **best,
        seed=5,
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
        bf16=chosen.pop("bf16", "") == "yes",
    )
    given: dict[str, Any] = {"train_dataset": data[:64], "eval_dataset": data[64 : 64 + held]}
    if chosen.pop("metrics", "yes") == "yes":
        given["compute_metrics"] = count_hits
    if chosen.pop("draws", "") == "yes":
        given["data_collator"] = hide_some
    if chosen.pop("optimizer", "") == "own":
        given["optimizers"] = torch.optim.AdamW(model.parameters(), lr=1e-2), None
    trainer = make_trainer(what, model, args, ranks, given)
    if stop:
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                del args
                control.should_training_stop = state.global_step >= stop

        trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=chosen.pop("resume", None))
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        (folder / "logs.json").write_text(json.dumps(trainer.state.log_history))
    if "RANK" in os.environ:
        if what != "trainer":
            assert_not_called(model)
        torch.distributed.destroy_process_group()
    assert not chosen, chosen


def assert_not_called(model: Any) -> None:
    """Call the model, of which each process has trained a part, so that calls would be wrong."""
    try:
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    except PipelineError as error:
        assert "cannot be called by one of them" in str(error)  # noqa: PT017  # no test
    else:
        raise AssertionError("the model of one process was called")


def make_model(*, tied: bool) -> Any:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, settings)


def mask_some(row: torch.Tensor) -> torch.Tensor:
    """Return labels of which each row counts another number."""
    return row.where(torch.arange(len(row)) >= row[0] % 5, -100)


def hide_some(rows: list[Any]) -> Any:
    """Draw the words that count, as collators for masked words do."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    is_hidden = torch.rand(batch["labels"].shape) < 0.3
    return {**batch, "labels": batch["labels"].where(is_hidden, -100)}


def count_hits(found: Any) -> dict[str, float]:
    guesses = np.asarray(found.predictions).argmax(-1)[:, :-1]
    labels = np.asarray(found.label_ids)[:, 1:]
    return {"hits": float((guesses == labels).sum()), "rows": float(len(labels))}


def make_trainer(
    what: str, model: Any, args: Any, ranks: int | None, given: dict[str, Any]
) -> Any:
    if what == "trainer":
        return Trainer(model, args, **given)
    from penstock.integrations.hugging_face import PipelineConfig, PipelineTrainer

    config = PipelineConfig(what, microbatches=4, ranks=ranks)
    return PipelineTrainer(model, args, pipeline=config, **given)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

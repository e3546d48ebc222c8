"""A PipelineTrainer logs and trains what the Trainer does, for models with other losses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = 40
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
}
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DRAWS = torch.Generator().manual_seed(0)
TOKENS = torch.randint(3, WORDS, (26, 8), generator=DRAWS)
PICTURES = torch.randn(26, 3, 16, 16, dtype=torch.float64, generator=DRAWS)
# Rows differ in how many of their labels count; every third has none.
LABELS = TOKENS.where(torch.arange(8) >= TOKENS[:, :1] % 5, -100)
LABELS[::3] = -100


def make_bert(kind: str, **settings: Any) -> Any:
    config = transformers.BertConfig(vocab_size=WORDS, **BERT, **settings)
    return getattr(transformers, kind)(config)


def make_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))


def make_t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=WORDS, **sizes, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def make_vit() -> Any:
    config = transformers.ViTConfig(**BERT, image_size=16, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def rows_of(**columns: torch.Tensor) -> list[dict[str, Any]]:
    return [{name: column[n] for name, column in columns.items()} for n in range(len(TOKENS))]


CASES: dict[str, tuple[Callable[[], Any], list[dict[str, Any]]]] = {
    "counted sum": (make_llama, rows_of(input_ids=TOKENS, labels=LABELS)),
    "classes": (
        lambda: make_bert("BertForSequenceClassification", num_labels=3),
        rows_of(input_ids=TOKENS, labels=TOKENS[:, 0] % 3),
    ),
    "classes of tokens": (
        lambda: make_bert("BertForTokenClassification", num_labels=WORDS),
        rows_of(input_ids=TOKENS, labels=LABELS),
    ),
    "answers": (
        lambda: make_bert("BertForQuestionAnswering"),
        rows_of(
            input_ids=TOKENS, start_positions=TOKENS[:, 0] % 8, end_positions=TOKENS[:, 1] % 8
        ),
    ),
    "encoder and decoder": (make_t5, rows_of(input_ids=TOKENS, labels=LABELS)),
    "pictures": (make_vit, rows_of(pixel_values=PICTURES, labels=TOKENS[:, 0] % 3)),
}


def train(case: str, folder: Path, config: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train with a pipeline, or with the library alone if there is no configuration."""
    from penstock.integrations.hugging_face import PipelineTrainer

    make, rows = CASES[case]
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        # The last batch of an epoch has two rows, and the last step one batch.
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.5,
        logging_steps=1,
        eval_on_start=True,
        eval_strategy="epoch",
        save_strategy="no",
        prediction_loss_only=True,
    )
    given: dict[str, Any] = {"train_dataset": rows[:18], "eval_dataset": rows[18:]}
    if config is not None:
        given["pipeline"] = config
    kind = transformers.Trainer if config is None else PipelineTrainer
    trainer: Any = kind(make().double(), args, **given)
    trainer.train()
    logs = [
        entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm", "eval_loss", "total_flos")
        if key in entry
    ]
    state = trainer.model.state_dict() if config is None else trainer.pipeline.full_state_dict()
    return logs, {name: value.clone() for name, value in state.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_with_a_pipeline_trains_as_the_library_does(case: str, tmp_path: Path) -> None:
    # Most models take num_items_in_batch and ignore it, so that their losses are means. They
    # were added up, which made losses and gradients as many times larger as microbatches.
    from penstock.integrations.hugging_face import PipelineConfig

    expected, exact = train(case, tmp_path / "one", None)
    config = PipelineConfig("ZBV", microbatches=4, ranks=2)
    found, weights = train(case, tmp_path / "two", config)
    assert len(expected) > 10
    # Losses are logged in single precision.
    assert found == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights, exact, rtol=1e-9, atol=1e-11)

"""A pipeline generates what the unsplit model does, token by token."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import ArgumentError
from penstock.integrations.hugging_face.generation import Sampling, generate
from tests.processes import Processes
from tests.splitting.zoo import GROUPED, ZOO, hf

PROMPTS = torch.arange(20).reshape(4, 5) % 60
LENGTH = 64
# Prompts and what follows are longer than GPT-2 of the zoo is by default.
LLAMA_WITH_WINDOWS = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}


def make_model(name: str) -> Any:
    torch.manual_seed(1)
    if name == "Qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, **LLAMA_WITH_WINDOWS)).double()
    else:
        model = ZOO[name].build().model
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as they are initialized repeat one token for ever.
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.eval()


def make_pipeline(model: nn.Module, schedule: str, **settings: Any) -> ps.Pipeline:
    ranks = 2 if "group" not in settings else dist.get_world_size()
    stages = 4 if schedule == "ZBV" else ranks
    return ps.Pipeline(
        ps.split(model, stages=stages), schedule, microbatches=2, loss=ps.find_loss, **settings
    )


def expected_of(model: Any, length: int) -> torch.Tensor:
    # The sequences end by their length alone.
    found: torch.Tensor = model.generate(
        PROMPTS,
        attention_mask=torch.ones_like(PROMPTS),
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found


def generate_over_ranks(_rank: int, name: str, schedule: str) -> list[list[int]]:
    model = make_model(name)
    config = model.config
    with make_pipeline(model, schedule, group=dist.group.WORLD) as pipeline:
        found = generate(pipeline, config, PROMPTS, max_new_tokens=LENGTH)
    return [list(map(int, row)) for row in found]


@pytest.mark.parametrize(
    ("name", "schedule"), [("Llama", "ZBV"), ("GPT-2", "1F1B"), ("Qwen2", "1F1B")]
)
def test_two_ranks_generate_what_the_model_does(
    name: str, schedule: str, two_processes: Processes
) -> None:
    expected = expected_of(make_model(name), LENGTH)
    assert len(expected[:, 5:].unique()) > 8
    first, second = two_processes.run(generate_over_ranks, name, schedule)
    assert first == expected.tolist()
    assert second == first


SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "top_k": {"top_k": 5},
}
# Prompts of 5, 3, 4 and 1 tokens.
MASK = (torch.arange(5) >= torch.tensor([0, 2, 1, 4])[:, None]).long()


def sampled_by_model(model: Any, length: int, mask: torch.Tensor, **settings: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(
        PROMPTS,
        attention_mask=mask,
        max_new_tokens=length,
        min_new_tokens=length,
        do_sample=True,
        eos_token_id=None,
        pad_token_id=0,
        **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings},
    )


def sample_over_ranks(_rank: int, name: str, schedule: str, length: int) -> list[Any]:
    model = make_model(name)
    results = []
    stages = 4 if schedule == "ZBV" or dist.get_world_size() == 4 else 2
    with ps.Pipeline(
        ps.split(model, stages=stages),
        schedule,
        microbatches=3,
        loss=ps.find_loss,
        group=dist.group.WORLD,
    ) as pipeline:
        for settings in SAMPLINGS.values():
            torch.manual_seed(7)
            sampling = Sampling(**settings)
            found = generate(
                pipeline,
                model.config,
                PROMPTS,
                max_new_tokens=length,
                attention_mask=MASK,
                sampling=sampling,
            )
            # All ranks continue with the same generator.
            results.append([found.tolist(), float(torch.rand(()))])
    return results


@pytest.mark.parametrize(
    ("name", "schedule", "length"),
    [
        ("Llama", "ZBV", 12),
        pytest.param("Llama", "ZBV", LENGTH, marks=pytest.mark.slow),
        pytest.param("Qwen2", "1F1B", LENGTH, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_sample_what_the_model_does_from_prompts_of_several_lengths(
    name: str, schedule: str, length: int, two_processes: Processes
) -> None:
    check_samples(two_processes, name, schedule, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Qwen2"])
def test_four_ranks_sample_what_the_model_does(name: str, four_processes: Processes) -> None:
    check_samples(four_processes, name, "1F1B", LENGTH)


def check_samples(processes: Processes, name: str, schedule: str, length: int) -> None:
    model = make_model(name)
    expected = []
    for settings in SAMPLINGS.values():
        words = sampled_by_model(model, length, MASK, **settings)
        expected.append([words.tolist(), float(torch.rand(()))])
    for found in processes.run(sample_over_ranks, name, schedule, length):
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_four_ranks_generate_what_the_model_does(name: str, four_processes: Processes) -> None:
    expected = expected_of(make_model(name), LENGTH)
    for found in four_processes.run(generate_over_ranks, name, "1F1B"):
        assert found == expected.tolist()


def roll_out(_rank: int) -> list[Any]:
    """Train on what was sampled, three times."""
    model = make_model("Llama")
    torch.manual_seed(7)
    results: list[Any] = []
    with make_pipeline(model, "1F1B", group=dist.group.WORLD) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-4)
        for _ in range(3):
            words = generate(
                pipeline, model.config, PROMPTS, max_new_tokens=6, sampling=Sampling()
            )
            loss = pipeline.train().step(input_ids=words, labels=words).loss
            optimizer.step()
            optimizer.zero_grad()
            results.append([words.tolist(), loss])
    return results


def test_rollouts_between_training_steps_are_those_of_the_model(
    two_processes: Processes,
) -> None:
    model = make_model("Llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(7)
    expected = []
    for _ in range(3):
        words = model.eval().generate(
            PROMPTS,
            attention_mask=torch.ones_like(PROMPTS),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        loss = model.train()(input_ids=words, labels=words).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((words.tolist(), loss.item()))
    for found in two_processes.run(roll_out):
        assert [words for words, _ in found] == [words for words, _ in expected]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected])


def test_prompts_filled_up_at_the_right_are_refused() -> None:
    model = make_model("Llama")
    with (
        make_pipeline(model, "1F1B") as pipeline,
        pytest.raises(ArgumentError, match="must be filled up at the left"),
    ):
        generate(pipeline, None, PROMPTS, max_new_tokens=1, attention_mask=MASK.flip(1))


def test_sequences_end_with_their_token_and_training_continues() -> None:
    model = make_model("Llama")
    free = expected_of(model, 12)
    end = int(free[0, 8])
    with make_pipeline(model, "1F1B") as pipeline:
        pipeline.train()
        found = generate(pipeline, model.config, PROMPTS, max_new_tokens=12, eos_token_id=end)
        assert all(module.training for module in pipeline.modules.values())
        assert pipeline.step(PROMPTS, labels=PROMPTS).loss is not None
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        length = whole.index(end, 5) + 1 if end in whole[5:] else len(row)
        assert row == (whole[:length] + [0] * len(row))[: len(row)]


def test_traced_stages_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = ps.split(model, stages=2, example=[torch.ones(4, 2)])
    with (
        ps.Pipeline(pipe, "1F1B", microbatches=2) as pipeline,
        pytest.raises(ArgumentError, match="must come from a split by layers"),
    ):
        generate(pipeline, None, PROMPTS, max_new_tokens=1)

"""With a seed, random numbers inside stages are the same for every layout."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.splitting.by_layers.layers import split_layers
from penstock.splitting.by_tracing.traced import split_traced
from penstock.splitting.pipe import Pipe
from penstock.step.layer_random import stream_seed
from tests.models import differences, gradients_of
from tests.processes import Processes

WIDTH, HEADS, LENGTH, ROWS = 8, 2, 4, 8
LAYERS = 8
Run = tuple[float, dict[str, torch.Tensor]]
# How a layer is run again in the backward; `None` if it is not.
WHOLE = ("whole", "whole, reentrant")
PART = ("part", "part, reentrant")
# Torch says so of a layer that could be run again, where there are no gradients.
RUN_FOR_NOTHING = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Layer(nn.Module):
    """Attention and a product, with dropout of three kinds."""

    def __init__(self, again: str | None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.expand = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.2)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again in PART:
            x = x + checkpoint(self.attend, x, use_reentrant=self.again == PART[1])
        else:
            x = x + self.attend(x)
        return x + F.dropout(torch.relu(self.expand(x)), 0.3, self.training)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        split = self.project(x).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        rate = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        dropped: torch.Tensor = self.drop(mixed.transpose(1, 2).reshape(x.shape))
        return dropped


class Transformer(nn.Module):
    """Drops out in its layers, and between them: by a module, and in its own code."""

    def __init__(
        self, again: str | None = None, *, shared: bool = False, layers: int = LAYERS
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.1)
        one = Layer(again)
        self.layers = nn.ModuleList(one if shared else Layer(again) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(x))
        for layer in self.layers:
            if self.again in WHOLE:
                x = checkpoint(layer, x, use_reentrant=self.again == WHOLE[1])
            else:
                x = layer(x)
            x = F.dropout(x, 0.05, self.training)
        result: torch.Tensor = self.head(x)
        return result


def make(**settings: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**settings)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return both[0].clone(), both[1].clone()


def by_layers(model: nn.Module, stages: int) -> Pipe:
    return split_layers(model, ["layers"], stages, (make_batch()[0][:2],), {})


def by_tracing(model: nn.Module, stages: int) -> Pipe:
    return split_traced(model, (make_batch()[0][:2],), stages=stages)


def run(pipe: Pipe, family: str, *, steps: int = 1, seed: int = 1234, **settings: Any) -> Run:
    """Return the sum of the losses, and the gradients of all steps."""
    pipeline = ps.Pipeline(pipe, family, microbatches=4, loss=F.mse_loss, seed=seed, **settings)
    batch, target = make_batch()
    losses = [pipeline.step(batch, target=target).loss for _ in range(steps)]
    return sum(loss or 0.0 for loss in losses), gradients_of(pipeline.named_parameters())


def far(found: Run, expected: Run) -> dict[str, float]:
    """Return where two runs differ."""
    loss = {} if abs(found[0] - expected[0]) < 1e-12 else {"loss": found[0] - expected[0]}
    return loss | differences(found[1], expected[1])


LAYOUTS = [
    ("GPipe", 2),
    ("GPipe", 4),
    ("1F1B", 2),
    ("1F1B", 4),
    ("Interleaved1F1B", 4),
    ("Interleaved1F1B", 8),
    ("ZB-H1", 4),
    ("ZBV", 2),
    ("ZBV", 4),
    ("ZBV", 8),
    ("DualPipeV", 4),
    ("DualPipe", 2),
]


# ---- layouts


def test_every_layout_drops_out_the_same() -> None:
    expected = run(by_layers(make(), 1), "GPipe", steps=2)
    for family, stages in LAYOUTS:
        found = run(by_layers(make(), stages), family, steps=2)
        assert (family, stages, far(found, expected)) == (family, stages, {})


@pytest.mark.parametrize(("family", "stages"), [("1F1B", 3), ("ZBV", 4)])
def test_every_cut_of_a_trace_drops_out_the_same(family: str, stages: int) -> None:
    expected = run(by_tracing(make(layers=2), 2), "GPipe")
    assert far(run(by_tracing(make(layers=2), stages), family), expected) == {}


@pytest.mark.parametrize("again", [WHOLE[0], *PART])
@pytest.mark.parametrize(("family", "stages"), [("1F1B", 1), ("1F1B", 4), ("ZBV", 4)])
def test_running_a_layer_again_draws_the_same(again: str, family: str, stages: int) -> None:
    expected = run(by_layers(make(), 2), "1F1B", steps=2)
    assert far(run(by_layers(make(again=again), stages), family, steps=2), expected) == {}


def test_reentrant_checkpoints_around_layers_draw_the_same() -> None:
    expected = run(by_layers(make(), 2), "1F1B", steps=2)
    assert far(run(by_layers(make(again=WHOLE[1]), 1), "1F1B", steps=2), expected) == {}


@pytest.mark.parametrize("split", [by_layers, by_tracing])
def test_running_a_whole_stage_again_draws_the_same(
    split: Callable[[nn.Module, int], Pipe],
) -> None:
    expected = run(split(make(layers=2), 2), "GPipe")
    pipe = split(make(layers=2), 2)
    schedule = ps.build("1F1B", ranks=2, microbatches=4)
    pipeline = ps.Pipeline(pipe, schedule, loss=F.mse_loss, seed=1234)
    for stage in pipeline._stages.values():
        stage.checkpoint()
    batch, target = make_batch()
    loss = pipeline.step(batch, target=target).loss
    assert loss is not None
    assert far((loss, gradients_of(pipeline.named_parameters())), expected) == {}


@pytest.mark.parametrize("again", [None, WHOLE[0]])
def test_calls_of_one_shared_layer_draw_by_their_number(again: str | None) -> None:
    expected = run(by_layers(make(shared=True), 1), "GPipe")
    assert far(run(by_layers(make(shared=True, again=again), 1), "GPipe"), expected) == {}
    assert far(run(by_layers(make(shared=True, again=again), 4), "1F1B"), expected) == {}


def test_layers_without_saved_generator_state_draw_the_same_when_run_again() -> None:
    class Careless(Transformer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            result: torch.Tensor = self.head(x)
            return result

    class Plain(Transformer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            result: torch.Tensor = self.head(x)
            return result

    plain, careless = Plain(), Careless()
    careless.load_state_dict(plain.state_dict())
    expected = run(by_layers(plain, 4), "1F1B")
    assert far(run(by_layers(careless, 2), "ZBV"), expected) == {}


def run_on_ranks(rank: int, family: str, stages: int) -> Run:
    del rank
    return run(by_layers(make(), stages), family, steps=2, group=dist.group.WORLD)


def test_ranks_of_their_own_drop_out_like_one_process(two_processes: Processes) -> None:
    expected = run(by_layers(make(), 1), "GPipe", steps=2)
    for family, stages in (("1F1B", 2), ("ZBV", 4)):
        found = two_processes.run(run_on_ranks, family, stages, seconds=300)
        gradients = {name: grad for _, part in found for name, grad in part.items()}
        assert {loss for loss, _ in found} == {found[0][0]}
        assert far((found[0][0], gradients), expected) == {}


def compile_layers(model: Transformer) -> Transformer:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_compiled_layers_drop_out_the_same_for_every_layout() -> None:
    torch._dynamo.reset()
    expected = run(by_layers(compile_layers(make(layers=4)), 1), "GPipe")
    assert far(run(by_layers(compile_layers(make(layers=4)), 4), "ZBV"), expected) == {}
    assert far(run(by_layers(make(layers=4), 2), "1F1B"), expected) == {}


def test_a_hugging_face_model_drops_out_the_same_for_every_layout() -> None:
    transformers = pytest.importorskip("transformers")

    def make_gpt() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=4,
            n_embd=8,
            n_head=2,
            vocab_size=16,
            n_positions=8,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config).double().train()
        return model

    tokens = torch.arange(64).reshape(8, 8) % 16

    def run_gpt(stages: int, family: str) -> Run:
        pipe = ps.split(make_gpt(), layers="transformer.h", stages=stages, example=(tokens[:2],))
        pipeline = ps.Pipeline(pipe, family, microbatches=4, loss=ps.find_loss, seed=7)
        loss = pipeline.step(tokens, labels=tokens).loss
        return loss or 0.0, gradients_of(pipeline.named_parameters())

    expected = run_gpt(1, "GPipe")
    for stages, family in ((2, "1F1B"), (4, "ZBV"), (4, "Interleaved1F1B")):
        assert far(run_gpt(stages, family), expected) == {}


# ---- streams


class Noise(nn.Module):
    """Returns what it draws, beside its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x + torch.rand_like(x)


def mean_of(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


def draw(pipeline: ps.Pipeline, rows: int = 2) -> list[float]:
    """Return what each microbatch got in a training step."""
    result = pipeline.step(torch.zeros(rows, 1), return_outputs=True)
    drawn: list[float] = result.outputs.flatten().tolist()
    return drawn


def test_a_stage_draws_from_the_stream_that_is_documented() -> None:
    pipeline = ps.Pipeline([Noise()], "GPipe", microbatches=2, loss=mean_of, seed=9)
    expected = []
    for step in range(2):
        for microbatch in range(2):
            seed = stream_seed(9, "step", step, microbatch, "stage 0", 0) | 1 << 63
            generator = torch.Generator().manual_seed(seed)
            expected.append(torch.rand(1, 1, generator=generator).item())
    assert [*draw(pipeline), *draw(pipeline)] == expected


def test_seeds_steps_stages_and_microbatches_draw_different_numbers() -> None:
    drawn = []
    for seed in (1, 2):
        for count in (1, 2):
            stages = [*[nn.Identity()] * (count - 1), Noise()]
            pipeline = ps.Pipeline(stages, "GPipe", microbatches=2, loss=mean_of, seed=seed)
            drawn += [*draw(pipeline), *draw(pipeline)]
    assert len(set(drawn)) == 16


def test_layers_draw_different_numbers() -> None:
    model = nn.Sequential(*(Noise() for _ in range(8)))
    seen: list[float] = []
    for layer in model:
        layer.register_forward_hook(
            lambda _, args, out: seen.append(float((out - args[0]).detach().sum()))
        )
    pipe = split_layers(model, [""], 2, (torch.zeros(1, 1),), {})
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=2, loss=mean_of, seed=1)
    seen.clear()
    draw(pipeline)
    assert len(set(seen)) == 16


def test_without_a_seed_numbers_come_from_the_user() -> None:
    pipeline = ps.Pipeline([Noise()], "GPipe", microbatches=2, loss=mean_of)
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    assert draw(pipeline) == expected


@pytest.mark.parametrize("again", [None, WHOLE[0], *PART])
@RUN_FOR_NOTHING
def test_the_users_generator_is_left_alone(again: str | None) -> None:
    pipe = by_layers(make(again=again, layers=4), 2)
    pipeline = ps.Pipeline(pipe, "ZBV", microbatches=4, loss=F.mse_loss, seed=1, ranks=1)
    batch, target = make_batch()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    pipeline.step(batch, target=target)
    pipeline.evaluate(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_generator_is_given_back_after_a_failure() -> None:
    class Failing(Noise):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("no")

    pipeline = ps.Pipeline([Failing()], "GPipe", microbatches=2, loss=mean_of, seed=1)
    before = torch.get_rng_state()
    with pytest.raises(ps.errors.PipelineError):
        draw(pipeline)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipeline.random_step == 0


def test_evaluation_draws_by_the_step_and_leaves_it_alone() -> None:
    def evaluate() -> list[float]:
        drawn: list[float] = pipeline.evaluate(torch.zeros(2, 1)).outputs.flatten().tolist()
        return drawn

    pipeline = ps.Pipeline([Noise()], "GPipe", microbatches=2, loss=mean_of, seed=1)
    first, trained = evaluate(), draw(pipeline)
    assert evaluate() not in (first, trained)
    assert evaluate() == evaluate()
    assert pipeline.random_step == 1


def test_setting_the_step_continues_an_earlier_run() -> None:
    pipeline = ps.Pipeline([Noise()], "GPipe", microbatches=2, loss=mean_of, seed=1)
    whole = [draw(pipeline) for _ in range(4)]
    later = ps.Pipeline([Noise()], "GPipe", microbatches=2, loss=mean_of, seed=1)
    later.random_step = 2
    assert [draw(later) for _ in range(2)] == whole[2:]


@pytest.mark.gpu
def test_a_cuda_device_draws_by_layer_too_and_keeps_its_state() -> None:
    def on_device(stages: int, family: str) -> Run:
        pipe = by_layers(make(), stages).to("cuda")
        settings: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss, "device": "cuda"}
        pipeline = ps.Pipeline(pipe, family, seed=1, **settings)
        batch, target = (tensor.cuda() for tensor in make_batch())
        # Making a model seeds the device too, so that its state is looked at from here on.
        before = torch.cuda.get_rng_state()
        loss = pipeline.step(batch, target=target).loss
        pipeline.evaluate(batch)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        return loss or 0.0, gradients_of(pipeline.named_parameters())

    expected = on_device(1, "GPipe")
    for stages, family in ((4, "1F1B"), (4, "ZBV")):
        assert far(on_device(stages, family), expected) == {}


# ---- repeated runs


def train(family: str, stages: int) -> dict[str, torch.Tensor]:
    """Return the parameters after five steps."""
    model = make()
    pipeline = ps.Pipeline(
        by_layers(model, stages), family, microbatches=4, loss=F.mse_loss, seed=1234
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    batch, target = make_batch()
    for _ in range(5):
        optimizer.zero_grad()
        pipeline.step(batch, target=target)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("family", "stages"), [("1F1B", 4), ("ZBV", 4), ("DualPipeV", 4)])
def test_repeated_runs_end_with_the_same_bits(family: str, stages: int) -> None:
    first = train(family, stages)
    torch.rand(3)
    second = train(family, stages)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_copies_of_a_seeded_pipe_can_be_made() -> None:
    for pipe in (by_layers(make(layers=2), 2), by_tracing(make(layers=2), 2)):
        expected = run(pipe, "GPipe")
        copied = Pipe(tuple(deepcopy(stage) for stage in pipe.stages), pipe.dataflow)
        for parameter in copied.parameters():
            parameter.grad = None
        assert far(run(copied, "GPipe"), expected) == {}

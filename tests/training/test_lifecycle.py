"""A pipeline as an object: modes, closing, its state, and what it takes for a schedule."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps
from penstock.errors import (
    ArgumentError,
    BatchError,
    ModelError,
    PeerLostError,
    PenstockError,
    PipelineError,
)
from penstock.schedules.registry import FAMILIES, Family
from tests.models import (
    copy_blocks,
    differences,
    gradients_of,
    make_batch,
    make_blocks,
    mean_loss,
    run_reference,
)
from tests.processes import Processes

BLOCKS = make_blocks(2)
BATCH, TARGET = make_batch(8)
CLOSED = "the pipeline is closed; build another one to continue"


def make_pipeline(schedule: str | Path | ps.Schedule = "1F1B", **settings: object) -> ps.Pipeline:
    if schedule == "1F1B":
        settings = {"microbatches": 4, **settings}
    return ps.Pipeline(copy_blocks(BLOCKS), schedule, loss=mean_loss, **settings)  # type: ignore[arg-type]  # settings of any type


# ---- modes and gradients


def test_train_and_eval_set_the_mode_of_all_stages() -> None:
    pipeline = make_pipeline()
    assert pipeline.eval() is pipeline
    assert [module.training for module in pipeline.modules.values()] == [False, False]
    assert pipeline.train() is pipeline
    assert [module.training for module in pipeline.modules.values()] == [True, True]
    pipeline.train(False)
    assert [module.training for module in pipeline.modules.values()] == [False, False]


def test_evaluation_mode_turns_dropout_off() -> None:
    stages = [nn.Linear(4, 4), nn.Dropout(0.5)]
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=2).eval()
    x = torch.ones(8, 4)
    assert torch.equal(pipeline.evaluate(x).outputs, stages[0](x))


def test_zero_grad_resets_the_gradients() -> None:
    pipeline = make_pipeline()
    pipeline.step(BATCH, target=TARGET)
    pipeline.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in pipeline.parameters() if p.grad is not None)
    pipeline.zero_grad()
    assert [p.grad for p in pipeline.parameters()] == [None] * 4


# ---- closing


def test_closed_pipeline_keeps_its_state_and_refuses_to_run() -> None:
    with make_pipeline() as pipeline:
        pipeline.step(BATCH, target=TARGET)
        state = pipeline.state_dict()
    pipeline.close()
    assert differences(pipeline.state_dict(), state, limit=0.0) == {}
    assert repr(pipeline) == (
        "<Pipeline 1F1B, 4 microbatches: stages [0, 1] of 2 as ranks [0, 1] of 2 on cpu, closed>"
    )
    for use in (
        lambda: pipeline.step(BATCH, target=TARGET),
        lambda: pipeline.evaluate(BATCH),
        lambda: pipeline.full_state_dict(),
        lambda: pipeline.clip_grad_norm_(1.0),
        lambda: pipeline.guarded(lambda: None),
    ):
        with pytest.raises(PipelineError) as caught:
            use()
        assert str(caught.value) == CLOSED


def close_one_after_the_other(rank: int) -> list[str]:
    """Rank 1 closes its pipeline while rank 0 takes one more step."""
    pipeline = make_pipeline(group=dist.group.WORLD)
    pipeline.step(BATCH, target=TARGET)
    said = []
    if rank == 1:
        pipeline.close()
    for _ in range(2):
        try:
            pipeline.step(BATCH, target=TARGET)
        except PenstockError as error:
            said.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    pipeline.close()
    pipeline.close()
    return said


def test_ranks_that_continue_after_another_closed_get_an_error(two_processes: Processes) -> None:
    left, closed = two_processes.run(close_one_after_the_other)
    assert closed == [f"PipelineError: {CLOSED}"] * 2
    assert len(left) == 2
    assert all(text.startswith(PeerLostError.__name__) for text in left)
    assert all("its pipeline was closed" in text for text in left)


# ---- state


def load_own_part(rank: int) -> list[object]:
    """Load each rank's part from the whole model's state."""
    pipeline = make_pipeline(group=dist.group.WORLD)
    model = nn.Sequential(*make_blocks(4)[:2])
    pipeline.load_state_dict(model.state_dict())
    loss = pipeline.step(BATCH, target=TARGET).loss
    found = gradients_of(pipeline.named_parameters())
    expected = run_reference(make_blocks(4)[:2], BATCH, TARGET)
    wanted = {name: expected.gradients[name] for name in found}
    return [loss == pytest.approx(expected.loss), differences(found, wanted), sorted(found), rank]


def test_state_of_the_whole_model_is_loaded_part_by_part(two_processes: Processes) -> None:
    assert two_processes.run(load_own_part) == [
        [True, {}, ["0.0.bias", "0.0.weight"], 0],
        [True, {}, ["1.0.bias", "1.0.weight"], 1],
    ]


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(x)
        return result


def test_shared_parameter_is_loaded_from_either_of_its_names() -> None:
    pipe = ps.split(Tied(), layers="layers", stages=2)
    pipeline = ps.Pipeline(pipe, "1F1B", microbatches=2)
    state = {name: value + 1 for name, value in pipeline.full_state_dict().items()}
    del state["head.weight"]
    pipeline.load_state_dict(state)
    loaded = pipeline.state_dict()
    assert differences(loaded, state | {"head.weight": state["embedding.weight"]}) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"1.0.bias": None},
            "the state must have every name of stage 1 (missing: '1.0.bias'); give the state of "
            "this model, or strict=False",
        ),
        (
            {"1.0.bias": torch.zeros(3)},
            "'1.0.bias' must have the shape (16,) (got (3,)); give the state of this model",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_is_loaded(
    change: dict[str, torch.Tensor | None], message: str
) -> None:
    pipeline = make_pipeline()
    before = pipeline.full_state_dict()
    given = {name: value + 1 for name, value in before.items()} | change
    state = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ModelError) as caught:
        pipeline.load_state_dict(state)
    assert str(caught.value) == message
    assert differences(pipeline.full_state_dict(), before, limit=0.0) == {}


def test_missing_names_are_left_alone_unless_strict() -> None:
    pipeline = make_pipeline()
    before = pipeline.full_state_dict()
    pipeline.load_state_dict({"1.0.bias": before["1.0.bias"] + 1}, strict=False)
    assert (
        differences(
            pipeline.state_dict(), before | {"1.0.bias": before["1.0.bias"] + 1}, limit=0.0
        )
        == {}
    )


def load_sharded(rank: int) -> dict[str, float]:
    """Load a whole state into a stage whose parameters are sharded over both ranks."""
    mesh = init_device_mesh("cpu", (2,))
    stage = nn.Linear(4, 4)
    fully_shard(stage, mesh=mesh)
    pipeline = ps.Pipeline([stage], "GPipe", ranks=1, microbatches=2)
    state = {"0.weight": torch.arange(16.0).reshape(4, 4), "0.bias": torch.arange(4.0) + rank * 0}
    pipeline.load_state_dict(state)
    return differences(pipeline.full_state_dict(), state, limit=0.0)


def test_sharded_stage_loads_its_shards_from_a_whole_state(two_processes: Processes) -> None:
    assert two_processes.run(load_sharded) == [{}, {}]


# ---- what is taken for a schedule


def test_csv_file_is_accepted_as_a_schedule(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    ps.build("GPipe", ranks=2, microbatches=4).to_csv(file)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    for given in (file, str(file)):
        pipeline = make_pipeline(given)
        assert pipeline.schedule == ps.Schedule.from_csv(file)
        assert pipeline.step(BATCH, target=TARGET).loss == pytest.approx(expected.loss)


def test_other_values_are_refused_as_a_schedule() -> None:
    with pytest.raises(ArgumentError) as caught:
        make_pipeline(lambda: None)  # type: ignore[arg-type]  # on purpose
    assert str(caught.value) == (
        "schedule must be the name of a family, a CSV file, a Schedule or a Plan (got function); "
        "make one from a function with build(function, ranks=..., microbatches=...)"
    )


def test_schedule_is_built_once_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # It was built when the pipeline was made and again in the first step, and checked three times:
    # the second build had no reason but that the first was not kept.
    built = []

    def generate(ranks: int, microbatches: int, stages_per_rank: int) -> ps.Schedule:
        built.append((ranks, microbatches, stages_per_rank))
        return ps.build("1F1B", ranks=ranks, microbatches=microbatches)

    monkeypatch.setitem(FAMILIES, "built once", Family("built once", generate, 1))
    pipeline = make_pipeline("built once", microbatches=4)
    for _ in range(2):
        pipeline.step(BATCH, target=TARGET)
    assert built == [(2, 4, 1)]


# ---- arguments of a step


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_second_positional_argument_mentions_the_target(call: str) -> None:
    # The target went to the first stage's forward, whose TypeError says nothing of a target.
    pipeline = make_pipeline()
    with pytest.raises(BatchError) as caught:
        getattr(pipeline, call)(BATCH, TARGET)
    assert str(caught.value) == (
        "rank 0: stage 0 must be given at most 1 positional arguments (got 2); pass the target by "
        "name, as target=..."
    )
    pipeline.step(BATCH, target=TARGET)


def step_with_the_target_by_position(rank: int) -> str:
    pipeline = make_pipeline(group=dist.group.WORLD)
    with pytest.raises(BatchError) as caught:
        pipeline.step(*((BATCH, TARGET) if rank == 0 else ()), target=TARGET)
    return str(caught.value)


def test_all_ranks_refuse_a_second_positional_argument(two_processes: Processes) -> None:
    first, second = two_processes.run(step_with_the_target_by_position)
    assert first == second
    assert first.startswith("rank 0: stage 0 must be given at most 1 positional arguments")


def test_stage_whose_hook_adds_to_its_arguments_takes_any_number() -> None:
    def keep_first(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return args[:1]

    stages = copy_blocks(BLOCKS)
    stages[0].register_forward_pre_hook(keep_first)
    pipeline = ps.Pipeline(stages, "1F1B", microbatches=4, loss=mean_loss)
    expected = run_reference(BLOCKS, BATCH, TARGET)
    assert pipeline.step(BATCH, BATCH, target=TARGET).loss == pytest.approx(expected.loss)


# ---- short descriptions


def test_result_of_a_step_is_described_in_one_line() -> None:
    # The generated repr printed every number of the outputs and the whole timeline.
    result = make_pipeline().step(BATCH, target=TARGET, return_outputs=True, record=True)
    assert result.timeline is not None
    assert repr(result) == (
        f"StepResult(loss={result.loss!r}, outputs=Tensor (8, 16), "
        f"timeline={result.timeline.end_time:.4g} s)"
    )
    assert repr(ps.StepResult(None, {"logits": torch.zeros(2)})) == (
        "StepResult(loss=None, outputs=dict)"
    )

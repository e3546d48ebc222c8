"""Facts on which all ranks must agree."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import penstock as ps
from penstock.ranks.agreement import (
    Fact,
    agree,
    agree_where_known,
    group_ranks,
    plain_fact,
)
from penstock.ranks.control import GroupControl
from penstock.splitting.by_layers.layers import split_layers
from penstock.training.build.rank_facts import model_fact, version_facts
from tests.processes import Processes


def open_group() -> GroupControl:
    group = dist.group.WORLD
    assert group is not None
    return GroupControl(group)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(ps.PenstockError) as caught:
        call()
    return str(caught.value)


def refusal(reason: str) -> str:
    return f"the ranks do not agree: {reason}; give all ranks the same"


def test_ranks_are_grouped_by_value_and_the_rarest_value_comes_first() -> None:
    assert group_ranks({0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}) == (
        "ranks 1, 3 have b, ranks 0, 2, 4 have a"
    )
    assert group_ranks({0: "a", 1: "b"}, "letter") == "rank 0 has letter a, rank 1 has b"


# ---- facts


class Counting:
    """A control that notes how many bytes it is asked to send."""

    def __init__(self, inner: GroupControl) -> None:
        self.inner, self.sent = inner, [0]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent.append(len(data))
        return self.inner.gather_bytes(data)

    def gather(self, value: object) -> list[Any]:
        return self.inner.gather(value)


def agree_on_little(rank: int) -> tuple[list[int], list[str]]:
    counting: Any = Counting(open_group())
    long: list[Fact] = [plain_fact("numbers", list(range(10_000))), plain_fact("size", 3)]
    agree(counting, long)
    agree_where_known(counting, [model_fact(0, None if rank else (("weight", "float32"),))])
    facts = [*long, plain_fact("colour", "blue"), plain_fact("depth", rank // 3)]
    one = message_of(lambda: agree(counting, facts))
    both = [plain_fact("height", rank % 2), plain_fact("depth", rank // 3)]
    return counting.sent[:3], [one, message_of(lambda: agree(counting, both))]


def test_ranks_that_agree_exchange_only_digests(four_processes: Processes) -> None:
    messages = [
        refusal("rank 3 has depth 1, ranks 0, 1, 2 have 0"),
        refusal("ranks 0, 2 have height 0, ranks 1, 3 have 1 (and they differ in depth)"),
    ]
    assert four_processes.run(agree_on_little, seconds=300) == [([0, 16, 16], messages)] * 4


def differ_in_versions(rank: int) -> str:
    facts = version_facts(torch_version="2.11.0" if rank == 2 else "2.13.0")
    return message_of(lambda: agree(open_group(), facts))


def test_different_versions_of_torch_are_refused(four_processes: Processes) -> None:
    message = refusal("rank 2 has torch 2.11.0, ranks 0, 1, 3 have 2.13.0")
    assert four_processes.run(differ_in_versions, seconds=300) == [message] * 4


# ---- pipelines


class Model(nn.Module):
    """Two layers whose width and names can differ."""

    def __init__(self, width: int = 4, name: str = "middle") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential() for _ in range(2))
        for layer in self.layers:
            layer.add_module("first", nn.Linear(4, width))
            layer.add_module(name, nn.ReLU())
            layer.add_module(f"{name}_out", nn.Linear(width, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def pipe_of(model: nn.Module) -> ps.Pipe:
    return split_layers(
        model, ["layers"], 2, (torch.zeros(1, 4, dtype=next(model.parameters()).dtype),), {}
    )


def build(stages: Any, schedule: Any = "1F1B", **settings: Any) -> ps.Pipeline:
    given: dict[str, Any] = {"microbatches": 4, "loss": mse_loss} | settings
    return ps.Pipeline(stages, schedule, group=dist.group.WORLD, **given)


def freeze(model: nn.Module) -> nn.Module:
    model.get_parameter("layers.1.first.weight").requires_grad_(False)
    return model


def differ_in_models(rank: int) -> list[str]:
    others = [Model(width=6), Model().double(), Model(name="centre"), freeze(Model())]
    messages = []
    for model in others if rank else [Model()] * len(others):
        pipe, stages = pipe_of(model), [*model.get_submodule("layers").children()]
        messages += [message_of(partial(build, pipe)), message_of(partial(build, stages))]
    return messages


def test_different_models_are_refused_naming_parameters(two_processes: Processes) -> None:
    found, same = two_processes.run(differ_in_models, seconds=300)
    assert found == same
    wide = (
        "in stage 0, of '{0}first.weight' rank 0 has float32 [4, 4], rank 1 has float32 [6, 4]; "
        "of '{0}first.bias' rank 0 has float32 [4], rank 1 has float32 [6]; "
        "of '{0}middle_out.weight' rank 0 has float32 [4, 4], rank 1 has float32 [4, 6] "
        "(and they differ in stage 1)"
    )
    frozen = (
        "in stage 1, of '{0}first.weight' rank 0 has float32 [4, 4], "
        "rank 1 has float32 [4, 4], frozen"
    )
    assert found[:2] == [refusal(wide.format(path)) for path in ("layers.0.", "")]
    assert [message.split("; ")[0].split(", of ")[1] for message in found[2:6]] == [
        "'layers.0.first.weight' rank 0 has float32 [4, 4], rank 1 has float64 [4, 4]",
        "'first.weight' rank 0 has float32 [4, 4], rank 1 has float64 [4, 4]",
        "'layers.0.middle_out.weight' rank 0 has float32 [4, 4], rank 1 has nothing of that name",
        "'middle_out.weight' rank 0 has float32 [4, 4], rank 1 has nothing of that name",
    ]
    assert found[6:] == [refusal(frozen.format(path)) for path in ("layers.1.", "")]


def differ_in_settings(rank: int) -> list[str]:
    def given(**settings: tuple[Any, Any]) -> str:
        own = {name: values[rank] for name, values in settings.items()}
        schedule = own.pop("schedule", "1F1B")
        return message_of(lambda: build(pipe_of(Model()), schedule, **own))

    orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    turned = [orders[0], ["1F0", "1F1", "1B1", "1B0"]]
    schedules = ps.Schedule.from_orders(orders), ps.Schedule.from_orders(turned)
    return [
        given(schedule=("1F1B", "GPipe")),
        given(schedule=schedules, microbatches=(2, 2)),
        given(microbatches=(4, 6)),
        given(loss=(mse_loss, None)),
        given(reduction=("mean", len)),
        given(seed=(None, 3)),
        given(ties=((), (("0.layers.0.first.bias", "1.layers.1.first.bias"),))),
    ]


def test_different_schedules_and_settings_are_refused(two_processes: Processes) -> None:
    sizes = "for 2 stages on 2 ranks, 4 microbatches"
    reasons = [
        f"rank 0 has schedule 1F1B {sizes}, rank 1 has GPipe {sizes}",
        "at position 2 of rank 1 in the schedule, rank 0 has 1B0, rank 1 has 1B1",
        "rank 0 has microbatches 4, rank 1 has 6 (and they differ in schedule)",
        "rank 0 has loss given, rank 1 has none",
        "rank 0 has reduction mean, rank 1 has by a function",
        "rank 0 has seed none, rank 1 has 3",
        'rank 0 has ties [], rank 1 has [["0.layers.0.first.bias", "1.layers.1.first.bias"]]',
    ]
    assert (
        two_processes.run(differ_in_settings, seconds=300)
        == [[refusal(one) for one in reasons]] * 2
    )


def fail_to_build(rank: int) -> list[str]:
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    wrong: list[dict[str, Any]] = [
        {"schedule": "no such"},
        {"microbatches": None},
        {"stages": {7: stages[0]}},
        {"stages": 3},
        {"options": ps.RunOptions(cuda_graphs=True)},
    ]
    tied = [("0.weight", "1.wait")]
    messages = []
    for changes in wrong:
        settings = {"stages": stages} | (changes if rank == 1 else {})
        with pytest.raises(ps.PenstockError) as caught:
            build(**settings)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises(ps.PenstockError) as caught:
        build(stages, ties=tied)
    messages.append(f"{type(caught.value).__name__}: {caught.value}")
    # A failed build leaves nothing behind that would break the next one.
    build(stages)
    return messages


def test_a_build_that_fails_on_one_rank_fails_on_all(two_processes: Processes) -> None:
    others, failing = two_processes.run(fail_to_build, seconds=300)
    known = "PipelineError: rank 1 cannot build its part of the pipeline: "
    # What was checked before the ranks met failed on one of them, and the others waited.
    for other, own in zip(others, failing, strict=True):
        assert other == known + own.partition(": ")[2]
    assert [own.split(":")[0] for own in failing] == [
        "ScheduleNameError",
        "ArgumentError",
        "SizeError",
        "ArgumentError",
        "ArgumentError",
        "ModelError",
    ]


def change_own_stages(rank: int) -> None:
    pipe = pipe_of(Model())
    pipe.stages[rank].double()
    build(pipe)
    pipe = pipe_of(Model())
    for parameter in pipe.stages[rank].parameters():
        parameter.requires_grad_(False)
    build(pipe, loss=None)
    build({rank: nn.Linear(4 + rank, 4)})


def test_ranks_may_change_their_own_stages(
    two_processes: Processes,
) -> None:
    assert two_processes.run(change_own_stages, seconds=300) == [None, None]

"""A value that several stages of one rank need is sent to that rank once."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ir.dataflow import Dataflow
from penstock.passes.reroute import reroute
from penstock.ranks.fault_injection import FaultInjection
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import LocalTransport, Message
from penstock.splitting.by_tracing.cut.rerouting import LinkedValues
from penstock.splitting.pipe import Pipe
from penstock.splitting.placed_routes import place_values
from penstock.tensors.packet import Packet
from tests.models import differences
from tests.processes import Processes
from tests.splitting.checking import gradients, squares
from tests.splitting.dense import LAYERS, Dense, Reading, Way, split_dense
from tests.splitting.small import WIDTH, numbers

ROWS = 8
X = numbers(ROWS, WIDTH)
NOBODY = torch.zeros(ROWS)
# The way of splitting must not matter.
SPLITS: tuple[Way, ...] = ("layers", "traced")
# Families with two stages per rank, and where they are.
TWICE = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "DualPipeV")


def make() -> Dense:
    torch.manual_seed(0)
    return Dense()


def split(model: nn.Module, way: Way, stages: int = LAYERS) -> Pipe:
    return split_dense(model, way, stages, X)


def expected_gradients(steps: int = 1) -> dict[str, torch.Tensor]:
    model = make()
    for _ in range(steps):
        torch.autograd.backward(squares(model(X)))
    return gradients(model)


class Sent:
    """Counts the floating-point tensors of a step that go to other ranks, there and back."""

    def __init__(self, kind: type[Any]) -> None:
        self.numbers = [0, 0]
        self._kind, self._send = kind, kind.send

    def __enter__(self) -> "Sent":
        send, numbers = self._send, self.numbers

        def count(transport: Any, message: Message, packet: Packet) -> None:
            wide = [t for t in packet.tensors if t.shape[-1] == WIDTH]
            numbers[0 if message.is_forward else 1] += len(wide)
            send(transport, message, packet)

        self._kind.send = count
        return self

    def __exit__(self, *_: object) -> None:
        self._kind.send = self._send


# ---- in one process


# Eight values (the embedding, and what the layers 0 to 6 return) have 7 + 7 + 6 + ... + 1 = 35
# readers on later stages. Each goes to the ranks of its readers: 3 + 3 + 3 + 3 + 3 + 3 + 2 + 1.
@pytest.mark.parametrize("way", SPLITS)
def test_four_ranks_with_two_stages_get_every_value_once(way: Way) -> None:
    model = make()
    pipeline = ps.Pipeline(
        split(model, way), "Interleaved1F1B", microbatches=4, ranks=4, loss=squares
    )
    with Sent(LocalTransport) as sent:
        pipeline.step(X, target=NOBODY)
    assert sent.numbers == [4 * 21, 4 * 21]
    assert differences(gradients(model), expected_gradients()) == {}


# A V of four ranks and two stages each sends as many.
@pytest.mark.parametrize("way", SPLITS)
def test_a_v_gets_every_value_once(way: Way) -> None:
    model = make()
    pipeline = ps.Pipeline(split(model, way), "ZBV", microbatches=2, ranks=4, loss=squares)
    with Sent(LocalTransport) as sent:
        pipeline.step(X, target=NOBODY)
    assert sent.numbers == [2 * 21, 2 * 21]
    assert differences(gradients(model), expected_gradients()) == {}


@pytest.mark.parametrize("family", TWICE)
@pytest.mark.parametrize(("way", "microbatches"), [("layers", 5), ("traced", 4)])
def test_gradients_are_those_of_the_unsplit_model(
    way: Way, family: str, microbatches: int
) -> None:
    model = make()
    pipeline = ps.Pipeline(
        split(model, way, 4), family, microbatches=microbatches, ranks=2, loss=squares
    )
    for _ in range(2):
        pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients(2)) == {}


@pytest.mark.parametrize("way", SPLITS)
@pytest.mark.parametrize(("stages", "ranks"), [(8, 1), (8, 2), (4, 4)])
def test_other_numbers_of_stages_per_rank(way: Way, stages: int, ranks: int) -> None:
    model = make()
    pipeline = ps.Pipeline(
        split(model, way, stages), "Interleaved1F1B", microbatches=4, ranks=ranks, loss=squares
    )
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients()) == {}


@pytest.mark.parametrize("way", SPLITS)
def test_copies_of_the_model_share_only_where_both_do(way: Way) -> None:
    model = make()
    pipeline = ps.Pipeline(split(model, way, 2), "DualPipe", microbatches=4, loss=squares)
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients()) == {}


@pytest.mark.parametrize("way", SPLITS)
def test_one_pipe_serves_pipelines_with_different_placements_in_turns(way: Way) -> None:
    model = make()
    pipe = split(model, way)
    pipelines = [
        ps.Pipeline(pipe, family, microbatches=2, ranks=ranks, loss=squares)
        for family, ranks in (("Interleaved1F1B", 4), ("ZBV", 4), ("1F1B", 8))
    ]
    for pipeline in (*pipelines, *pipelines):
        pipeline.step(X, target=NOBODY)
        assert differences(gradients(model), expected_gradients()) == {}
    torch.testing.assert_close(pipe(X), model(X), rtol=0, atol=0)


@pytest.mark.parametrize("way", SPLITS)
def test_evaluation_sends_every_value_once(way: Way) -> None:
    model = make()
    pipeline = ps.Pipeline(
        split(model, way), "Interleaved1F1B", microbatches=4, ranks=4, loss=squares
    )
    with Sent(LocalTransport) as sent, torch.no_grad():
        found = pipeline.evaluate(X)
        torch.testing.assert_close(found.outputs, model(X), rtol=1e-13, atol=1e-13)
    assert sent.numbers == [4 * 21, 0]


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
@pytest.mark.parametrize("way", SPLITS)
def test_the_step_after_a_failed_one_is_right(way: Way, family: str) -> None:
    model = make()
    pipeline = ps.Pipeline(split(model, way), family, microbatches=4, ranks=4, loss=squares)
    calls = 0

    def fail(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("on purpose")

    handle = pipeline.modules[5].register_forward_hook(fail)
    with pytest.raises(ps.PenstockError, match="on purpose"):
        pipeline.step(X, target=NOBODY)
    handle.remove()
    model.zero_grad()
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(model), expected_gradients()) == {}


class Writing(Reading):
    """A layer that also writes to what the first layer has returned, which later layers read."""

    def forward(self, counts: torch.Tensor, *earlier: torch.Tensor) -> torch.Tensor:
        earlier[1].mul_(1.5)
        return super().forward(counts, *earlier)


# Stage 4 shares a rank with stage 0, which made the value. Later stages need what stage 4 has
# written, and not what was on their rank before. By layers such a value is refused.
@pytest.mark.parametrize(("way", "at"), [("layers", 7), ("traced", 4), ("traced", 7)])
def test_a_value_that_a_later_stage_writes_to_goes_through_that_stage(way: Way, at: int) -> None:
    models = [make(), make()]
    for model in models:
        layer = Writing()
        layer.linear = cast(Reading, model.layers[at]).linear
        model.layers[at] = layer
    torch.autograd.backward(squares(models[0](X)))
    pipeline = ps.Pipeline(
        split(models[1], way), "Interleaved1F1B", microbatches=4, ranks=4, loss=squares
    )
    pipeline.step(X, target=NOBODY)
    assert differences(gradients(models[1]), gradients(models[0])) == {}


# ---- as data


def test_the_dataflow_has_edges_within_ranks() -> None:
    pipe = split(make(), "layers")
    schedule = ps.build("Interleaved1F1B", ranks=4, microbatches=4, stages_per_rank=2)
    chain = [(stage, stage + 1) for stage in range(7)]
    assert pipe.dataflow.edges == tuple(chain)
    expected = sorted([*chain, (0, 4), (1, 5), (2, 6), (3, 7)])
    assert pipe.dataflow_on(schedule).edges == tuple(expected)


def test_a_traced_dataflow_has_no_edge_that_nothing_goes_along() -> None:
    pipe = split(make(), "traced")
    schedule = ps.build("ZBV", ranks=4, microbatches=4)
    chain = [(stage, stage + 1) for stage in range(7)]
    expected = sorted([*chain, (0, 7), (1, 6), (2, 5)])
    assert pipe.dataflow_on(schedule).edges == tuple(expected)


@pytest.mark.parametrize("way", SPLITS)
def test_stages_with_a_rank_each_keep_the_dataflow(way: Way) -> None:
    pipe, schedule = split(make(), way), ps.build("1F1B", ranks=8, microbatches=4)
    assert pipe.dataflow_on(schedule) == pipe.dataflow
    assert place_values(pipe.routes, pipe.num_stages, schedule) is None


def test_the_simulator_sends_what_a_rank_has_no_second_time() -> None:
    # Stage 3 needs value 0 again, which went there by stage 1 although rank 0 has made it.
    values = LinkedValues(4, {(0, 1): (0,), (1, 2): (1,), (1, 3): (0,), (2, 3): (2,)})
    schedule = ps.build("ZBV", ranks=2, microbatches=3)
    placed = values.place(schedule.placement.rank_of_stage)
    assert placed is not None
    assert placed.dataflow.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    costs = ps.Costs(send=1.0, message_bytes=8.0)
    before, after = (
        ps.simulate(reroute(schedule, flow), costs)
        for flow in (Dataflow(4, list(values.links)), placed.dataflow)
    )
    # Rank 0 sends a gradient less per microbatch, and rank 1 an activation.
    assert [b - a for a, b in zip(after.busy_seconds, before.busy_seconds, strict=True)] == [3, 3]
    # Rank 1 needs no room for the gradient of what it does not hand on.
    assert [b - a for a, b in zip(after.rank_peak_bytes, before.rank_peak_bytes, strict=True)] == [
        0,
        8,
    ]


def test_no_stage_becomes_the_end_of_the_model_because_nothing_goes_through_it() -> None:
    # Stage 2 only takes value 0 and hands it on, so that its rank would feed nobody.
    values = LinkedValues(4, {(0, 1): (0,), (1, 3): (1,), (0, 2): (2,), (2, 3): (2,)})
    assert values.place([0, 1, 1, 0]) is None
    assert values.place([0, 1, 2, 3]) is None


@pytest.mark.parametrize("way", SPLITS)
def test_a_schedule_with_messages_along_the_old_dataflow_still_runs(way: Way) -> None:
    model = make()
    pipe = split(model, way)
    schedule = ps.build("Interleaved1F1B", ranks=4, microbatches=2, stages_per_rank=2)
    old = ps.lower(reroute(schedule, pipe.dataflow))
    new = ps.lower(reroute(schedule, pipe.dataflow_on(schedule)))
    for lowered, number in ((old, 35), (new, 21)):
        pipeline = ps.Pipeline(pipe, lowered, loss=squares)
        with Sent(LocalTransport) as sent:
            pipeline.step(X, target=NOBODY)
        assert sent.numbers == [2 * number, 2 * number]
        assert differences(gradients(model), expected_gradients()) == {}


# ---- in real processes


def train(_rank: int, way: Way, family: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return how many values this rank sent in two steps, and its gradients."""
    model = make()
    pipeline = ps.Pipeline(
        split(model, way), family, microbatches=4, loss=squares, group=dist.group.WORLD
    )
    # Shapes are learned in the first step, and known in the second.
    with Sent(GroupTransport) as sent:
        for _ in range(2):
            pipeline.step(X, target=NOBODY)
    return sent.numbers, {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["Interleaved1F1B", "ZBV"])
@pytest.mark.parametrize("way", ["layers", pytest.param("traced", marks=pytest.mark.slow)])
def test_four_processes_get_every_value_once(
    way: Way, family: str, four_processes: Processes
) -> None:
    everyone = four_processes.run(train, way, family)
    sums = [sum(numbers[at] for numbers, _ in everyone) for at in (0, 1)]
    found = {name: gradient for _, held in everyone for name, gradient in held.items()}
    assert sums == [2 * 4 * 21, 2 * 4 * 21]
    assert differences(found, expected_gradients(2)) == {}


def train_by_order(_rank: int) -> dict[str, torch.Tensor]:
    """Return the gradients where messages have no tags."""
    pipeline = ps.Pipeline(
        split(make(), "layers", 4),
        "Interleaved1F1B",
        microbatches=4,
        loss=squares,
        group=dist.group.WORLD,
        options=ps.RunOptions(fault_injection=FaultInjection(by_order=True)),
    )
    for _ in range(3):
        pipeline.step(X, target=NOBODY)
    return {n: p.grad for n, p in pipeline.named_parameters() if p.grad is not None}


def test_messages_without_tags_stay_in_order(two_processes: Processes) -> None:
    found = {n: g for held in two_processes.run(train_by_order) for n, g in held.items()}
    assert differences(found, expected_gradients(3)) == {}

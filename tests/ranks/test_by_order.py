"""The exactness matrix where messages have no names and are matched by order alone, as on NCCL.

Over gloo, with a group of two per direction and the same tag for everything: whatever changes
places is taken for something else. Gradients are compared after every step.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.ranks.fault_injection import FaultInjection
from tests.models import differences, gradients_of, make_batch, make_stages, mean_loss
from tests.processes import Processes
from tests.strategies import FAMILY_NAMES
from tests.tables import read_schedule
from tests.training.test_gradients import shuffle
from tests.training.test_processes import count_sends

TRAINING_FAMILIES = [name for name in FAMILY_NAMES if name != "ForwardOnly"]

EQUAL = [6] * 9
DIFFERENT = [6, 3, 8, 5, 7, 4, 9, 2, 6]

# Rows of the batch, and how the step is to fail, if it is. Every form comes where nothing is known
# of it, where it is known but not proven, and again after other forms and failures.
STEPS = [
    (8, None),
    (8, None),
    (8, None),
    (12, None),
    (8, None),
    (12, None),
    (8, "forward"),
    (12, None),
    (8, None),
    (8, "backward"),
    (8, None),
    (10, "forward"),
    (10, "backward"),
    (10, None),
    (10, None),
]


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # autograd's form
        raise ValueError("broken on purpose")


class Fragile(nn.Module):
    """A layer over the sum of what comes in, which can be made to fail in its second call."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        for parameter in self.layer.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=generator)
        self.begin(None)

    def begin(self, fails_in: str | None) -> None:
        self.fails_in, self.calls = fails_in, 0

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = torch.tanh(self.layer(sum(values[1:], values[0])))
        if self.calls == 2 and self.fails_in == "forward":
            raise ValueError("broken on purpose")
        if self.calls == 2 and self.fails_in == "backward":
            output = _FailInBackward.apply(output)  # type: ignore[no-untyped-call]  # untyped upstream
        return output


class Model(nn.Module):
    """Layers that feed one another as a dataflow says."""

    def __init__(self, widths: Sequence[int], flow: ps.Dataflow | None = None) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = [Fragile(a, b, seed) for seed, (a, b) in enumerate(pairs)]
        self.held = nn.ModuleList(self.layers)
        self.flow = ps.Dataflow.chain(len(self.layers)) if flow is None else flow

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for number, layer in enumerate(self.layers):
            producers = self.flow.producers(number)
            outputs.append(layer(*([outputs[p] for p in producers] or [batch])))
        return outputs[-1]


def reference_of(
    model: Model, batch: torch.Tensor, target: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the unsplit model."""
    twin = deepcopy(model)
    twin.zero_grad()
    loss = mean_loss(twin(batch), target)
    torch.autograd.backward(loss)
    return loss.item(), gradients_of(twin.named_parameters())


def run_steps(
    name: str, model: Model, stages: Sequence[nn.Module], schedule: str | ps.Schedule
) -> list[str]:
    """Return what was wrong on this rank, in any step."""
    pipeline = ps.Pipeline(
        stages,
        schedule,
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(fault_injection=FaultInjection(by_order=True)),
    )
    wrong = []
    for number, (rows, fails_in) in enumerate(STEPS):
        batch, target = make_batch(rows, width=model.layers[0].layer.in_features)
        for layer in model.layers:
            layer.begin(None)
        loss, gradients = reference_of(model, batch, target)
        model.zero_grad()
        model.layers[len(model.layers) // 2 - 1].begin(fails_in)
        if fails_in is not None:
            with pytest.raises(ps.errors.PipelineError, match="ValueError: broken on purpose"):
                pipeline.step(batch, target=target)
            continue
        problems = [] if pipeline.step(batch, target=target).loss == near(loss) else ["loss"]
        found = gradients_of(model.named_parameters())
        problems += differences(found, {key: gradients[key] for key in found})
        problems += [] if found else ["no gradients"]
        if pipeline.evaluate(batch, target=target, microbatches=2).loss != near(loss):
            problems.append("evaluation")
        wrong += [f"{name}, step {number}, {rows} rows: {problem}" for problem in problems]
    return wrong


def near(number: float) -> Any:
    return pytest.approx(number, abs=1e-12)


def run_families(rank: int, families: Sequence[str], widths: Sequence[int]) -> list[str]:
    del rank
    wrong = []
    for family in families:
        model = Model(widths)
        stages = make_stages(family, dist.get_world_size(), model.layers)
        wrong += run_steps(family, model, stages, family)
    return wrong


def assert_exact(processes: Processes, families: Sequence[str], widths: Sequence[int]) -> None:
    found = processes.run(run_families, families, widths, seconds=300)
    assert found == [[]] * processes.num_ranks


# Activations and gradients of one channel changed places while shapes were learned: gradient
# receives were started at once, activation receives not before somebody waited. With equal sizes
# the numbers were wrong, with others the backend stopped.
def test_channels_with_both_kinds_of_messages_are_exact_in_every_step(
    two_processes: Processes,
) -> None:
    assert_exact(two_processes, ["ZBV", "Interleaved1F1B"], EQUAL)


def test_channels_with_messages_of_different_sizes_are_exact_in_every_step(
    two_processes: Processes,
) -> None:
    assert_exact(two_processes, ["InterleavedZeroBubble"], DIFFERENT)


def test_copies_of_a_model_are_exact_in_every_step(four_processes: Processes) -> None:
    assert_exact(four_processes, ["DualPipe"], EQUAL)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [EQUAL, DIFFERENT], ids=["equal", "different"])
def test_every_family_is_exact_in_every_step(
    widths: Sequence[int], two_processes: Processes, four_processes: Processes
) -> None:
    assert_exact(two_processes, TRAINING_FAMILIES, widths)
    assert_exact(four_processes, TRAINING_FAMILIES, widths)


# ---- models that are not a chain, and orders of any kind


def run_skips(rank: int, cases: Sequence[tuple[str, int]]) -> list[str]:
    """Families with skips between stages, in a random order that keeps the waits."""
    del rank
    wrong = []
    for family, seed in cases:
        random = Random(seed)
        chain = ps.build(family, ranks=dist.get_world_size(), microbatches=4)
        skips = [(p, c) for c in range(chain.num_stages) for p in range(c - 1)]
        edges = [*chain.dataflow.edges, *random.sample(skips, min(3, len(skips)))]
        flow = ps.Dataflow(chain.num_stages, edges)
        schedule = shuffle(ps.passes.split_backward(replace(chain, dataflow=flow)), random)
        model = Model([5] * (chain.num_stages + 1), flow)
        wrong += run_steps(f"{family} with seed {seed}", model, model.layers, schedule)
    return wrong


def test_skips_in_any_order_are_exact_in_every_step(two_processes: Processes) -> None:
    assert two_processes.run(run_skips, [("ZBV", 0), ("Interleaved1F1B", 1)]) == [[], []]


@pytest.mark.slow
def test_many_orders_with_skips_are_exact_in_every_step(
    two_processes: Processes, four_processes: Processes
) -> None:
    families = ("1F1B", "ZBV", "Interleaved1F1B", "LoopedBFS")
    cases = [(family, seed) for family in families for seed in range(3)]
    assert two_processes.run(run_skips, cases, seconds=300) == [[]] * 2
    assert four_processes.run(run_skips, cases, seconds=300) == [[]] * 4


# Rank 0 is ready for the gradient before it has sent what that is the gradient of.
EARLY_RECEIVES = """
    0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1
    1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""


def run_early_receives(rank: int) -> dict[str, float]:
    del rank
    model = Model([5] * 3)
    batch, target = make_batch(4, width=5)
    pipeline = ps.Pipeline(
        model.layers, read_schedule(EARLY_RECEIVES), loss=mean_loss, group=dist.group.WORLD
    )
    expected = reference_of(model, batch, target)[1]
    pipeline.step(batch, target=target)
    found = gradients_of(model.named_parameters())
    return differences(found, {key: expected[key] for key in found})


def test_gradient_may_be_awaited_before_its_activation_is_sent(two_processes: Processes) -> None:
    # The receive was dropped without a word, since the form of what it gets was not known yet.
    assert two_processes.run(run_early_receives) == [{}, {}]


# ---- what is checked, and what that costs


def count_steps(rank: int) -> list[int]:
    """Messages of steps with one form: all that gloo sends, labels, forms and tensors alike."""
    del rank
    model = Model([5] * 5)
    batch, target = make_batch(8, width=5)
    pipeline = ps.Pipeline(
        model.layers,
        "ZBV",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(fault_injection=FaultInjection(by_order=True)),
    )
    step = partial(pipeline.step, batch, target=target)

    def fail() -> None:
        model.layers[1].begin("forward")
        with pytest.raises(ps.errors.PipelineError, match="broken on purpose"):
            step()
        model.layers[1].begin(None)

    first, second, third = (count_sends(step) for _ in range(3))
    twenty = count_sends(lambda: [step() for _ in range(20)])
    fail()
    after_failure = [count_sends(step) for _ in range(3)]
    return [first, second, third, twenty, *after_failure]


def test_labels_go_with_the_first_two_steps_of_a_form_and_after_a_failure(
    two_processes: Processes,
) -> None:
    # 8 tensors a step, each with a label; the 4 activations among them are described as well.
    learning, checking, steady = 8 + 8 + 4, 8 + 8, 8
    expected = [learning, checking, steady, 20 * steady, learning, checking, steady]
    assert two_processes.run(count_steps) == [expected] * 2


class SwapFirstTwo:
    """Holds back the first receive that it is given until the second has been posted."""

    def __init__(self) -> None:
        self.held: list[Callable[[], None]] = []
        self.is_done = False

    def __call__(self, action: ps.Action, run: Callable[[], None]) -> None:
        del action
        if self.is_done:
            run()
        elif not self.held:
            self.held.append(run)
        else:
            run()
            self.held[0]()
            self.is_done = True


def swap_receives(rank: int) -> str:
    """Return the error of a step in which rank 1 expects two messages in the wrong order."""
    model = Model([5] * 3)
    batch, target = make_batch(8, width=5)
    pipeline = ps.Pipeline(
        model.layers,
        "GPipe",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        options=ps.RunOptions(
            around={ps.Kind.RECV_F: SwapFirstTwo()} if rank == 1 else {},
            fault_injection=FaultInjection(by_order=True),
        ),
    )
    with pytest.raises(ps.errors.PeerLostError) as caught:
        pipeline.step(batch, target=target)
    assert all(parameter.grad is None for parameter in model.layers[1].parameters())
    return str(caught.value)


@pytest.mark.slow  # it ends its processes
def test_messages_in_the_wrong_order_are_named_on_every_rank() -> None:
    with Processes(2) as processes:
        found = processes.run(swap_receives)
    for message in found:
        assert (
            "the next message from rank 0 to rank 1 must be number 0, the activation of "
            "microbatch 1 on edge 0"
        ) in message
        assert "(got number 0, the activation of microbatch 0 on edge 0" in message

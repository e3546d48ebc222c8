"""The bytes that recomputing and offloading hold, counted and predicted."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.loss.weigher import KnownWeights
from penstock.measuring.live_memory import LiveMemory
from penstock.parallel.replica import replica_of
from penstock.ranks.transport import LocalTransport
from penstock.step.executor import Executor
from penstock.step.overlap.overlaps import Overlaps
from penstock.step.program.entries import order_for_one_process
from penstock.step.stage import Stage
from penstock.step.step_data import Microbatches, Results
from tests.tables import read_schedule

WIDTH, LAYERS, MICROBATCHES = 512, 3, 4
# Small things: states of random number generators, losses, numbers of the optimizer.
SMALL = 50_000


class Held:
    """Runs a schedule of one stage, and notes the bytes on the device after every action."""

    def __init__(self, text: str, *, is_split: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        stage = Stage(0, module := nn.Sequential(*layers), replica_of(module))
        if is_split:
            stage.prepare_split()
        self.schedule = read_schedule(text)
        transport, self.live = LocalTransport(1), LiveMemory()
        rows = order_for_one_process(self.schedule)
        around = dict.fromkeys(ps.Kind, self._note)
        self.executor = Executor(
            self.schedule,
            rows,
            {0: stage},
            transport,
            loss=lambda y, t: (y * t).sum(),
            around=around,
            overlaps=Overlaps(torch.device("cpu")),
        )
        self.bytes: list[int] = []
        batch = [torch.randn(WIDTH // 2, WIDTH) for _ in range(MICROBATCHES)]
        for _ in range(2):
            transport.begin_step(b"")
            module.zero_grad(set_to_none=False)
            self.bytes.clear()
            self.executor.run(self._batch(batch), Results())
            self.gradient = [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def _batch(self, batch: list[torch.Tensor]) -> Microbatches:
        return Microbatches(
            args=[(piece,) for piece in batch],
            kwargs={0: [{}] * MICROBATCHES},
            targets=batch,
            weigher=KnownWeights([1.0] * MICROBATCHES),
            row_weights=[1.0] * MICROBATCHES,
        )

    def _note(self, action: ps.Action, work: Callable[[], None]) -> None:
        del action
        with self.live:
            work()
        self.bytes.append(self.live.bytes() - self.executor.saved.host_bytes)


def changes(held: Held) -> list[int]:
    """Return the bytes after each action, counted from those after the last."""
    return [count - held.bytes[-1] for count in held.bytes]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "0F0 0F1 0F2 0F3 0RECOMPUTE0 0B0 0B1 0RECOMPUTE2 0B2 0RECOMPUTE3 0B3",
        "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0F3 0RELOAD0 0B0 0RELOAD1 0B1 0B2 0B3",
        "0F0 0F1 0OFFLOAD0 0F2 0F3 0RELOAD0 0RECOMPUTE1 0B0 0B1 0RECOMPUTE2 0B2 0B3",
    ],
)
def test_bytes_held_after_every_action_are_those_predicted(order: str, is_split: bool) -> None:
    first = Held("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", is_split=is_split)
    activation = first.bytes[1] - first.bytes[0]
    assert activation >= LAYERS * WIDTH // 2 * WIDTH * 4
    held = Held(order, is_split=is_split)
    # The inputs belong to the batch.
    costs = ps.Costs(activation_bytes=activation, input_bytes=0)
    expected = ps.simulate(held.schedule, costs).memory.tolist()
    assert changes(held) == pytest.approx(expected, abs=SMALL)
    for found, wanted in zip(held.gradient, first.gradient, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_host_memory_is_taken_once_and_used_again() -> None:
    order = "0F0 0F1 0OFFLOAD0 0F2 0OFFLOAD1 0F3 0RELOAD0 0B0 0RELOAD1 0B1 0B2 0B3"
    held = Held(order, is_split=False)
    activation = held.bytes[1] - held.bytes[0]
    # Two microbatches in two steps.
    assert held.executor.saved.host_bytes <= 2 * activation + SMALL

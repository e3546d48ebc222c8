"""Recorded steps of ranks on a GPU: when messages arrived, and who waited for them."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.sim.waits import find_waits
from penstock.training.options import TransportChoice
from tests.gpu.problems import closing
from tests.models import mean_loss
from tests.processes import Processes

pytestmark = pytest.mark.gpu

MICROBATCHES = 4
# Work takes milliseconds there, because the clocks of the ranks begin some tenths of one apart.
WIDTH = 4096
# How much later than the end of a wait its action may begin: only marks are in between.
NO_TIME = 1e-3


def make_stage(device: torch.device, layers: int) -> nn.Module:
    """Return a stage that takes some time."""
    width = WIDTH if device.type == "cuda" else 64
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)


def record_steps(
    rank: int, family: str, device: torch.device, transport: TransportChoice
) -> list[ps.Timeline]:
    """Record two steps, the first of which learns the shapes, and run one that is not."""
    del rank
    torch.manual_seed(0)
    stages = 2 if family == "1F1B" else 4
    pipeline = ps.Pipeline(
        [make_stage(device, layers=8) for _ in range(stages)],
        family,
        microbatches=MICROBATCHES,
        loss=mean_loss,
        group=dist.group.WORLD,
        device=device,
        options=ps.RunOptions(transport=transport if device.type == "cuda" else "auto"),
    )
    width = WIDTH if device.type == "cuda" else 64
    x, y = torch.ones(WIDTH, width, device=device), torch.zeros(WIDTH, width, device=device)
    found = []
    with closing(pipeline):
        for is_recorded in (True, False, True):
            timeline = pipeline.step(x, target=y, record=is_recorded).timeline
            if timeline is not None:
                found.append(timeline)
    return found


def spans_of(timeline: ps.Timeline, rank: int) -> dict[str, ps.sim.Span]:
    return {str(span.action): span for span in timeline.spans(rank)}


@pytest.mark.parametrize("transport", ["peer memory", "nccl"])
@pytest.mark.parametrize("family", ["1F1B", "ZBV"])
def test_receives_end_when_their_message_is_there(
    family: str, transport: TransportChoice, two_ranks: Processes, accelerator: torch.device
) -> None:
    first, second = two_ranks.run(record_steps, family, accelerator, transport)
    assert [t.end.tolist() for t in first] == [t.end.tolist() for t in second]
    for timeline in first:
        assert bool((timeline.start <= timeline.end).all())
        for rank in range(2):
            spans = spans_of(timeline, rank)
            starts = [span.start for span in spans.values()]
            assert all(a <= b for a, b in pairwise(starts))
            for span in spans.values():
                kind = span.action.kind
                if kind not in (ps.Kind.RECV_F, ps.Kind.RECV_B):
                    continue
                stage, microbatch = span.action.stage, span.action.microbatch
                uses = "F" if kind is ps.Kind.RECV_F else "BI"
                (user,) = [u for k in uses if (u := spans.get(f"{stage}{k}{microbatch}"))]
                assert span.end <= user.start + NO_TIME, (str(span.action), str(user.action))


@pytest.mark.parametrize("transport", ["peer memory", "nccl"])
def test_the_last_rank_waits_for_the_first_forward(
    transport: TransportChoice, two_ranks: Processes, accelerator: torch.device
) -> None:
    # Nothing else can keep rank 1 busy: its receive lasts about as long as that forward.
    timeline = two_ranks.run(record_steps, "1F1B", accelerator, transport)[0][-1]
    forward, receive = spans_of(timeline, 0)["0F0"], spans_of(timeline, 1)["1RECV_F0"]
    assert receive.end - receive.start > 0.3 * (forward.end - forward.start)
    # The wait for the first gradient is as clear on rank 0.
    waits = [gap for gap in find_waits(timeline).awaited if gap.rank == 0]
    assert str(waits[0].action) == "0B0"

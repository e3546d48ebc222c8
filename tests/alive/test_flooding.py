"""A pipeline trains while a caller floods the ports of its heartbeat."""

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from tests.alive import flooding_caller
from tests.alive.fault_ranks import run_ranks
from tests.models import make_batch, make_blocks, make_stages, mean_loss

SECONDS, CONNECTIONS = 60.0, 1000
MOST_DESCRIPTORS = 200
MOST_BYTES = 64 * 2**20


def train_under_attack(rank: int, folder: Path, seconds: float, connections: int) -> list[int]:
    """Train until the flood is over; return steps, descriptors and bytes that were added."""
    pipeline = ps.Pipeline(
        make_stages("1F1B", 2, make_blocks()),
        "1F1B",
        microbatches=4,
        loss=mean_loss,
        group=dist.group.WORLD,
        timeouts=ps.Timeouts(silence_seconds=20.0, folder=folder),
    )
    batch, target = make_batch()
    pipeline.step(batch, target=target)
    (node,) = [one for one in gc.get_objects() if type(one) is HeartbeatNode]
    ports: list[int | None] = [None, None]
    dist.all_gather_object(ports, node.port)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    settings = [str(seconds), str(connections), *map(str, ports)]
    attack = None
    if rank == 0:
        attack = subprocess.Popen([sys.executable, flooding_caller.__file__, *settings])
    steps = most = 0
    is_over = False
    while not is_over:
        result = pipeline.evaluate(batch, target=target)
        pipeline.step(batch, target=target)
        assert result.loss is not None
        steps, most = steps + 1, max(most, len(os.listdir("/dev/fd")))  # noqa: PTH208  # a count
        answers: list[bool | None] = [None, None]
        dist.all_gather_object(answers, attack is None or attack.poll() is not None)
        is_over = all(answers)
    assert attack is None or attack.returncode == 0
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    pipeline.close()
    return [steps, most, added]


@pytest.mark.slow
def test_pipeline_trains_while_a_caller_floods_its_ports(tmp_path: Path) -> None:
    # More than 64 open connections ended the heartbeat's thread, and with it the run.
    fates = run_ranks(train_under_attack, 2, tmp_path, tmp_path, SECONDS, CONNECTIONS)
    assert [(fate.exit_code, fate.stderr) for fate in fates] == [(0, "")] * 2, fates
    for fate in fates:
        steps, descriptors, added = fate.reported
        assert steps > 1
        assert descriptors < MOST_DESCRIPTORS
        assert added < MOST_BYTES

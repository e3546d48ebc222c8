"""Which links share a wire."""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.errors import ArgumentError
from penstock.measuring import MeasurementWarning, measure_wires
from penstock.measuring.wires import group_links
from tests.processes import Processes

Link = tuple[int, int]
FORTH, BACK = [(0, 1), (2, 3)], [(1, 0), (3, 2)]


def wires_of(*true: Sequence[Link]) -> list[list[Link]]:
    """Return what is found where each link takes 1 to 4 seconds, and these wires are true."""
    alone = {link: 1.0 + link[0] for link in FORTH + BACK}

    def together(links: Sequence[Link]) -> float:
        sums = [sum(alone[link] for link in links if link in wire) for wire in true]
        return max([*sums, *(alone[link] for link in links)])

    return group_links(alone, together)


@pytest.mark.parametrize(
    "wires",
    [
        [[(0, 1)], [(2, 3)], [(1, 0)], [(3, 2)]],
        [[(0, 1), (2, 3)], [(1, 0), (3, 2)]],
        [[(0, 1), (2, 3), (1, 0), (3, 2)]],
        [[(0, 1), (3, 2)], [(2, 3)], [(1, 0)]],
    ],
)
def test_links_that_wait_for_one_another_share_a_wire(wires: list[list[Link]]) -> None:
    assert wires_of(*wires) == wires


def measured(_rank: int) -> tuple[tuple[int, ...], ...]:
    assert dist.group.WORLD is not None
    warnings.simplefilter("ignore", MeasurementWarning)
    return measure_wires(dist.group.WORLD, large_bytes=1 << 16, repeats=1)


def test_every_rank_gets_the_table_that_costs_take(two_processes: Processes) -> None:
    table, other = two_processes.run(measured)
    assert table == other
    assert ps.Costs(wires=table).per_wire(2).tolist() == list(map(list, table))
    # The two directions share a wire or not, depending on what else runs.
    assert table in (((0, 0), (0, 0)), ((0, 1), (1, 0)))


def refuse(_rank: int) -> str:
    assert dist.group.WORLD is not None
    with pytest.raises(ArgumentError) as caught:
        measure_wires(dist.group.WORLD, large_bytes=0)
    return str(caught.value)


def test_messages_without_bytes_are_refused(two_processes: Processes) -> None:
    message = "large_bytes and repeats must be at least 1 (got 0 and 5)"
    assert two_processes.run(refuse) == [message] * 2


SLOW_WIRE = """
ip link set lo up
tc qdisc add dev lo root tbf rate 200mbit burst 128kb latency 4s || exit 75
exec "$@"
"""


@pytest.mark.slow
def test_a_slow_wire_is_shared_by_all_links_that_use_it() -> None:
    # In a network of its own, whose loopback carries 25 MB a second, far less than a core.
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        pytest.skip("needs unshare, ip and tc")
    program = "from tests.measuring.test_wires import write_wires; write_wires()"
    command = ["unshare", "-n", "sh", "-c", SLOW_WIRE, "sh", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode in (1, 75) and "ermitted" in done.stderr:
        pytest.skip("may not make a network of its own")
    assert done.stdout == "[[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]\n", done.stderr


def write_wires() -> None:
    with Processes(4) as processes:
        found = processes.run(measured_closely)
    assert found == [found[0]] * 4
    sys.stdout.write(f"{list(map(list, found[0]))}\n")


def measured_closely(_rank: int) -> tuple[tuple[int, ...], ...]:
    assert dist.group.WORLD is not None
    warnings.simplefilter("ignore", MeasurementWarning)
    return measure_wires(dist.group.WORLD, large_bytes=1 << 19, repeats=2)

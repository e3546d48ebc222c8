"""Links between real ranks, measured with messages of a step."""

import warnings

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.errors import ArgumentError
from penstock.measuring import MeasurementWarning
from penstock.measuring.links import Links, measure_links
from tests.processes import Processes

LARGE = 1 << 18


def find_links(_rank: int) -> Links:
    assert dist.group.WORLD is not None
    # Other tests may keep the machine busy.
    warnings.simplefilter("ignore", MeasurementWarning)
    return measure_links(dist.group.WORLD, large_bytes=LARGE, repeats=3)


def test_every_rank_measures_the_same_links(four_processes: Processes) -> None:
    found = four_processes.run(find_links)
    links = found[0]
    assert links.host_message > 0
    assert set(links.spread) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert found == [links] * 4
    for a in range(4):
        assert links.latency[a][a] == 0
        for b in range(4):
            assert links.latency[a][b] == links.latency[b][a]
            # The host's seconds are not part of it, and on a busy machine they may be all of them.
            assert links.latency[a][b] >= 0
            assert a == b or links.bandwidth[a][b] > 0
    # A link between ranks that are not neighbours counts as slow as the slowest one.
    assert links.latency[0][2] == links.latency[1][3] == max(map(max, links.latency))
    assert links.bandwidth[0][2] == links.bandwidth[1][3] == min(map(min, links.bandwidth))


def test_two_ranks_have_one_link(two_processes: Processes) -> None:
    links = two_processes.run(find_links)[0]
    costs = ps.Costs(transfer=links.transfer(LARGE))
    table = costs.per_link(2)
    assert table[0, 0] == table[1, 1] == 0
    assert table[0, 1] == table[1, 0] > links.latency[0][1] >= 0


def refuse(_rank: int) -> str:
    assert dist.group.WORLD is not None
    with pytest.raises(ArgumentError) as caught:
        measure_links(dist.group.WORLD, large_bytes=64)
    return str(caught.value)


def test_large_bytes_below_the_small_message_are_refused(two_processes: Processes) -> None:
    message = "large_bytes must be more than 64 and repeats at least 1 (got 64 and 20)"
    assert two_processes.run(refuse) == [message] * 2


def test_transfer_is_the_latency_plus_the_time_of_its_bytes() -> None:
    links = Links(((0.0, 1.0), (2.0, 0.0)), ((9.0, 10.0), (5.0, 9.0)))
    assert links.transfer(0) == ((0.0, 1.0), (2.0, 0.0))
    assert links.transfer(20) == ((0.0, 3.0), (6.0, 0.0))


def test_costs_get_the_seconds_of_their_largest_message_and_the_host() -> None:
    links = Links(((0.0, 1.0), (2.0, 0.0)), ((9.0, 10.0), (5.0, 9.0)), host_message=0.5)
    costs = links.add_to(ps.Costs(message_bytes=[0, 20]))
    assert costs.transfer == ((0.0, 3.0), (6.0, 0.0))
    assert costs.host_message == 0.5

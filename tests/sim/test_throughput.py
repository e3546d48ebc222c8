"""Tokens per second and MFU."""

import pytest

from penstock.errors import ArgumentError
from penstock.sim.throughput import Throughput, Workload


def test_every_device_of_every_replica_counts() -> None:
    work = Workload(1000, flops_per_token=6e9, peak_flops=100e12, devices_per_rank=2, replicas=4)
    # 4 replicas x 8 microbatches x 1,000 tokens in 2 s; 4 x 4 ranks x 2 devices share the FLOPs.
    assert work.at(2.0, ranks=4, microbatches=8) == Throughput(16_000, 3e12, 0.03)


def test_what_is_not_known_is_left_out() -> None:
    assert str(Workload(1000).at(2.0, ranks=4, microbatches=8)) == "4,000 tokens/s"
    found = Workload(1000, flops_per_token=4e9).at(2.0, ranks=4, microbatches=8)
    assert str(found) == "4,000 tokens/s, 4 TFLOP/s per device"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens_per_microbatch": -1}, "tokens_per_microbatch must be a number from 0 (got -1)"),
        ({"replicas": 0}, "replicas must be a whole number from 1 (got 0)"),
        ({"devices_per_rank": 1.5}, "devices_per_rank must be a whole number from 1 (got 1.5)"),
    ],
)
def test_wrong_numbers_are_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Workload(**({"tokens_per_microbatch": 1.0} | given))  # type: ignore[arg-type]  # on purpose
    assert str(caught.value) == message


def test_a_step_takes_time() -> None:
    with pytest.raises(ArgumentError, match="seconds of a step must be above 0"):
        Workload(1.0).at(0.0, ranks=1, microbatches=1)

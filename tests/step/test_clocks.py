"""Clocks of recorded steps."""

from itertools import pairwise

import pytest
import torch

from penstock.ranks.transport import Carrier, Message
from penstock.step.clocks import CudaClock, HostClock, StepRecorder, clock_for
from penstock.step.step_data import StepRecording
from penstock.tensors.packet import Packet

FORWARD = Message(True, 3, 1, 0, 1)
BACKWARD = Message(False, 2, 0, 1, 0)
PACKET = Packet("", [])


class CountingClock:
    """A clock on which every mark is a second after the one before; messages take a minute."""

    def __init__(self) -> None:
        self.now = self.began = 0.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def mark_arrival(self, message: Message, carrier: Carrier) -> float:
        del message, carrier
        return self.now + 60.0

    def seconds(self, mark: float) -> float:
        return mark

    def held_bytes(self) -> float:
        return 8 * self.now


def test_host_clock_counts_seconds_from_its_start() -> None:
    clock = HostClock()
    marks = [clock.mark() for _ in range(3)]
    seconds = [clock.seconds(mark) for mark in marks]
    assert seconds == sorted(seconds)
    assert seconds[0] >= 0.0
    assert [b - a for a, b in pairwise(seconds)] == pytest.approx(
        [b - a for a, b in pairwise(marks)], abs=1e-9
    )
    assert clock.held_bytes() == 0.0


def test_processor_has_the_clock_of_the_host() -> None:
    assert type(clock_for(torch.device("cpu"))) is HostClock


def test_recorder_separates_work_from_waiting_and_knows_when_messages_arrive() -> None:
    recorder = StepRecorder(CountingClock())
    recorder.start()
    assert recorder.wait(FORWARD, lambda _: PACKET) is PACKET
    # The work begins when its input is there.
    recorder.start()
    recorder.end(7)
    recorder.start()
    recorder.note_sent(BACKWARD, None)
    recorder.note_sent(BACKWARD, None)
    recorder.end(8)
    found = recorder.finish()
    assert found == StepRecording(
        row=[7, 8],
        start=[4.0, 6.0],
        end=[5.0, 7.0],
        memory=[40.0, 56.0],
        waits=[(True, 3, 1, 2.0, 3.0)],
        arrivals=[(False, 2, 0, 66.0)],
        began=0.0,
        machine=found.machine,
    )


def test_host_has_delivered_a_message_when_it_is_handed_over() -> None:
    clock = HostClock()
    before, arrival, after = clock.mark(), clock.mark_arrival(FORWARD, None), clock.mark()
    assert before <= arrival <= after


@pytest.mark.gpu
def test_device_has_a_clock_of_events_and_counts_its_bytes() -> None:
    device = torch.device("cuda")
    clock = clock_for(device)
    assert type(clock) is CudaClock
    before = clock.mark()
    held = clock.held_bytes()
    tensor = torch.ones(1 << 20, device=device)
    after = clock.mark()
    assert 0.0 <= clock.seconds(before) <= clock.seconds(after)
    assert clock.held_bytes() - held == tensor.nbytes


class _Waiting:
    """A send that is over when a stream gets to where it was made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped upstream
        self._done.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


@pytest.mark.gpu
@pytest.mark.parametrize("is_stream", [True, False])
def test_arrival_is_marked_behind_the_copy_and_the_compute_does_not_wait(is_stream: bool) -> None:
    device = torch.device("cuda")
    clock = CudaClock(device)
    matrix = torch.ones(4096, 4096, device=device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped upstream
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        for _ in range(20):
            matrix = matrix @ matrix * 1e-4
    carrier = side if is_stream else _Waiting(side)
    arrival = clock.mark_arrival(FORWARD, carrier)
    compute = clock.mark()
    assert clock.seconds(compute) < clock.seconds(arrival)

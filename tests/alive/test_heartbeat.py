"""Ranks that keep in touch: here all ends are in one process, each with its own thread."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import PollSelector

import pytest

import penstock as ps
from penstock.alive.flight_folder import FlightFolder
from penstock.alive.heartbeat import Heartbeat, HeartbeatEnd
from penstock.alive.heartbeat_client import HeartbeatClient
from penstock.alive.heartbeat_server import HeartbeatServer
from penstock.alive.lost_rank import LostRank
from penstock.alive.progress_log import Note, ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.alive.waker import Waker
from penstock.errors import PeerLostError, PipelineError
from penstock.ir.actions import Action, Kind

HOST, TOKEN = "127.0.0.1", "secret"
# Only for what goes wrong: nothing here takes a second otherwise.
LIMIT_SECONDS = 60.0
WATCH = Timeouts(silence_seconds=60.0, stop_seconds=60.0)
OPEN_FILES = Path("/dev/fd")
SCHEDULE = ps.build("1F1B", ranks=4, microbatches=4)


@dataclass
class Member:
    """One rank with its lifeline; its connections are hung up by setting an event."""

    lifeline: Heartbeat
    logbook: ProgressLog
    selector: PollSelector
    was_hung_up: threading.Event = field(default_factory=threading.Event)


def join(
    rank: int,
    folder: Path,
    open_end: Callable[[PollSelector, FlightFolder], HeartbeatEnd],
    watch: Timeouts = WATCH,
) -> Member:
    records, selector = FlightFolder(folder, rank, SCHEDULE), PollSelector()
    bell = Waker()
    logbook = ProgressLog(records.writer, bell)
    was_hung_up = threading.Event()
    lifeline = Heartbeat(
        open_end(selector, records),
        selector,
        watch,
        names=[f"process {number}" for number in range(4)],
        bell=bell,
        logbook=logbook,
        records=records,
        hang_up=was_hung_up.set,
    )
    return Member(lifeline, logbook, selector, was_hung_up)


@contextmanager
def crew(folder: Path, num_ranks: int, watch: Timeouts = WATCH) -> Iterator[list[Member]]:
    """So many ranks that watch over one another."""
    port = 0

    def open_hub(selector: PollSelector, records: FlightFolder) -> HeartbeatServer:
        nonlocal port
        hub = HeartbeatServer(
            num_ranks, watch, selector, records.last_of, address=HOST, token=TOKEN
        )
        port = hub.port
        return hub

    def open_spoke(rank: int) -> Callable[[PollSelector, FlightFolder], HeartbeatClient]:
        return lambda selector, records: HeartbeatClient(
            rank, watch, selector, records.last_of, address=HOST, port=port, token=TOKEN
        )

    with ExitStack() as stack:
        members = [join(0, folder, open_hub, watch)]
        members += [join(r, folder, open_spoke(r), watch) for r in range(1, num_ranks)]
        for member in members:
            stack.callback(member.lifeline.close)
            stack.callback(member.lifeline.leave)
        yield members


def verdicts(members: list[Member]) -> list[LostRank | None]:
    return [member.lifeline.find_verdict(LIMIT_SECONDS) for member in members]


def vanish(member: Member) -> None:
    """Break the line to the hub without a word, as the end of a process does."""
    for key in list(member.selector.get_map().values()):
        descriptor = key.fd
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            try:
                copy.getpeername()
            except OSError:
                continue
            if copy.family == socket.AF_INET:
                copy.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", [1, 3])
def test_all_others_learn_that_a_rank_ended_and_what_it_did_last(
    victim: int, tmp_path: Path
) -> None:
    with crew(tmp_path, 4) as members:
        others = [member for rank, member in enumerate(members) if rank != victim]
        for member in members:
            member.lifeline.enter()
        members[victim].logbook.begin_step()
        members[victim].logbook.start(Note.of(Action(Kind.FORWARD, victim, 1)))
        vanish(members[victim])
        last = (
            f"its last action was {victim}F1 (forward of microbatch 1 in stage {victim}) of step 0"
        )
        expected = LostRank(victim, "ended (its connection broke)", last, is_quiet=True)
        assert verdicts(others) == [expected] * 3
        for member in others:
            assert member.was_hung_up.wait(LIMIT_SECONDS)
            member.lifeline.leave()
            with pytest.raises(PeerLostError) as caught:
                member.lifeline.enter()
            assert caught.value.rank == victim
            assert str(caught.value) == (
                f"rank {victim} (process {victim}) ended (its connection broke); {last}\n"
                f"what every rank did: penstock explain {tmp_path}"
            )
        members[victim].lifeline.leave()


def test_rank_that_leaves_between_calls_is_missed_in_the_next_one(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as members:
        for member in members:
            member.lifeline.enter()
            member.lifeline.leave()
        members[1].lifeline.close()
        assert members[0].lifeline.find_verdict(0.0) is None
        members[0].lifeline.enter()
        expected = LostRank(
            1, "has left (its pipeline was closed)", "it had begun no action", True
        )
        lost = members[0].lifeline.find_verdict(LIMIT_SECONDS)
        assert lost is not None
        assert (lost.rank, lost.what) == (expected.rank, expected.what)
        members[0].lifeline.leave()


def test_goodbye_of_the_hub_is_no_loss_for_those_that_are_done(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as members:
        for member in members:
            member.lifeline.enter()
        members[0].lifeline.leave()
        members[0].lifeline.close()
        # In the same call as the hub was: that ends well.
        members[1].lifeline.leave()
        members[2].lifeline.leave()
        members[2].lifeline.enter()
        lost = members[2].lifeline.find_verdict(LIMIT_SECONDS)
        assert lost is not None
        assert (lost.rank, lost.what) == (0, "has left (its pipeline was closed)")
        assert members[1].lifeline.find_verdict(0.0) is None
        members[2].lifeline.leave()


def test_broken_connection_of_a_rank_is_told_to_all(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as members:
        for member in members:
            member.lifeline.enter()
        members[2].lifeline.break_off("reset by peer")
        what = "lost its connection to another rank (reset by peer)"
        expected = LostRank(2, what, "it had begun no action")
        assert verdicts(members) == [expected] * 3
        for member in members:
            assert member.was_hung_up.wait(LIMIT_SECONDS)
            member.lifeline.leave()


@pytest.mark.parametrize(
    "greeting",
    [
        b'["hello", "wrong", 1]\n',
        b'["hello", "secret", 0]\n',
        b'["hello", "secret", 9]\n',
        b'["hello", "secret", 2]\n',
        b'["hello"]\n',
        b'["beat", []]\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 40_000,
    ],
)
def test_strangers_are_refused_and_harm_nobody(greeting: bytes, tmp_path: Path) -> None:
    watch = WATCH
    hubs: list[HeartbeatServer] = []

    def open_hub(selector: PollSelector, records: FlightFolder) -> HeartbeatServer:
        hubs.append(
            HeartbeatServer(3, watch, selector, records.last_of, address=HOST, token=TOKEN)
        )
        return hubs[0]

    def open_spoke(selector: PollSelector, records: FlightFolder) -> HeartbeatClient:
        port = hubs[0].port
        return HeartbeatClient(
            2, watch, selector, records.last_of, address=HOST, port=port, token=TOKEN
        )

    hub, spoke = join(0, tmp_path, open_hub), join(2, tmp_path, open_spoke)
    spoke.lifeline.enter()
    with socket.create_connection((HOST, hubs[0].port), timeout=LIMIT_SECONDS) as stranger:
        stranger.sendall(greeting)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert hub.lifeline.find_verdict(0.0) is None
    # The true rank 2 is still heard.
    spoke.lifeline.break_off("reset by peer")
    lost = hub.lifeline.find_verdict(LIMIT_SECONDS)
    assert lost is not None
    assert lost.rank == 2
    spoke.lifeline.leave()
    spoke.lifeline.close()
    hub.lifeline.close()


def test_hub_that_cannot_be_reached_is_an_error_that_says_where(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    records = FlightFolder(tmp_path, 1, SCHEDULE)
    with pytest.raises(PipelineError, match=f"rank 1 cannot reach rank 0 at {HOST}, port {port}"):
        HeartbeatClient(
            1, WATCH, PollSelector(), records.last_of, address=HOST, port=port, token=TOKEN
        )


def test_ends_that_were_closed_leave_no_thread_file_or_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    threads, descriptors = threading.active_count(), len(list(OPEN_FILES.iterdir()))
    for _ in range(50):
        with crew(folder, 3):
            pass
    assert threading.active_count() == threads
    assert len(list(OPEN_FILES.iterdir())) == descriptors
    assert not folder.exists()


def test_copy_of_a_process_does_not_keep_its_connections(tmp_path: Path) -> None:
    # A forked worker that held them would hide the death of its rank from the others.
    with crew(tmp_path, 2) as members:
        ready, told = os.pipe()
        go, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"!")
            os.close(release)
            os.read(go, 1)
            os._exit(0)
        os.read(ready, 1)
        members[0].lifeline.enter()
        vanish(members[1])
        lost = members[0].lifeline.find_verdict(LIMIT_SECONDS)
        assert lost is not None
        assert lost.rank == 1
        members[0].lifeline.leave()
        os.close(release)
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (ready, told, go):
            os.close(descriptor)

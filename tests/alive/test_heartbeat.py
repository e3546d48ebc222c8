"""Heartbeats of several ranks; all ends are in one process, each with its own thread."""

import gc
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
# Only reached when something goes wrong: nothing else here takes a second.
LIMIT_SECONDS = 60.0
TIMEOUTS = Timeouts(silence_seconds=60.0, stop_seconds=60.0)
OPEN_FILES = Path("/dev/fd")
SCHEDULE = ps.build("1F1B", ranks=4, microbatches=4)


@dataclass
class Member:
    """One rank with its heartbeat; aborting its connections sets an event."""

    heartbeat: Heartbeat
    progress_log: ProgressLog
    selector: PollSelector
    was_aborted: threading.Event = field(default_factory=threading.Event)


def join(
    rank: int,
    folder: Path,
    open_end: Callable[[PollSelector, FlightFolder], HeartbeatEnd],
    timeouts: Timeouts = TIMEOUTS,
) -> Member:
    flight_folder, selector = FlightFolder(folder, rank, SCHEDULE), PollSelector()
    waker = Waker()
    progress_log = ProgressLog(flight_folder.writer, waker)
    was_aborted = threading.Event()
    heartbeat = Heartbeat(
        open_end(selector, flight_folder),
        selector,
        timeouts,
        names=[f"process {number}" for number in range(4)],
        waker=waker,
        progress_log=progress_log,
        flight_folder=flight_folder,
        abort=was_aborted.set,
    )
    return Member(heartbeat, progress_log, selector, was_aborted)


@contextmanager
def open_ranks(
    folder: Path, num_ranks: int, timeouts: Timeouts = TIMEOUTS
) -> Iterator[list[Member]]:
    """Open the heartbeats of this number of ranks."""
    port = 0

    def open_server(selector: PollSelector, folder: FlightFolder) -> HeartbeatServer:
        nonlocal port
        server = HeartbeatServer(
            num_ranks, timeouts, selector, folder.last_action_of, address=HOST, token=TOKEN
        )
        port = server.port
        return server

    def open_client(rank: int) -> Callable[[PollSelector, FlightFolder], HeartbeatClient]:
        return lambda selector, folder: HeartbeatClient(
            rank, timeouts, selector, folder.last_action_of, address=HOST, port=port, token=TOKEN
        )

    with ExitStack() as stack:
        members = [join(0, folder, open_server, timeouts)]
        members += [join(r, folder, open_client(r), timeouts) for r in range(1, num_ranks)]
        for member in members:
            stack.callback(member.heartbeat.close)
            stack.callback(member.heartbeat.leave)
        yield members


def lost_ranks(members: list[Member]) -> list[LostRank | None]:
    return [member.heartbeat.find_lost(LIMIT_SECONDS) for member in members]


def vanish(member: Member) -> None:
    """Break the connection to the server without a goodbye, as the end of a process does."""
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
def test_all_other_ranks_learn_that_a_rank_ended_and_what_it_did_last(
    victim: int, tmp_path: Path
) -> None:
    with open_ranks(tmp_path, 4) as members:
        others = [member for rank, member in enumerate(members) if rank != victim]
        for member in members:
            member.heartbeat.enter()
        members[victim].progress_log.begin_step()
        members[victim].progress_log.start(Note.of(Action(Kind.FORWARD, victim, 1)))
        vanish(members[victim])
        last = (
            f"its last action was {victim}F1 (forward of microbatch 1 in stage {victim}) of step 0"
        )
        expected = LostRank(victim, "ended (its connection broke)", last, may_be_done=True)
        assert lost_ranks(others) == [expected] * 3
        for member in others:
            assert member.was_aborted.wait(LIMIT_SECONDS)
            member.heartbeat.leave()
            with pytest.raises(PeerLostError) as caught:
                member.heartbeat.enter()
            assert caught.value.rank == victim
            assert str(caught.value) == (
                f"rank {victim} (process {victim}) ended (its connection broke); {last}\n"
                f"what every rank did: penstock explain {tmp_path}"
            )
        members[victim].heartbeat.leave()


def test_rank_that_leaves_between_calls_is_lost_in_the_next_call(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 3) as members:
        for member in members:
            member.heartbeat.enter()
            member.heartbeat.leave()
        members[1].heartbeat.close()
        assert members[0].heartbeat.find_lost(0.0) is None
        members[0].heartbeat.enter()
        expected = LostRank(
            1, "has left (its pipeline was closed)", "it had not started any action", True
        )
        lost = members[0].heartbeat.find_lost(LIMIT_SECONDS)
        assert lost is not None
        assert (lost.rank, lost.what) == (expected.rank, expected.what)
        members[0].heartbeat.leave()


def test_server_that_leaves_is_lost_only_for_ranks_that_continue(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 3) as members:
        for member in members:
            member.heartbeat.enter()
        members[0].heartbeat.leave()
        members[0].heartbeat.close()
        # It was in the same call as the server, so it is not lost.
        members[1].heartbeat.leave()
        members[2].heartbeat.leave()
        members[2].heartbeat.enter()
        lost = members[2].heartbeat.find_lost(LIMIT_SECONDS)
        assert lost is not None
        assert (lost.rank, lost.what) == (0, "has left (its pipeline was closed)")
        assert members[1].heartbeat.find_lost(0.0) is None
        members[2].heartbeat.leave()


def test_all_ranks_learn_of_a_broken_connection(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 3) as members:
        for member in members:
            member.heartbeat.enter()
        members[2].heartbeat.report_broken_link("reset by peer")
        what = "lost its connection to another rank (reset by peer)"
        expected = LostRank(2, what, "it had not started any action")
        assert lost_ranks(members) == [expected] * 3
        for member in members:
            assert member.was_aborted.wait(LIMIT_SECONDS)
            member.heartbeat.leave()


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
def test_strangers_are_refused_and_do_not_disturb_the_ranks(
    greeting: bytes, tmp_path: Path
) -> None:
    timeouts = TIMEOUTS
    servers: list[HeartbeatServer] = []

    def open_server(selector: PollSelector, folder: FlightFolder) -> HeartbeatServer:
        servers.append(
            HeartbeatServer(
                3, timeouts, selector, folder.last_action_of, address=HOST, token=TOKEN
            )
        )
        return servers[0]

    def open_client(selector: PollSelector, folder: FlightFolder) -> HeartbeatClient:
        port = servers[0].port
        return HeartbeatClient(
            2, timeouts, selector, folder.last_action_of, address=HOST, port=port, token=TOKEN
        )

    server, client = join(0, tmp_path, open_server), join(2, tmp_path, open_client)
    client.heartbeat.enter()
    with socket.create_connection((HOST, servers[0].port), timeout=LIMIT_SECONDS) as stranger:
        stranger.sendall(greeting)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert server.heartbeat.find_lost(0.0) is None
    # The real rank 2 still reaches the server.
    client.heartbeat.report_broken_link("reset by peer")
    lost = server.heartbeat.find_lost(LIMIT_SECONDS)
    assert lost is not None
    assert lost.rank == 2
    client.heartbeat.leave()
    client.heartbeat.close()
    server.heartbeat.close()


def test_error_says_where_a_server_cannot_be_reached(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    folder = FlightFolder(tmp_path, 1, SCHEDULE)
    with pytest.raises(PipelineError, match=f"rank 1 cannot reach rank 0 at {HOST}, port {port}"):
        HeartbeatClient(
            1,
            TIMEOUTS,
            PollSelector(),
            folder.last_action_of,
            address=HOST,
            port=port,
            token=TOKEN,
        )


def test_closed_heartbeats_leave_no_thread_file_or_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    # What earlier tests have left to be collected must not be closed meanwhile.
    gc.collect()
    threads, descriptors = threading.active_count(), len(list(OPEN_FILES.iterdir()))
    for _ in range(50):
        with open_ranks(folder, 3):
            pass
    assert threading.active_count() == threads
    assert len(list(OPEN_FILES.iterdir())) == descriptors
    assert not folder.exists()


def test_forked_copy_of_a_process_does_not_keep_its_connections(tmp_path: Path) -> None:
    # A forked worker that kept them open would hide the death of its rank from the others.
    with open_ranks(tmp_path, 2) as members:
        ready, started = os.pipe()
        go, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(started, b"!")
            os.close(release)
            os.read(go, 1)
            os._exit(0)
        os.read(ready, 1)
        members[0].heartbeat.enter()
        vanish(members[1])
        lost = members[0].heartbeat.find_lost(LIMIT_SECONDS)
        assert lost is not None
        assert lost.rank == 1
        members[0].heartbeat.leave()
        os.close(release)
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (ready, started, go):
            os.close(descriptor)

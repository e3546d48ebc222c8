"""Heartbeats of several ranks; all ends are in one process, each with its own thread."""

import ctypes
import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from selectors import PollSelector
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

import penstock as ps
from penstock.alive import failure_detector
from penstock.alive import heartbeat as heartbeat_module
from penstock.alive.failure_detector import FailureDetector
from penstock.alive.flight_folder import FlightFolder
from penstock.alive.guard import RankGuard
from penstock.alive.guard_opening import open_heartbeat
from penstock.alive.heartbeat import Heartbeat
from penstock.alive.lost_rank import LostRank
from penstock.alive.progress_log import OUTCOME, Note, ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree import heartbeat_node, seeking
from penstock.alive.tree.heartbeat_node import HeartbeatNode
from penstock.alive.tree.member import Member as Rank
from penstock.errors import PeerLostError
from penstock.ir.actions import Action, Kind
from penstock.ranks.faults import LinkLostError
from penstock.ranks.tree.admission import call
from penstock.ranks.tree.meeting import Meeting

HOST = "127.0.0.1"
# Only reached when something goes wrong: nothing else here takes a second.
LIMIT_SECONDS = 60.0
TIMEOUTS = Timeouts(silence_seconds=60.0, stop_seconds=60.0)
OPEN_FILES = Path("/dev/fd")
SO_ATTACH_FILTER = 26
SCHEDULE = ps.build("1F1B", ranks=4, microbatches=4)


@dataclass
class Member:
    """One rank with its heartbeat; aborting its connections sets an event."""

    heartbeat: Heartbeat
    progress_log: ProgressLog
    was_aborted: threading.Event = field(default_factory=threading.Event)

    @property
    def port(self) -> int:
        return self.heartbeat._node.port


def join(store: Any, rank: int, num_ranks: int, folder: Path | None, timeouts: Timeouts) -> Member:
    heartbeat, progress_log = open_heartbeat(
        Meeting(store, rank),
        Rank(rank, f"process {rank}"),
        range(num_ranks),
        timeouts,
        address=HOST,
    )
    member = Member(heartbeat, progress_log)
    if folder is not None:
        record = FlightFolder(folder, rank, SCHEDULE)
        progress_log.attach(record.writer)
        records = {other: record.path_of(other) for other in range(num_ranks)}
        heartbeat.attach(record, records, member.was_aborted.set, lambda _: None)
    return member


@contextmanager
def open_ranks(
    folder: Path | None, num_ranks: int, timeouts: Timeouts = TIMEOUTS
) -> Iterator[list[Member]]:
    """Open the heartbeats of this number of ranks."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
    with ThreadPoolExecutor(num_ranks) as pool, ExitStack() as stack:
        joining = [
            pool.submit(join, store, rank, num_ranks, folder, timeouts)
            for rank in range(num_ranks)
        ]
        members = [one.result(LIMIT_SECONDS) for one in joining]
        for member in members:
            stack.callback(member.heartbeat.close)
            stack.callback(member.heartbeat.leave)
        yield members


def lost_ranks(members: list[Member]) -> list[LostRank | None]:
    return [member.heartbeat.find_lost(LIMIT_SECONDS) for member in members]


def vanish(member: Member) -> None:
    """Close all connections without a goodbye, as the end of a process does."""
    node: Any = member.heartbeat._node
    node.say_goodbye = lambda *_: None
    member.heartbeat.close(is_fault=True)


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
        what, name = "ended (its connection broke)", f"process {victim}"
        expected = LostRank(victim, what, last, may_be_done=True, name=name)
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


# A replica that had raised and left was waited for in a save until the group's timeout.
def test_call_with_replicas_says_so_until_it_ends(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 2) as members:
        member = members[0]
        for is_shared in (True, False):
            member.heartbeat.enter(is_shared=is_shared)
            assert member.progress_log.status().is_with_replicas == is_shared
            member.heartbeat.leave()
        # What failed in a collective with replicas does so until the call ends.
        member.heartbeat.enter()
        member.progress_log.begin_step()
        member.progress_log.start(Note.of(Action(Kind.REDUCE_GRAD, 0)))
        member.progress_log.fail("RuntimeError: closed")
        member.progress_log.follow(OUTCOME)
        assert member.progress_log.status().is_with_replicas
        member.heartbeat.leave()
        member.heartbeat.enter()
        assert not member.progress_log.status().is_with_replicas
        member.heartbeat.leave()


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
        expected = LostRank(2, what, "it had not started any action", name="process 2")
        assert lost_ranks(members) == [expected] * 3
        for member in members:
            assert member.was_aborted.wait(LIMIT_SECONDS)
            member.heartbeat.leave()


@pytest.mark.parametrize(
    "greeting",
    [
        b'["answer", 1, "00", "wrong"]\n',
        b'["answer", 1]\n',
        b'["answer", 1, "%s", "\xff"]\n' % (b"0" * 900),
        b'["beat", []]\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 40_000,
        b"",
    ],
)
def test_unknown_callers_are_refused_and_do_not_disturb_the_ranks(
    greeting: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken link is observed that long before its rank is blamed.
    monkeypatch.setattr(failure_detector, "_BREAK_SECONDS", 0.1)
    with open_ranks(tmp_path, 3) as members:
        members[2].heartbeat.enter()
        with (
            socket.create_connection((HOST, members[0].port), timeout=LIMIT_SECONDS) as caller,
            # It may be refused while it still sends.
            suppress(ConnectionResetError, BrokenPipeError),
        ):
            caller.sendall(greeting)
            if greeting:
                assert caller.makefile("rb").read().count(b"\n") == 1
        assert members[0].heartbeat.find_lost(0.0) is None
        # The real rank 2 still reaches rank 0.
        members[2].heartbeat.report_broken_link("reset by peer")
        assert [lost and lost.rank for lost in lost_ranks(members)] == [2, 2, 2]
        members[2].heartbeat.leave()


def test_more_unknown_callers_than_there_are_places_do_not_end_the_watch(tmp_path: Path) -> None:
    # The oldest lost its place while its event was in the same batch; that ended the thread.
    with open_ranks(tmp_path, 2) as members, ExitStack() as callers:
        for _ in range(200):
            one = callers.enter_context(
                socket.create_connection((HOST, members[0].port), timeout=LIMIT_SECONDS)
            )
            with suppress(OSError):
                one.sendall(b"x" * 100)
        members[1].heartbeat.enter()
        vanish(members[1])
        lost = members[0].heartbeat.find_lost(LIMIT_SECONDS)
        assert lost is not None
        assert lost.rank == 1
        members[1].heartbeat.leave()


def test_heartbeat_that_fails_says_so_on_its_own_rank_and_on_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The thread ended in silence, and its rank was not watched any more.
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    with open_ranks(tmp_path, 3) as members:
        node: Any = members[1].heartbeat._node
        node.beat = fail
        found = lost_ranks(members)
        what = "has left (its heartbeat failed: ZeroDivisionError: a mistake)"
        assert [(lost.rank, lost.what) for lost in found if lost] == [(1, what)] * 3
        with pytest.raises(PeerLostError, match="a mistake"):
            members[1].heartbeat.enter()
    assert "the heartbeat of rank 1 has failed" in caplog.text


def test_rank_that_was_interrupted_and_continues_raises_what_the_others_raise(
    tmp_path: Path,
) -> None:
    # After a caught Ctrl-C the next call waited for a heartbeat that had ended, 40 s long.
    with open_ranks(tmp_path, 2) as members:
        for member in members:
            member.heartbeat.enter()
        members[0].heartbeat.close("KeyboardInterrupt in the middle of a step", is_fault=True)
        members[0].heartbeat.leave()
        members[1].heartbeat.leave()
        for member in members:
            with suppress(PeerLostError):
                member.heartbeat.enter()
                member.heartbeat.find_lost(LIMIT_SECONDS)
                member.heartbeat.leave()
            with pytest.raises(PeerLostError, match=r"rank 0 .* has left .KeyboardInterrupt"):
                member.heartbeat.enter()


def cut_incoming(connection: Any) -> None:
    """Let the kernel drop whatever comes in on a connection, which stays open."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)
    buffer = ctypes.create_string_buffer(drop_all)
    program = struct.pack("HL", 1, ctypes.addressof(buffer))
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


@pytest.fixture
def early_seeking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks look for another connection after a second, long before one would be lost."""
    monkeypatch.setattr(heartbeat_node, "_SEEK_SHARE", 1 / TIMEOUTS.silence_seconds)


# Both ends waited for the other and blamed it. When the one above heard the last beat sooner than
# the one below, it called that lost at the very moment at which that connected again.
@pytest.mark.parametrize("deaf", [0, 1])
@pytest.mark.usefixtures("early_seeking")
def test_connection_that_is_cut_in_one_direction_is_opened_again(
    deaf: int, tmp_path: Path
) -> None:
    with open_ranks(tmp_path, 3) as members:
        children = members[0].heartbeat._node._near.children
        before = children[1]
        cut_incoming(before if deaf == 0 else members[1].heartbeat._node._near.parent)
        while children.get(1) in (before, None):
            assert members[1].heartbeat.find_lost(0.05) is None
        assert [member.heartbeat.find_lost(0.0) for member in members] == [None] * 3


# Each loss waited two seconds for the answer of others that were as silent: a machine that stops
# takes several ranks along.
def test_loss_waits_for_no_answer_of_others_that_are_silent() -> None:
    token = "secret"
    with PollSelector() as selector, ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        node = HeartbeatNode(Rank(0, "root"), 4, TIMEOUTS, selector, address=HOST, token=token)
        stack.callback(node.close)
        calls = [
            pool.submit(call, HOST, node.port, token=token, rank=rank, seconds=LIMIT_SECONDS)
            for rank in (1, 2, 3)
        ]
        while len(node._near.children) < 3:
            for key, _ in selector.select():
                key.data()
        for one in calls:
            stack.callback(one.result().close)
        node._silence.hear(2, monotonic() - TIMEOUTS.silence_seconds * 0.9)
        node.announce(LostRank(1, "has not answered for 60 s", None))
        assert node._unacknowledged == {3}


# A rank gives up a call that a busy one above has not answered in time, and calls again. The first
# call was let in later, read as closed, and its rank was called lost: so ended 2,000 ranks.
def test_call_that_was_given_up_does_not_lose_its_rank(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 2) as members:
        node = members[0].heartbeat._node
        for rank in (members[1].heartbeat, members[0].heartbeat):
            rank.enter()
        before = node._near.children[1]
        call(HOST, node.port, token=node._listener.token, rank=1, seconds=LIMIT_SECONDS).close()
        while node._near.children.get(1) in (before, None):
            assert members[0].heartbeat.find_lost(0.01) is None
        members[1].heartbeat.report_broken_link("reset by peer")
        found = lost_ranks(members)
        assert [lost and lost.what for lost in found] == [
            "lost its connection to another rank (reset by peer)"
        ] * 2


@pytest.mark.usefixtures("early_seeking")
def test_rank_that_connects_again_after_the_decision_still_hears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rank 0 had decided and was gone when the rank connected again, which then blamed rank 0.
    monkeypatch.setattr(heartbeat_module, "_ANNOUNCE_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat_module, "_GOODBYE_SECONDS", 0.0)
    with open_ranks(tmp_path, 4) as members:
        cut_incoming(members[2].heartbeat._node._near.parent)
        vanish(members[1])
        others = [members[rank] for rank in (0, 2, 3)]
        lost_ranks(members[:1])
        members[0].heartbeat.close()
        assert [lost.rank for lost in lost_ranks(others) if lost] == [1, 1, 1]


def test_loss_reaches_every_level_before_rank_0_leaves() -> None:
    with open_ranks(None, 19) as members:
        vanish(members[18])
        assert members[0].heartbeat.find_lost(LIMIT_SECONDS) is not None
        members[0].heartbeat.close()
        registry = members[0].heartbeat._node._registry
        assert registry is not None
        assert registry.is_known_to_all(18)
        assert {lost.rank for lost in lost_ranks(members[:18]) if lost} == {18}


@pytest.mark.slow
def test_all_name_a_rank_that_can_reach_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    with open_ranks(tmp_path, 3, Timeouts(silence_seconds=10.0)) as members:
        monkeypatch.setattr(seeking, "call", fail)
        node = members[2].heartbeat._node
        cut_incoming(node._near.parent)
        found = lost_ranks(members)
        assert [lost.rank for lost in found if lost] == [2, 2, 2]


# Ranks of another replica had the last beat of rank 0 only, which may be from before its step.
def test_ranks_of_other_pipelines_know_what_rank_0_did_last(tmp_path: Path) -> None:
    with open_ranks(tmp_path, 19) as members:
        # It is below rank 1.
        node = members[18].heartbeat._node
        node.own_records = {}
        while not node._root.records:
            assert members[18].heartbeat.find_lost(0.01) is None
        members[0].progress_log.begin_step()
        members[0].progress_log.start(Note.of(Action(Kind.FORWARD, 0, 1)))
        vanish(members[0])
        (lost,) = lost_ranks(members[18:])
        last = "its last action was 0F1 (forward of microbatch 1 in stage 0) of step 0"
        assert lost is not None
        assert (lost.rank, lost.last) == (0, last)


def test_rank_below_a_lost_one_is_connected_to_the_next_above() -> None:
    with open_ranks(None, 19) as members:
        for member in members:
            member.heartbeat.enter()
        vanish(members[1])
        others = [member for rank, member in enumerate(members) if rank != 1]
        found = lost_ranks(others)
        assert {(lost.rank, lost.what) for lost in found if lost} == {
            (1, "ended (its connection broke)")
        }
        assert None not in found


# Before a pipeline was there, nothing ended the waits of the others, so that their processes had
# to be ended. Whoever waits in the store looks whether its connections were aborted.
def test_waits_of_a_build_end_when_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "_SETTLE_SECONDS", 0.0)
    with open_ranks(None, 2) as members:
        heartbeat = members[0].heartbeat
        guard = RankGuard(heartbeat, members[0].progress_log, TIMEOUTS, range(2), range(2))

        def wait() -> None:
            vanish(members[1])
            assert heartbeat.find_lost(LIMIT_SECONDS) is not None
            end = monotonic() + LIMIT_SECONDS
            while not guard.connections.is_aborted:
                assert monotonic() < end
            raise LinkLostError("the connections were aborted")

        with pytest.raises(PeerLostError, match="rank 1 "), guard.call():
            wait()


def test_rank_that_never_comes_is_named_by_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those who had come waited for the timeout of the group, and did not say for whom.
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
    timeouts = Timeouts(join_seconds=LIMIT_SECONDS)
    find_lost = FailureDetector.find_lost

    def find_lost_late(detector: FailureDetector, now: float) -> LostRank | None:
        """Let the limit pass once three have come, however long they take on a busy machine."""
        return find_lost(detector, now + LIMIT_SECONDS * (len(detector._pipelines) == 3))

    monkeypatch.setattr(FailureDetector, "find_lost", find_lost_late)
    with ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(join, store, rank, 4, tmp_path, timeouts) for rank in (0, 1, 3)]
        for one in joining:
            with pytest.raises(PeerLostError) as caught:
                one.result(LIMIT_SECONDS)
            assert caught.value.rank == 2
            assert "has not come to build its pipeline within 60 s" in str(caught.value)


def test_closed_heartbeats_leave_no_thread_file_or_descriptor(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    # What earlier tests have left to be collected must not be closed meanwhile.
    gc.collect()
    threads, descriptors = threading.active_count(), len(list(OPEN_FILES.iterdir()))
    for _ in range(50):
        with open_ranks(folder, 3):
            pass
    # Threads that others have started may end meanwhile.
    assert threading.active_count() <= threads
    assert len(list(OPEN_FILES.iterdir())) <= descriptors
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

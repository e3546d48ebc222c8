"""A process that has ended is gone; one that is stopped is not."""

import os
import signal
import subprocess
import sys

from penstock.ranks.peer.processes import PeerProcess, process_name


def test_a_process_is_gone_when_it_has_ended_and_not_while_it_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        space = process_name().split()[0]
        watched = PeerProcess(f"{space} {other.pid}")
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        assert not watched.is_gone
        other.kill()
        other.wait()
        assert watched.is_gone


def test_this_process_is_not_gone() -> None:
    assert not PeerProcess(process_name()).is_gone


def test_what_cannot_be_watched_is_never_gone() -> None:
    for name in ("", "1 1", f"{process_name()} more"):
        assert not PeerProcess(name).is_gone

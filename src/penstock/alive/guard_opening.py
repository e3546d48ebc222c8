"""How the ranks of a pipeline open their heartbeat: rank 0 serves, and the others connect."""

import os
import secrets
import socket
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from selectors import PollSelector
from time import strftime

from penstock.alive.flight_folder import FlightFolder
from penstock.alive.guard import Guard, NoGuard, RankGuard
from penstock.alive.heartbeat import Heartbeat, HeartbeatEnd
from penstock.alive.heartbeat_client import HeartbeatClient
from penstock.alive.heartbeat_server import HeartbeatServer
from penstock.alive.progress_log import ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.alive.waker import Waker
from penstock.ir.schedule import Schedule
from penstock.ranks.control import cannot
from penstock.ranks.group_transport import GroupTransport

__all__ = ["open_guard"]

_CANNOT_OPEN = cannot("open its heartbeat")


@dataclass(frozen=True, slots=True)
class _ServerOffer:
    """Where the server is, what lets a rank in, and where all ranks keep their flight records."""

    address: str
    port: int
    token: str
    folder: str


def open_guard(transport: GroupTransport, schedule: Schedule, timeouts: Timeouts) -> Guard:
    """Connect all ranks by a heartbeat; every rank calls this."""
    if transport.num_ranks == 1:
        return NoGuard()
    with ExitStack() as undo:
        open_end = _open_server if transport.ranks == (0,) else _open_client
        end, flight_folder, selector = open_end(transport, schedule, timeouts, undo)
        names = transport.control.gather(f"process {os.getpid()} on {socket.gethostname()}")
        waker = Waker()
        progress_log = ProgressLog(flight_folder.writer, waker)
        heartbeat = Heartbeat(
            end,
            selector,
            timeouts,
            names=names,
            waker=waker,
            progress_log=progress_log,
            flight_folder=flight_folder,
            abort=transport.abort,
            free_device=transport.release,
        )
        undo.pop_all()
    return RankGuard(heartbeat, progress_log, transport, timeouts)


def _open_server(
    transport: GroupTransport, schedule: Schedule, timeouts: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, token = PollSelector(), secrets.token_hex(16)
    address = transport.connections.own_address() or "127.0.0.1"
    with transport.control.together(_CANNOT_OPEN):
        folder = FlightFolder(_new_folder(timeouts), 0, schedule)
        undo.callback(partial(folder.close, keep=False))
        server = HeartbeatServer(
            transport.num_ranks,
            timeouts,
            selector,
            folder.last_action_of,
            address=address,
            token=token,
        )
        undo.callback(server.close)
    offer = _ServerOffer(address, server.port, token, str(folder.folder))
    transport.control.broadcast(asdict(offer))
    with transport.control.together(_CANNOT_OPEN):
        pass  # the other ranks connect
    return server, folder, selector


def _open_client(
    transport: GroupTransport, schedule: Schedule, timeouts: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, (rank,) = PollSelector(), transport.ranks
    with transport.control.together(_CANNOT_OPEN):
        pass  # rank 0 opens its server
    offer = _ServerOffer(**transport.control.broadcast(None))
    with transport.control.together(_CANNOT_OPEN):
        folder = FlightFolder(Path(offer.folder), rank, schedule)
        undo.callback(partial(folder.close, keep=False))
        client = HeartbeatClient(
            rank,
            timeouts,
            selector,
            folder.last_action_of,
            address=offer.address,
            port=offer.port,
            token=offer.token,
        )
        undo.callback(client.close)
    return client, folder, selector


def _new_folder(timeouts: Timeouts) -> Path:
    """Return a new folder; its name begins with the time, so that the latest is easy to find."""
    parent = tempfile.gettempdir() if timeouts.folder is None else timeouts.folder
    return Path(parent).absolute() / f"penstock-{strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"

"""How the ranks of a pipeline come to watch over one another: who calls whom, and where."""

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

# What a rank could not do whose heartbeat failed to open.
_OPENING = "open its heartbeat"


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where rank 0 is to be reached, by whom, and where all keep their flight records."""

    address: str
    port: int
    token: str
    folder: str


def open_guard(transport: GroupTransport, schedule: Schedule, watch: Timeouts) -> Guard:
    """Connect all ranks by a lifeline; every rank calls this."""
    if transport.num_ranks == 1:
        return NoGuard()
    with ExitStack() as undo:
        open_end = _open_hub if transport.ranks == (0,) else _open_spoke
        end, records, selector = open_end(transport, schedule, watch, undo)
        names = transport.control.gather(f"process {os.getpid()} on {socket.gethostname()}")
        bell = Waker()
        logbook = ProgressLog(records.writer, bell)
        lifeline = Heartbeat(
            end,
            selector,
            watch,
            names=names,
            bell=bell,
            logbook=logbook,
            records=records,
            hang_up=transport.abort,
        )
        undo.pop_all()
    return RankGuard(lifeline, logbook, transport, watch)


def _open_hub(
    transport: GroupTransport, schedule: Schedule, watch: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, token = PollSelector(), secrets.token_hex(16)
    address = transport.connections.own_address() or "127.0.0.1"

    with transport.control.together(cannot(_OPENING)):
        records = FlightFolder(_new_folder(watch), 0, schedule)
        undo.callback(partial(records.close, keep=False))
        hub = HeartbeatServer(
            transport.num_ranks, watch, selector, records.last_of, address=address, token=token
        )
        undo.callback(hub.close)
    offer = _Offer(address, hub.port, token, str(records.folder))
    transport.control.broadcast(asdict(offer))
    with transport.control.together(cannot(_OPENING)):
        # The other ranks connect.
        pass
    return hub, records, selector


def _open_spoke(
    transport: GroupTransport, schedule: Schedule, watch: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, (rank,) = PollSelector(), transport.ranks
    with transport.control.together(cannot(_OPENING)):
        # Rank 0 opens its server.
        pass
    offer = _Offer(**transport.control.broadcast(None))
    with transport.control.together(cannot(_OPENING)):
        records = FlightFolder(Path(offer.folder), rank, schedule)
        undo.callback(partial(records.close, keep=False))
        spoke = HeartbeatClient(
            rank,
            watch,
            selector,
            records.last_of,
            address=offer.address,
            port=offer.port,
            token=offer.token,
        )
        undo.callback(spoke.close)
    return spoke, records, selector


def _new_folder(watch: Timeouts) -> Path:
    """A folder that nobody has yet; whoever looks for the latest finds it by its name."""
    parent = tempfile.gettempdir() if watch.folder is None else watch.folder
    return Path(parent).absolute() / f"penstock-{strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"

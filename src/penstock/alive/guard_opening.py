"""How the ranks of a pipeline come to watch over one another: who calls whom, and where."""

import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from selectors import PollSelector
from time import strftime
from typing import TypeVar

from penstock.alive.flight_folder import FlightFolder
from penstock.alive.guard import Guard, NoGuard, RankGuard
from penstock.alive.heartbeat import Heartbeat, HeartbeatEnd
from penstock.alive.heartbeat_client import HeartbeatClient
from penstock.alive.heartbeat_server import HeartbeatServer
from penstock.alive.progress_log import ProgressLog
from penstock.alive.timeouts import Timeouts
from penstock.alive.waker import Waker
from penstock.errors import PenstockError, PipelineError
from penstock.ir.schedule import Schedule
from penstock.ranks.agreement import gather_values
from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Transport

__all__ = ["open_guard"]

_T = TypeVar("_T")


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
        names = gather_values(transport, f"process {os.getpid()} on {socket.gethostname()}")
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
            hang_up=transport.hang_up,
        )
        undo.pop_all()
    return RankGuard(lifeline, logbook, transport, watch)


def _open_hub(
    transport: GroupTransport, schedule: Schedule, watch: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, token = PollSelector(), secrets.token_hex(16)
    address = transport.connections.own_address() or "127.0.0.1"

    def prepare() -> tuple[FlightFolder, HeartbeatServer]:
        records = FlightFolder(_new_folder(watch), 0, schedule)
        undo.callback(partial(records.close, keep=False))
        hub = HeartbeatServer(
            transport.num_ranks, watch, selector, records.last_of, address=address, token=token
        )
        undo.callback(hub.close)
        return records, hub

    records, hub = _together(transport, prepare)
    gather_values(transport, asdict(_Offer(address, hub.port, token, str(records.folder))))
    _together(transport, lambda: None)
    return hub, records, selector


def _open_spoke(
    transport: GroupTransport, schedule: Schedule, watch: Timeouts, undo: ExitStack
) -> tuple[HeartbeatEnd, FlightFolder, PollSelector]:
    selector, (rank,) = PollSelector(), transport.ranks
    _together(transport, lambda: None)
    offer = _Offer(**gather_values(transport, None)[0])

    def prepare() -> tuple[FlightFolder, HeartbeatClient]:
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
        return records, spoke

    records, spoke = _together(transport, prepare)
    return spoke, records, selector


def _new_folder(watch: Timeouts) -> Path:
    """A folder that nobody has yet; whoever looks for the latest finds it by its name."""
    parent = tempfile.gettempdir() if watch.folder is None else watch.folder
    return Path(parent).absolute() / f"penstock-{strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _together(transport: Transport, prepare: Callable[[], _T]) -> _T:
    """Do something on every rank, or raise on every rank what kept one from it."""
    results, problem = [], None
    try:
        results.append(prepare())
    except (OSError, PenstockError) as error:
        problem = str(error)
    for rank, told in enumerate(gather_values(transport, problem)):
        if told is not None:
            raise PipelineError(f"rank {rank} cannot watch over the others: {told}")
    return results[0]

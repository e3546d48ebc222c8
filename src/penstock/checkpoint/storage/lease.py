"""One job at a time saves to a folder: a small file says who, and is renewed while the job lives.

    no file                        create it, exclusively where the storage can
    its process is on this machine  alive: refuse; ended: take over at once
    elsewhere                      watch it: renewed: refuse; not renewed for `seconds`: take over

No clocks are compared, since those of two machines differ. A job that was stopped for longer than
`seconds` may lose its lease; it finds out before it completes a step.
"""

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from secrets import token_hex
from threading import Event, Thread, current_thread

from penstock.checkpoint.storage.interface import OWN_FOLDER, Storage
from penstock.checkpoint.storage.processes import Process, is_alive, this_process
from penstock.errors import CheckpointError
from penstock.untrusted import clean_name

__all__ = ["LEASE", "Lease"]

LEASE = f"{OWN_FOLDER}/lease.json"
_MOST_BYTES = 4096
# How often a lease is renewed, and looked at by another job, while it lasts.
_RENEWALS, _LOOKS = 6, 60
# Two jobs that take over at once both write; the last one to write holds the lease after this.
_SETTLE_SECONDS = 0.3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds a lease; `renewals` grows while it lives."""

    job: str
    host: str
    process: Process
    since: str
    renewals: int = 0

    def __str__(self) -> str:
        host = clean_name(self.host)
        return f"process {self.process.number} on {host} since {clean_name(self.since)}"


class Lease:
    """The right of one job to save to a folder; `job` is its name in the folder."""

    def __init__(self, storage: Storage, seconds: float) -> None:
        self.job = token_hex(8)
        self._storage, self._seconds = storage, seconds
        self._since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._process = this_process()
        self._renewing: Thread | None = None
        self._end = Event()

    def hold(self) -> None:
        """Get the lease, or check that this job still has it; raise who has it instead."""
        if self._renewing is not None:
            self._check()
            return
        while not self._try_to_get():
            pass
        self._end.clear()
        self._renewing = Thread(target=self._renew, name="renew the lease", daemon=True)
        self._renewing.start()

    def release(self) -> None:
        """Give the lease back, if this process has it."""
        # A forked process has a copy of this, but not the lease.
        if self._renewing is None or os.getpid() != self._process.number:
            return
        self._end.set()
        renewing, self._renewing = self._renewing, None
        # Garbage may be collected in that thread, and what holds the lease with it.
        if renewing is not current_thread():
            renewing.join()

    def _check(self) -> None:
        found = self._read()
        if not isinstance(found, _Holder) or found.job != self.job:
            other = f"{found} has" if isinstance(found, _Holder) else "somebody has"
            raise CheckpointError(
                f"this job has lost its lease of {self._place()} ({other} taken it over, because "
                f"it was not renewed for {self._seconds:g} s); save to another folder, or end the "
                "other job and start this one again"
            )

    def _try_to_get(self) -> bool:
        """Try once; False means that the lease has changed hands meanwhile."""
        found = self._read()
        if found is None:
            return self._storage.create(LEASE, self._text(0))
        # Another job may have taken over while this one looked.
        if not self._is_over(found) or not self._replace(found):
            return False
        time.sleep(_SETTLE_SECONDS)
        found = self._read()
        return isinstance(found, _Holder) and found.job == self.job

    def _replace(self, found: "_Holder | str") -> bool:
        """Write this job in place of another, unless the lease has changed since it was read."""
        data = self._read_bytes()
        if data is None or _parse(data) != found:
            return False
        return self._storage.replace_if(LEASE, data, self._text(0))

    def _is_over(self, found: "_Holder | str") -> bool:
        """Return whether a lease has ended without being given back; raise if it has not."""
        if isinstance(found, _Holder):
            if found.process == self._process and found.process.machine:
                return True
            alive = is_alive(found.process)
            if alive is not None:
                if alive:
                    self._refuse(found)
                return True
        end = time.monotonic() + self._seconds
        while time.monotonic() < end:
            time.sleep(self._seconds / _LOOKS)
            now = self._read()
            if now is None:
                return False
            if now != found:
                self._refuse(now)
        return True

    def _refuse(self, found: "_Holder | str") -> None:
        who = str(found) if isinstance(found, _Holder) else "another job"
        raise CheckpointError(
            f"{self._place()} must be saved to by one job at a time ({who} uses it); end that "
            "job, or save to another folder"
        )

    def _renew(self) -> None:
        count = 0
        while not self._end.wait(self._seconds / _RENEWALS):
            count += 1
            try:
                found = self._read()
                if not isinstance(found, _Holder) or found.job != self.job:
                    return
                self._storage.replace(LEASE, self._text(count))
            except CheckpointError as error:
                # A full disk, for example: what counts is whether another job takes over.
                _logger.debug("the lease was not renewed: %s", error)
        self._give_back()

    def _give_back(self) -> None:
        try:
            found = self._read()
            if isinstance(found, _Holder) and found.job == self.job:
                self._storage.remove(LEASE)
        except CheckpointError as error:
            _logger.debug("the lease was not given back: %s", error)

    def _read(self) -> "_Holder | str | None":
        """Return who holds the lease, or its text if that says nothing, or None without one."""
        data = self._read_bytes()
        return None if data is None else _parse(data)

    def _read_bytes(self) -> bytes | None:
        size = self._storage.size(LEASE)
        if size is None:
            return None
        if size > _MOST_BYTES:
            raise CheckpointError(
                f"{self._storage.show(LEASE)} must be a lease (it has {size:,} bytes); remove it"
            )
        try:
            with self._storage.open(LEASE) as file:
                return file.read(_MOST_BYTES)
        except CheckpointError:
            # It was given back between the two calls.
            if self._storage.size(LEASE) is None:
                return None
            raise

    def _text(self, renewals: int) -> bytes:
        holder = _Holder(self.job, socket.gethostname(), self._process, self._since, renewals)
        return json.dumps(asdict(holder)).encode()

    def _place(self) -> str:
        return self._storage.show("").rstrip("/")


def _parse(data: bytes) -> _Holder | str:
    """Return who holds a lease, or its text if that says nothing."""
    try:
        facts = json.loads(data)
        process = Process(**facts.pop("process"))
        holder = _Holder(**facts, process=process)
        texts = (holder.job, holder.host, holder.since, process.machine, process.start)
        if all(isinstance(text, str) for text in texts) and isinstance(process.number, int):
            return holder
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return repr(data)

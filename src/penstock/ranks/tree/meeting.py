"""Where ranks find one another before they are connected: the store of the process group.

Every rank writes where it can be reached, and looks up the ranks above it. Rank 0 also writes the
secret that lets ranks in. Whoever can read the store could do as it likes with the group anyway.
"""

import os
import secrets
import socket
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Protocol

from penstock.errors import PipelineError
from penstock.ranks.tree.values import decode_value, encode_value

__all__ = ["Contact", "Meeting", "Store", "longest_pause", "own_address"]

_LOOPBACK = "127.0.0.1"
# No packet goes to this address, which is reserved for documentation: it only picks a route.
_ANYWHERE = "192.0.2.1"
# How long a rank pauses at most before it looks into the store again; and how often all ranks
# together do, because one process answers them.
_LONGEST_PAUSE = 0.1
_MOST_LOOKS_PER_SECOND = 5000


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values for all of these keys."""


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a rank can be reached, and what it is called in messages."""

    address: str
    port: int
    name: str


class Meeting:
    """One opening of a tree, in a store that no other opening uses."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def make_token(self) -> str:
        """Return a new secret and let the others find it; only the first rank calls this."""
        token = secrets.token_hex(32)
        self._write("token", token)
        return token

    def find_token(self) -> str | None:
        """Return the secret, if the first rank has come."""
        text = self._find("token")
        return None if text is None else text.decode()

    def publish(self, contact: Contact) -> None:
        """Let the others find this rank."""
        self._write(f"contact{self._rank}", encode_value(astuple(contact)).decode())

    def find(self, rank: int) -> Contact | None:
        """Return where a rank can be reached, if it has come."""
        text = self._find(f"contact{rank}")
        if text is None:
            return None
        address, port, name = decode_value(text)
        return Contact(address, port, name)

    def _write(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _store_is_gone(error) from error

    def _find(self, key: str) -> bytes | None:
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise _store_is_gone(error) from error


def _store_is_gone(error: RuntimeError) -> PipelineError:
    return PipelineError(
        f"the store in which ranks meet cannot be reached any more: {error}; see what happened to "
        "the process that called init_process_group as rank 0"
    )


def longest_pause(size: int) -> float:
    """Return for how long one rank of a group pauses between two looks into the store.

    >>> longest_pause(8), longest_pause(2000)
    (0.1, 0.4)
    """
    return max(_LONGEST_PAUSE, size / _MOST_LOOKS_PER_SECOND)


def own_address(store_host: str | None) -> str:
    """Return the address by which other ranks reach this machine.

    That is the one from which the host of the store is reached. The machine of the store itself
    may know its own name as a loopback address; with ranks on other machines it is one of these.
    """
    candidates = [_address_towards(host) for host in (store_host, _ANYWHERE) if host is not None]
    found = [address for address in candidates if address is not None]
    if _has_other_machines():
        found = [address for address in found if not address.startswith("127.")] + found
    return found[0] if found else _LOOPBACK


def _has_other_machines() -> bool:
    """Return whether torchrun has started ranks on other machines too."""
    return os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")


def _address_towards(host: str) -> str | None:
    """Return the address from which a host is reached; nothing is sent."""
    with suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            address: str = probe.getsockname()[0]
            return address
    return None

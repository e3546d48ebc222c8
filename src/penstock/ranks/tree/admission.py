"""Who is let in: both ends of a connection prove that they know a secret, which never travels.

    listener                                    caller
       | ---- challenge, a random number ---------> |
       | <--- answer, rank, another number, proof - |    a proof is an HMAC over both numbers,
       | ---- admitted, proof --------------------> |    the rank and the direction

Before that a caller has no state but a place among a few, for a few seconds and short messages.
Whatever it sends costs that place; nothing it does is an error of the listener.
"""

import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from selectors import EVENT_READ, BaseSelector
from time import monotonic
from typing import Any

from penstock.ranks.tree.json_connection import ConnectionBrokenError, JsonConnection
from penstock.ranks.tree.values import decode_value, encode_value

__all__ = ["Listener", "NotAdmittedError", "call"]

_LOGGER = getLogger(__name__)

# Callers that have not proved themselves yet: in total, from one address, and for how long. If
# there are more, the oldest lose their places: a rank needs its place for a moment only.
_MOST_CALLERS = 64
_MOST_PER_ADDRESS = 48
_MOST_SECONDS = 5.0
# How many callers are accepted before ranks are listened to again.
_ACCEPTED_AT_ONCE = 16


class NotAdmittedError(Exception):
    """The other side was reached, but did not answer as one that knows the secret."""


@dataclass(frozen=True, slots=True, eq=False)
class _Caller:
    connection: JsonConnection
    address: str
    challenge: str
    since: float


# Called with the rank and the connection of a caller that was admitted.
Admit = Callable[[int, JsonConnection], None]


@dataclass(slots=True)
class Listener:
    """Accepts connections of other ranks; its events are handled in the selector's loop."""

    selector: BaseSelector
    address: str
    token: str
    admit: Admit
    _socket: socket.socket = field(init=False)
    _callers: list[_Caller] = field(default_factory=list)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._socket = socket.create_server((self.address, 0), family=family, backlog=256)
        self._socket.setblocking(False)
        self.selector.register(self._socket, EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        """The port at which others connect."""
        port: int = self._socket.getsockname()[1]
        return port

    def drop_late(self, now: float) -> None:
        """Close connections that have not proved themselves in time."""
        for caller in list(self._callers):
            if now - caller.since >= _MOST_SECONDS:
                self._drop(caller)

    def close(self) -> None:
        """Stop listening, and close what was not admitted."""
        if self._socket.fileno() >= 0:
            self.selector.unregister(self._socket)
            self._socket.close()
        for caller in list(self._callers):
            self._drop(caller)

    def release(self) -> None:
        """Close the descriptors only, as a forked copy of the process must."""
        self._socket.close()
        for caller in self._callers:
            caller.connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, where = self._socket.accept()
            except OSError:
                # Nobody else waits, or the caller is gone again, or descriptors have run out.
                return
            connection = JsonConnection(accepted)
            caller = _Caller(connection, where[0], secrets.token_hex(16), monotonic())
            self._callers.append(caller)
            self.selector.register(connection, EVENT_READ, partial(self._read, caller))
            self._make_room(caller.address)
            self._send(caller, "challenge", caller.challenge)

    def _make_room(self, address: str) -> None:
        same = [other for other in self._callers if other.address == address]
        if len(same) > _MOST_PER_ADDRESS:
            self._drop(same[0])
        if len(self._callers) > _MOST_CALLERS:
            self._drop(self._callers[0])

    def _send(self, caller: _Caller, *words: Any) -> None:
        with suppress(ConnectionBrokenError):
            caller.connection.send(*words)

    def _read(self, caller: _Caller) -> None:
        if caller not in self._callers:
            # It lost its place while its event was waiting to be handled.
            return
        try:
            # All of it: a caller that has given up in the meantime is not let in.
            for words in list(caller.connection.receive())[:1]:
                self._identify(caller, words)
        except (ConnectionBrokenError, ValueError) as error:
            _LOGGER.debug("a caller was refused: %s", error)
            self._drop(caller)

    def _identify(self, caller: _Caller, words: list[Any]) -> None:
        match words:
            case ["answer", int(rank), str(nonce), str(proof)] if len(nonce) <= 64:
                told = (rank, caller.challenge, nonce)
                if not _is_proof(proof, self.token, "caller", *told):
                    raise ConnectionBrokenError("the caller does not belong here")
            case _:
                raise ConnectionBrokenError("the caller does not belong here")
        self._callers.remove(caller)
        self.selector.unregister(caller.connection)
        self._send(caller, "admitted", _proof(self.token, "listener", *told))
        caller.connection.trust()
        self.admit(rank, caller.connection)

    def _drop(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self.selector.unregister(caller.connection)
        caller.connection.close()


def call(address: str, port: int, *, token: str, rank: int, seconds: float) -> JsonConnection:
    """Connect to a listener as this rank; wait at most this long for each of its answers.

    Raises an `OSError` if it cannot be reached, and `NotAdmittedError` if it does not answer.
    """
    connection = socket.create_connection((address, port), timeout=seconds)
    try:
        nonce = secrets.token_hex(16)
        # Without a buffer, which would take what comes right behind the last line.
        with connection.makefile("rb", buffering=0) as lines:
            challenge = _read_word(lines.readline(1024), "challenge")
            told = (rank, challenge, nonce)
            answer = ["answer", rank, nonce, _proof(token, "caller", *told)]
            connection.sendall(_line(answer))
            proof = _read_word(lines.readline(1024), "admitted")
            if not _is_proof(proof, token, "listener", *told):
                raise NotAdmittedError("the listener does not know the secret")
    except (OSError, ValueError) as error:
        connection.close()
        raise NotAdmittedError(f"no answer: {error}") from error
    except NotAdmittedError:
        connection.close()
        raise
    return JsonConnection(connection, is_trusted=True)


def _line(words: list[Any]) -> bytes:
    return encode_value(words) + b"\n"


def _read_word(line: bytes, kind: str) -> str:
    match decode_value(line):
        case [str(found), str(word)] if found == kind:
            return word
    raise NotAdmittedError(f"the listener sent {line[:80]!r}")


def _proof(token: str, role: str, rank: int, challenge: str, nonce: str) -> str:
    text = f"{role} {rank} {challenge} {nonce}"
    return hmac.digest(token.encode(), text.encode(), "sha256").hex()


def _is_proof(proof: str, token: str, role: str, rank: int, challenge: str, nonce: str) -> bool:
    expected = _proof(token, role, rank, challenge, nonce)
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())

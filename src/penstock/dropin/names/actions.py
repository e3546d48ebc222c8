"""The action type of `torch.distributed.pipelining`, its text, and the way from and to our own.

    _Action(2, FORWARD, 0)    ->  2F0
    _Action(1, UNSHARD)       ->  1UNSHARD
    _Action(-1, OVERLAP_F_B, None, (_Action(0, F, 3), _Action(7, B, 1)))  ->  (0F3;7B1)OVERLAP_F_B

An order is a list of actions, where `None` is an idle slot. Torch is not needed.
"""

import re
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from penstock.errors import ParseError, ScheduleError
from penstock.ir.actions import MEMORY_KINDS, Action, Kind, Overlap, Work, chain_peer
from penstock.ir.text import parse_work

__all__ = [
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "FULL_BACKWARD",
    "KIND_OF_TYPE",
    "OVERLAP_F_B",
    "RECV_B",
    "RECV_F",
    "REDUCE_GRAD",
    "RESHARD",
    "SEND_B",
    "SEND_F",
    "TYPE_OF_KIND",
    "UNSHARD",
    "WAITS",
    "WAIT_SEND_B",
    "WAIT_SEND_F",
    "ActionTextError",
    "B",
    "F",
    "I",
    "W",
    "_Action",
    "_ComputationType",
    "_action_regex",
    "_get_profiler_function_name",
    "from_work",
    "to_work",
    "to_works",
]


class ActionTextError(ParseError, RuntimeError):
    """A text that is not an action; also a `RuntimeError`, which torch's users expect here."""


class _ComputationType(str, Enum):  # noqa: UP042  # as in torch, str() gives the name
    """What an action does; the value is its text."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    # Newer versions of torch say where a send is waited for; here the transport knows.
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"

    @staticmethod
    def from_str(action: str) -> "_ComputationType":
        try:
            return _ComputationType(action)
        except ValueError as error:
            known = ", ".join(known.value for known in _ComputationType)
            raise ActionTextError(f"{action!r} must be one of {known}") from error


FORWARD = F = _ComputationType.FORWARD
BACKWARD_INPUT = I = _ComputationType.BACKWARD_INPUT  # noqa: E741  # torch's own name
BACKWARD_WEIGHT = W = _ComputationType.BACKWARD_WEIGHT
FULL_BACKWARD = B = _ComputationType.FULL_BACKWARD
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
REDUCE_GRAD = _ComputationType.REDUCE_GRAD
WAIT_SEND_F = _ComputationType.WAIT_SEND_F
WAIT_SEND_B = _ComputationType.WAIT_SEND_B

WAITS = frozenset((WAIT_SEND_F, WAIT_SEND_B))
_COMPUTE = frozenset((F, I, W, B, OVERLAP_F_B))
TYPE_OF_KIND = {kind: _ComputationType[kind.name] for kind in Kind if kind not in MEMORY_KINDS}
KIND_OF_TYPE = {computation_type: kind for kind, computation_type in TYPE_OF_KIND.items()}

# The text of an action that is not an overlap: stage, kind, microbatch.
_KINDS = "|".join(kind.value for kind in _ComputationType if kind is not OVERLAP_F_B)
_action_regex = re.compile(rf"(\d+)({_KINDS})(\d*)")
_WAIT_TEXT = re.compile(r"(\d+)(WAIT_SEND_[FB])(\d+)", re.ASCII)


class _Action(NamedTuple):
    """One piece of work: a stage, what is done, and for most kinds a microbatch."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: "tuple[_Action, ...] | None" = None

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{microbatch}"

    @property
    def is_compute_op(self) -> bool:
        return self.computation_type in _COMPUTE

    @staticmethod
    def from_str(action_string: str) -> "_Action | None":
        text = action_string.strip()
        if not text:
            return None
        if wait := _WAIT_TEXT.fullmatch(text):
            return _Action(int(wait[1]), _ComputationType(wait[2]), int(wait[3]))
        try:
            return from_work(parse_work(action_string))
        except ParseError as error:
            raise ActionTextError(str(error)) from error


@lru_cache
def _get_profiler_function_name(action: _Action) -> str:
    return f"PP:{action}"


def from_work(work: Work) -> _Action:
    """Return torch's form of one of our actions or overlaps."""
    if isinstance(work, Overlap):
        # Its stages are those of its sub-actions.
        return _Action(-1, OVERLAP_F_B, None, tuple(map(from_work, work.actions)))
    if work.peer is not None and work.peer != chain_peer(work.kind, work.stage):
        raise ActionTextError(f"'{work}' skips stages, which a chain of stages does not know")
    if work.kind.is_memory:
        raise ActionTextError(f"'{work}' is an action that torch does not have")
    return _Action(work.stage, TYPE_OF_KIND[work.kind], work.microbatch)


def to_work(action: _Action) -> Work:
    """Return our form of one of torch's actions."""
    if action.sub_actions is not None:
        return Overlap(tuple(map(_to_action, action.sub_actions)))
    return _to_action(action)


def to_works(actions: Iterable[_Action | None]) -> list[Work]:
    """Return our form of a rank's order, without idle slots and waits: time is a result here."""
    return [to_work(a) for a in actions if a is not None and a.computation_type not in WAITS]


def _to_action(action: _Action) -> Action:
    kind = KIND_OF_TYPE.get(action.computation_type)
    if kind is None:
        raise ScheduleError(f"{action} has no sub-actions; an overlap groups two or more")
    return Action(kind, action.stage_index, action.microbatch_index)

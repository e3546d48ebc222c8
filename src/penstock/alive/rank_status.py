"""What a rank says of itself when it is asked how it is."""

from dataclasses import astuple, dataclass, fields
from typing import Any, get_args, get_type_hints

__all__ = ["NOWHERE", "RankStatus"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank is.

    All ranks make the same calls in the same order (a step, an evaluation, clipping), each with a
    number; `is_inside` tells whether the rank is in the last of them still. `done` grows with
    everything that it finishes. `waits_for` is the rank whose message it needs to get on;
    `is_meeting` says that it needs all of them. `failure` is an error that it will raise, `broken`
    one that its connections had, both of the last call.
    """

    call: int = 0
    is_inside: bool = False
    done: int = 0
    doing: str | None = None
    seconds: float = 0.0
    waits_for: int | None = None
    awaited: str | None = None
    is_meeting: bool = False
    failure: str | None = None
    broken: str | None = None

    @property
    def progress(self) -> tuple[int, bool, int]:
        """What changes whenever the rank gets on."""
        return self.call, self.is_inside, self.done

    def to_values(self) -> list[Any]:
        """As plain values, in order."""
        return list(astuple(self))

    @classmethod
    def from_values(cls, values: list[Any]) -> "RankStatus":
        """From plain values; others than a place has are a `ValueError`."""
        if len(values) != len(_TYPES):
            raise ValueError(f"a place has {len(_TYPES)} values (got {len(values)})")
        for name, value in zip(_TYPES, values, strict=True):
            if type(value) not in _TYPES[name]:
                raise ValueError(f"a place has no {name} like {value!r}")
        return cls(*values)


def _types() -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(RankStatus)
    return {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in fields(RankStatus)}


_TYPES = _types()
# Where a rank is that has not told yet.
NOWHERE = RankStatus()

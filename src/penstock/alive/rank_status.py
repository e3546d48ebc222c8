"""What a rank reports about itself with every heartbeat."""

from dataclasses import astuple, dataclass, fields
from typing import Any, get_args, get_type_hints

__all__ = ["INITIAL_STATUS", "RankStatus"]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank is doing.

    All ranks make the same calls in the same order (a step, an evaluation, clipping), and `call`
    counts them; `is_inside` says whether the rank is still in the last one. `done` grows with
    every action that it finishes. `waits_for` is the rank whose message it needs to continue;
    `is_meeting` says that it needs all of them. `failure` is an error that it will raise, and
    `broken` an error of its connections, both of the last call. `is_with_replicas` says that it is
    in something that it does together with ranks of other pipelines.
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
    is_with_replicas: bool = False

    @property
    def progress(self) -> tuple[int, bool, int]:
        """What changes whenever the rank makes progress."""
        return self.call, self.is_inside, self.done

    def to_values(self) -> list[Any]:
        """Return the fields as plain values, in order."""
        return list(astuple(self))

    @classmethod
    def from_values(cls, values: list[Any]) -> "RankStatus":
        """Return the status of plain values; others than a status has are a `ValueError`."""
        if len(values) != len(_TYPES):
            raise ValueError(f"a rank status must have {len(_TYPES)} values (got {len(values)})")
        for name, value in zip(_TYPES, values, strict=True):
            if type(value) not in _TYPES[name]:
                names = " or ".join(kind.__name__ for kind in _TYPES[name])
                raise ValueError(f"{name} of a rank status must be {names} (got {value!r})")
        return cls(*values)


def _types() -> dict[str, tuple[type, ...]]:
    hints = get_type_hints(RankStatus)
    return {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in fields(RankStatus)}


_TYPES = _types()
# The status of a rank that has not sent one yet.
INITIAL_STATUS = RankStatus()

"""Costs of the same model in another number of pieces."""

from penstock.errors import CostsError

__all__ = ["NOT_SHARED", "recut"]

# Sizes that do not depend on how many pieces a model is cut into.
NOT_SHARED = ("message_bytes", "workspace_bytes", "input_bytes")


def recut(name: str, given: list[float], pieces: int) -> tuple[float, ...]:
    """Return a cost of every piece from that of consecutive ones: divided evenly, or added up."""
    is_shared = name not in NOT_SHARED
    if pieces % len(given) == 0:
        times = pieces // len(given)
        return tuple(value / (times if is_shared else 1) for value in given for _ in range(times))
    if len(given) % pieces == 0:
        size = len(given) // pieces
        parts = [given[piece * size : (piece + 1) * size] for piece in range(pieces)]
        # The input of joined pieces is that of the first; their workspace is the largest.
        match name:
            case "message_bytes" | "input_bytes":
                return tuple(part[0] for part in parts)
            case "workspace_bytes":
                return tuple(max(part) for part in parts)
            case _:
                return tuple(sum(part) for part in parts)
    raise CostsError(
        f"{name} has {len(given)} values, which cannot be divided evenly among {pieces} stages"
    )

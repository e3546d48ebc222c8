"""The folder with the flight records of a pipeline's ranks."""

import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from time import strftime

from penstock.errors import PenstockError
from penstock.files.flight.log import spell_out
from penstock.files.flight.record_file import FlightWriter, flight_path, read_flight
from penstock.ir.schedule import Schedule

__all__ = ["FlightFolder", "last_action_in", "new_flight_folder"]


class FlightFolder:
    """This rank's flight record, among those of the other ranks on the same machine."""

    def __init__(self, folder: Path, rank: int, schedule: Schedule) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.writer = FlightWriter(
            flight_path(folder, rank),
            rank=rank,
            placement=schedule.placement,
            schedule=schedule.name,
        )

    def path_of(self, rank: int) -> Path:
        """Return where a rank of the same pipeline keeps its record."""
        return flight_path(self.folder, rank)

    def close(self, *, keep: bool) -> None:
        """Keep the record so that it can be explained, or remove it."""
        self.writer.close(keep=keep)
        with suppress(OSError):
            # The last rank removes the folder too; until then it is not empty.
            self.folder.rmdir()


def new_flight_folder(parent: Path | str | None) -> Path:
    """Return a new folder; its name begins with the time, so that the latest is easy to find."""
    inside = Path(tempfile.gettempdir() if parent is None else parent).absolute()
    return inside / f"penstock-{strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def last_action_in(path: Path | str) -> str | None:
    """Return what a rank did last by its record, as a part of a sentence, if that can be read."""
    try:
        last = read_flight(path).last
    except (OSError, PenstockError):
        return None
    if last is None:
        return "it had not started any action"
    return f"its last action was {spell_out(last.doing)} of step {last.step}"

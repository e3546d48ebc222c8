"""The folder with the flight records of a pipeline's ranks."""

from contextlib import suppress
from pathlib import Path

from penstock.errors import PenstockError
from penstock.files.flight.log import spell_out
from penstock.files.flight.record_file import FlightWriter, flight_path, read_flight
from penstock.ir.schedule import Schedule

__all__ = ["FlightFolder"]


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

    def last_action_of(self, rank: int) -> str | None:
        """Return what a rank did last, as a part of a sentence, if its record can be read."""
        try:
            last = read_flight(flight_path(self.folder, rank)).last
        except (OSError, PenstockError):
            return None
        if last is None:
            return "it had not started any action"
        return f"its last action was {spell_out(last.doing)} of step {last.step}"

    def close(self, *, keep: bool) -> None:
        """Keep the record so that it can be explained, or remove it."""
        self.writer.close(keep=keep)
        with suppress(OSError):
            # The last rank removes the folder too; until then it is not empty.
            self.folder.rmdir()

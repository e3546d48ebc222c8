"""The folder with the flight records of a pipeline's ranks, and what it tells of one of them."""

from contextlib import suppress
from pathlib import Path

from penstock.errors import PenstockError
from penstock.files.flight.log import spell_out
from penstock.files.flight.record_file import FlightWriter, flight_path, read_flight
from penstock.ir.schedule import Schedule

__all__ = ["FlightFolder"]


class FlightFolder:
    """This rank's flight record, among those of the others on the same machine."""

    def __init__(self, folder: Path, rank: int, schedule: Schedule) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.writer = FlightWriter(
            flight_path(folder, rank),
            rank=rank,
            placement=schedule.placement,
            schedule=schedule.name,
        )

    def last_of(self, rank: int) -> str | None:
        """What a rank did last, as a part of a sentence, if its record can be read here."""
        try:
            last = read_flight(flight_path(self.folder, rank)).last
        except (OSError, PenstockError):
            return None
        if last is None:
            return "it had begun no action"
        return f"its last action was {spell_out(last.doing)} of step {last.step}"

    def close(self, *, keep: bool) -> None:
        """Leave the record for whoever wants to know what happened, or remove it."""
        self.writer.close(keep=keep)
        with suppress(OSError):
            # Whoever is last removes the folder too; until then it is not empty.
            self.folder.rmdir()

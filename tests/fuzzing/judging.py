"""What has to hold for any bytes that a reader is given."""

from pathlib import Path

from penstock.errors import PenstockError
from tests.fuzzing.bounds import bounded
from tests.fuzzing.readers import Reader

__all__ = ["check_message", "judge"]

_SECONDS = 5.0
_BYTES_MORE = 256 * 2**20
_MOST_CHARACTERS = 2000


def judge(reader: Reader, data: bytes, folder: Path) -> bool:
    """Whether the bytes were read, after checking that this or the refusal was right.

    What was read is the same after it was written and read again, and commands can use it. A
    refusal is an error of ours that names the file.
    """
    file, again = (folder / f"{name}{reader.ending}" for name in ("given", "again"))
    file.write_bytes(data)
    with bounded(seconds=_SECONDS, bytes_more=_BYTES_MORE):
        try:
            value = reader.read(file)
        except PenstockError as error:
            check_message(str(error), str(file))
            return False
        try:
            reader.write(value, again)
            assert reader.content(reader.read(again)) == reader.content(value)
            reader.use(value)
        except PenstockError as error:
            check_message(str(error), "")
        return True


def check_message(message: str, must_name: str) -> None:
    """Check that a message can be shown on any terminal and read by a person."""
    assert must_name in message
    assert len(message) <= _MOST_CHARACTERS
    assert all(letter.isprintable() or letter == "\n" for letter in message), repr(message)

"""Files that are written whole or not at all, whatever stops the writer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

__all__ = ["replacing", "write_atomically"]


def write_atomically(path: Path | str, text: str) -> None:
    """Write text to a file as UTF-8; until all of it is written, the old file stays in place."""
    with replacing(path) as partial:
        partial.write_bytes(text.encode())


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a path to write to, in the same folder and with the same suffix; then rename it.

    If the block fails, what it wrote is removed and the file is as before. A path that is not a
    file, such as a pipe, is given unchanged.
    """
    file = Path(path).resolve()
    if file.exists() and not file.is_file():
        yield file
        return
    partial = file.with_name(f".partial-{os.urandom(4).hex()}-{file.name}")
    try:
        yield partial
        if file.exists():
            partial.chmod(S_IMODE(file.stat().st_mode))
        partial.replace(file)
    except OSError as error:
        # The user knows the file by the name that they gave.
        if error.filename == str(partial):
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)

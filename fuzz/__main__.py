"""Fuzz one reader with Atheris, or all in turn: `python -m fuzz [READER] [libFuzzer options]`.

A reader starts from its valid files. An input that breaks it is written to the working folder as
`crash-*`; give that file as an argument to run it again.
"""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["penstock"]):
    from tests.fuzzing.judging import judge
    from tests.fuzzing.readers import READERS, Reader

from tests.fuzzing.edits import apply_edits, draw_edits


def main(arguments: list[str]) -> int:
    """Fuzz the reader that is named first, or each of them in a process of its own."""
    if arguments and arguments[0] in READERS:
        fuzz(READERS[arguments[0]], arguments[1:])
        return 0
    codes = []
    for name in READERS:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "fuzz", name, *arguments]
        codes.append(subprocess.run(command, check=False).returncode)
    return max(codes)


def fuzz(reader: Reader, options: list[str]) -> None:
    """Give a reader inputs until an option of libFuzzer, such as -max_total_time, ends it."""
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as folder:
        corpus, work = Path(folder, "corpus"), Path(folder, "work")
        corpus.mkdir()
        work.mkdir()
        for number, data in enumerate(reader.valid):
            (corpus / str(number)).write_bytes(data)

        def try_one(data: bytes) -> None:
            judge(reader, data, work)

        def change(data: bytes, max_size: int, seed: int) -> bytes:
            """Make one of our edits every other time, which keep the structure of a file."""
            random = Random(seed)
            if random.random() < 0.5:
                return bytes(atheris.Mutate(data, max_size))
            return apply_edits(data, draw_edits(random))[:max_size]

        settings = ["-max_len=65536", "-timeout=60", "-rss_limit_mb=4096", *options]
        atheris.Setup([sys.argv[0], *settings, str(corpus)], try_one, custom_mutator=change)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command `python -m tests.gpu`: every test that needs CUDA, several at once.

Most of these tests wait for processes and communicators to start, so that one GPU has room for a
few at a time. Those that measure what is free on the device are marked `alone` and come last. It
needs no package beside pytest, because nothing can be installed on some machines with a GPU.
Arguments go to pytest: `--rehearse-gpu` tries it out without a GPU.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import monotonic

RUNS_AT_ONCE = 6
# Tests of one file share their processes, and long files are cut so that the runs end together.
MOST_TESTS = 8
# Without an answer for this time a test is said to hang, with the stack of every thread.
HANG_SECONDS = "240"
PYTEST = (
    *(sys.executable, "-m", "pytest", "-o", f"faulthandler_timeout={HANG_SECONDS}"),
    *sys.argv[1:],
)
# pytest's exit code where a run had no test to execute.
NO_TESTS = 5


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest printed, its exit code, and how many seconds it took."""

    tests: tuple[str, ...]
    output: str
    errors: str
    code: int
    seconds: float

    @property
    def counts(self) -> Counter[str]:
        """How many tests passed, failed and so on, from the last line of the run."""
        last = self.output.rstrip().rpartition("\n")[2]
        found = re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)
        return Counter({word.removesuffix("s"): int(number) for number, word in found})

    def show(self) -> None:
        """Print one line, and the whole run if something is wrong with it."""
        told = ", ".join(f"{number} {word}" for word, number in self.counts.items())
        print(f"{self.tests[0].partition('::')[0]}: {told}, {self.seconds:.0f} s", flush=True)
        if self.code or not self.counts:
            print(self.output, self.errors, sep="\n", flush=True)


def run_pytest(tests: tuple[str, ...]) -> Outcome:
    start = monotonic()
    done = subprocess.run(
        [*PYTEST, "-rfEs", "--durations=5", *tests], capture_output=True, text=True, check=False
    )
    return Outcome(tests, done.stdout, done.stderr, done.returncode, monotonic() - start)


def collect(mark: str) -> list[str]:
    """Return the names of all tests with these marks."""
    files = [
        str(path)
        for path in sorted(Path("tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [*PYTEST, "--collect-only", "-m", mark, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NO_TESTS):
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def batched(tests: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    return (tests[start : start + size] for start in range(0, len(tests), size))


def cut(tests: list[str]) -> Iterator[tuple[str, ...]]:
    """Cut the tests of every file into runs of neighbours."""
    for _, found in groupby(tests, key=lambda test: test.partition("::")[0]):
        of_file = tuple(found)
        yield from batched(of_file, MOST_TESTS)


def main() -> None:
    """Run the tests, those of a file with many before the others; exit with 1 if any failed."""
    together = sorted(cut(collect("gpu and not alone")), key=len, reverse=True)
    alone = collect("gpu and alone")
    outcomes = []
    with ThreadPoolExecutor(RUNS_AT_ONCE) as runs:
        for outcome in runs.map(run_pytest, together):
            outcome.show()
            outcomes.append(outcome)
    outcomes.append(run_pytest(tuple(alone)))
    outcomes[-1].show()
    total = sum((outcome.counts for outcome in outcomes), Counter[str]())
    failed = total["failed"] + total["error"]
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped", flush=True)
    # Not by exit codes alone: a run that ended early has an exit code and no counts.
    is_whole = total.total() >= len(alone) + sum(map(len, together))
    sys.exit(any(outcome.code for outcome in outcomes) or not is_whole)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

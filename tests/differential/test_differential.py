"""Random models, losses and schedules: a pipeline gives what the plain model gives.

The seeds of the quick set never change; `make test-all` adds fresh ones, which a failure prints.
`python -m tests.differential --only SEED` runs one of them again.
"""

from collections.abc import Iterable
from secrets import randbelow

import pytest

from tests.covering import all_but_slow
from tests.differential.campaign import Finding, run_here, run_over_processes, seeds_of
from tests.processes import Processes

# In as many tests, so that workers can share them; the first five are run by default.
QUICK_CHUNKS = range(0, 200, 25)
MOST_FINDINGS = 3


def describe(found: Iterable[tuple[int, Finding | None]]) -> list[str]:
    """The first few findings in words; the rest of the run is left out."""
    words: list[str] = []
    for _, finding in found:
        if finding is not None:
            words.append(str(finding))
        if len(words) == MOST_FINDINGS:
            break
    return words


@pytest.mark.parametrize("start", all_but_slow(QUICK_CHUNKS, QUICK_CHUNKS[:5]))
def test_pipeline_in_one_process_equals_the_plain_model(start: int) -> None:
    assert describe(run_here(range(start, start + 25))) == []


def test_pipeline_over_two_processes_equals_the_plain_model(two_processes: Processes) -> None:
    assert describe(run_over_processes(range(6), two_processes)) == []


@pytest.mark.slow
def test_pipeline_equals_the_plain_model_for_fresh_seeds() -> None:
    seed = randbelow(1_000_000)
    assert describe(run_here(seeds_of(seed, 2000))) == [], f"--seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipeline_over_processes_equals_the_plain_model_for_fresh_seeds(ranks: int) -> None:
    seed = randbelow(1_000_000)
    with Processes(ranks) as processes:
        found = describe(run_over_processes(seeds_of(seed, 100), processes))
    assert found == [], f"--seed {seed} --processes {ranks}"

"""Fabric and the Accelerator train in pipelines as they do in one process."""

from pathlib import Path

import pytest

from tests.integrations.comparing import assert_same, logs_of
from tests.integrations.launching import program, run_all

RUN = "tests.integrations.loops"


def command(
    library: str, what: str, folder: Path, *settings: str, processes: int = 1
) -> list[str]:
    folder.mkdir(exist_ok=True)
    return program(RUN, library, what, str(folder), *settings, processes=processes)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["fabric", "accelerate"])
def test_a_loop_trains_as_in_one_process_and_resumes_in_another_layout(
    tmp_path: Path, library: str
) -> None:
    one, two, four = tmp_path / "one", tmp_path / "two", tmp_path / "four"
    run_all(
        command(library, "plain", one),
        command(library, "ZBV", two, processes=2),
    )
    # Every rank's rows once counted, because Fabric asks for those of all processes.
    # 40 batches, and 5 evaluations of 3 batches with a number of hits each.
    assert len(logs_of(one)) == 60
    assert_same(two, one)
    run_all(command(library, "Interleaved1F1B", four, f"resume={two}", processes=4))
    assert_same(four, one)

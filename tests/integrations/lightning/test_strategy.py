"""Lightning's Trainer trains in pipelines, over processes, as it does in one process."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integrations.comparing import assert_same, logs_of
from tests.integrations.launching import program, run_all

RUN = "tests.integrations.lightning.run"


def command(what: str, folder: Path, *settings: str, processes: int = 1) -> list[str]:
    return program(RUN, what, str(folder), *settings, processes=processes)


CASES: dict[str, tuple[str, int, Sequence[str], Sequence[str]]] = {
    "2 ranks": ("ZBV", 2, ("shuffle=yes",), ("shuffle=yes",)),
    "4 ranks": ("Interleaved1F1B", 4, (), ()),
    # The mean of two replicas is that of both where all rows have as many labels.
    "replicas": ("1F1B", 4, ("ranks=2", "batch=2", "full=yes"), ("full=yes",)),
    "tied": ("1F1B", 2, ("tied=yes",), ("tied=yes",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pipelines_train_as_one_process(tmp_path: Path, name: str) -> None:
    schedule, processes, settings, others = CASES[name]
    run_all(
        command("trainer", tmp_path / "one", *others),
        command(schedule, tmp_path / "many", *settings, processes=processes),
    )
    assert len(logs_of(tmp_path / "one")) > 40
    assert_same(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    one, two, four = tmp_path / "one", tmp_path / "two", tmp_path / "four"
    run_all(command("trainer", one), command("ZBV", two, "epochs=2", processes=2))
    checkpoint = two / "saved" / "epoch=1.ckpt"
    assert (checkpoint / "trainer.ckpt").is_file()
    run_all(command("Interleaved1F1B", four, f"resume={checkpoint}", processes=4))
    assert_same(four, one)


@pytest.mark.slow
def test_a_pipeline_resumes_from_a_file_of_one_process(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_all(command("trainer", one))
    checkpoint = one / "saved" / "epoch=1.ckpt"
    run_all(command("ZBV", two, f"resume={checkpoint}", processes=2))
    assert_same(two, one)

"""Every reader gives a right value or an error of ours, in bounded time and memory."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing.edits import apply_edits, draw_edits
from tests.fuzzing.judging import judge
from tests.fuzzing.readers import READERS
from tests.fuzzing.strategies import any_bytes, changed_files
from tests.strategies import examples

# The folder is the same for all examples: each writes its files anew.
FUZZED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


@pytest.mark.parametrize("name", READERS)
def test_valid_files_are_read_and_written_the_same(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    assert all(judge(reader, data, tmp_path) for data in reader.valid)


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@settings(FUZZED, max_examples=examples(150))
def test_changed_files_are_read_or_refused(name: str, data: st.DataObject, tmp_path: Path) -> None:
    judge(READERS[name], data.draw(changed_files(READERS[name])), tmp_path)


@pytest.mark.parametrize("name", READERS)
@given(given_bytes=any_bytes())
@settings(FUZZED, max_examples=examples(50))
def test_bytes_of_any_kind_are_read_or_refused(
    name: str, given_bytes: bytes, tmp_path: Path
) -> None:
    judge(READERS[name], given_bytes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_changed_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    reader, random = READERS[name], Random(name)
    for _ in range(10_000):
        judge(reader, apply_edits(random.choice(reader.valid), draw_edits(random)), tmp_path)

"""A file is written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from penstock.atomic_files import replacing, write_atomically


def test_text_replaces_the_old_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    for text in ("first\n", "second, über\r\n"):
        write_atomically(file, text)
        assert file.read_bytes() == text.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def write_half(file: Path) -> None:
    with replacing(file) as partial:
        partial.write_text("ne")
        write_atomically(file.with_name("other"), "\udc00")


def test_failure_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_half(file)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"plan.json": "old"}


def test_partial_file_keeps_the_suffix_that_says_the_format(tmp_path: Path) -> None:
    with replacing(tmp_path / "step.json.gz") as partial:
        assert (partial.parent, partial.suffixes[-2:]) == (tmp_path, [".json", ".gz"])
        partial.write_text("")


def test_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(file, "text")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{file}'"


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "plan.json", tmp_path / "latest.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)


def test_pipe_is_written_to_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)

"""What the source distribution and the wheel contain."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
# What belongs to the repository only.
REPOSITORY_ONLY = {".ci", ".gitignore"}


def tracked_files() -> set[str]:
    command = ["git", "ls-files"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip("the list of files comes from git")
    return set(found.stdout.splitlines())


def build(tmp_path: Path, hook: str) -> Path:
    """Build from a copy, so that nothing is left in the working tree."""
    source = tmp_path / "source"
    for name in tracked_files():
        if (ROOT / name).exists():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-c", BUILD, hook, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return tmp_path / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_source_distribution_has_every_tracked_file(tmp_path: Path) -> None:
    with tarfile.open(build(tmp_path, "build_sdist")) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    wanted = {name for name in tracked_files() if name.split("/")[0] not in REPOSITORY_ONLY}
    assert wanted - names == set()


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path, "build_wheel")) as archive:
        names = set(archive.namelist())
    wanted = {name[len("src/") :] for name in tracked_files() if name.startswith("src/penstock/")}
    assert wanted - names == set()

"""Every version of the site is listed, and the start page leads to the newest."""

import json
import os
import subprocess
import sys
from pathlib import Path

from docs_build.versions import list_versions


def test_versions_are_listed_newest_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.2.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text("")
    (tmp_path / "unfinished").mkdir()
    assert list_versions(tmp_path) == ["0.10.0", "0.9.0", "0.2.1"]
    entries = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in entries] == ["0.10.0", "0.9.0", "0.2.1"]
    assert 'url=0.10.0/index.html"' in (tmp_path / "index.html").read_text()


def test_a_site_without_versions_has_an_empty_list(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "docs_build.versions", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=dict(os.environ))
    assert json.loads((tmp_path / "versions.json").read_text()) == []
    assert not (tmp_path / "index.html").exists()

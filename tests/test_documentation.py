"""Examples that are run: docstrings, and the code blocks of README and docs."""

import doctest
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import main
from tests.test_architecture import LAYERS, TORCH_LINE

ROOT = Path(__file__).parents[1]
# The heading of a column whose cells are code that runs, row by row.
RUN_COLUMN = "| Penstock, run by the tests |"
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
MODULES = sorted(found.name for found in pkgutil.walk_packages(penstock.__path__, "penstock."))
# The packages below the torch line.
NEEDS_TORCH = tuple(
    f"penstock.{unit}"
    for units in LAYERS[TORCH_LINE:]
    for unit in units
    if unit not in ("cli", "__init__", "__main__")
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the code of a page; the last cell in a row of a side-by-side table is a block too."""
    fence = r"^```(\w*)\n((?:.*\n)*?)```$"
    row = r"^\| [^|\n]+ \| [^|\n]+ \| `([^`\n]+)` \|$"
    text = page.read_text(encoding="utf-8")
    is_run = RUN_COLUMN in text
    found = re.finditer(f"{fence}|{row}", text, re.MULTILINE)
    return [
        Block("python", match[3]) if match[2] is None else Block(match[1], match[2])
        for match in found
        if match[2] is not None or is_run
    ]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    if name.startswith(NEEDS_TORCH):
        pytest.importorskip("torch")
    # What has no example is left out: doctest looks at every file in memory before each object.
    assert doctest.testmod(importlib.import_module(name), exclude_empty=True).failed == 0


# Runs the blocks of each page that it is given in order, and reports what each block printed.
# Every page gets a fork of its own, because pages register families and write files. The
# imports, which take seconds, are done once, and garbage collections leave them out.
RUN_PAGES = """
import atexit, contextlib, gc, io, json, os, sys, tempfile
import torch, penstock, penstock.training.pipeline
import penstock.dropin.schedules, penstock.elastic, penstock.measuring, penstock.splitting.splitter
import torch.distributed.fsdp, torch.export
gc.collect()
gc.freeze()

def run_blocks(blocks, folder):
    os.chdir(folder)
    printed, names = [], {"__name__": "page"}
    for block in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(block, names)
        printed.append(output.getvalue())
    return printed

for line in sys.stdin:
    page = json.loads(line)
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            try:
                json.dump(run_blocks(page["blocks"], page["folder"]), answer)
                answer.flush()
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            gc.collect()
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        for file in (answer, errors):
            file.seek(0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps([code, errors.read(), answer.read()]), flush=True)
"""


@pytest.fixture(scope="module")
def page_runner() -> Iterator[subprocess.Popen[str]]:
    pytest.importorskip("torch")
    # Pages measure, and the machine of the tests may be busy.
    busy = "ignore:the measured seconds cannot be trusted"
    command = [sys.executable, "-W", "error", "-W", busy, "-c", RUN_PAGES]
    pipe = subprocess.PIPE
    # A page must write nothing to the error stream; transformers would draw a progress bar there.
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment
    ) as runner:
        yield runner
        assert runner.stdin is not None
        runner.stdin.close()


def run_page(runner: subprocess.Popen[str], blocks: list[Block], folder: Path) -> list[str]:
    """Run the Python on a page in `folder`; return what each block printed."""
    assert runner.stdin is not None
    assert runner.stdout is not None
    code = [block.text for block in blocks if block.language == "python"]
    runner.stdin.write(json.dumps({"blocks": code, "folder": str(folder)}) + "\n")
    runner.stdin.flush()
    returncode, errors, answer = json.loads(runner.stdout.readline())
    assert (returncode, errors) == (0, "")
    printed: list[str] = json.loads(answer)
    return printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_pages_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, page_runner: subprocess.Popen[str]
) -> None:
    blocks = blocks_of(page)
    if all(block.language != "python" for block in blocks):
        return
    write_files(blocks, tmp_path)
    printed = iter(run_page(page_runner, blocks, tmp_path))
    last = ""
    for block in blocks:
        if block.language == "python":
            last = next(printed)
        elif block.language == "text":
            assert last == block.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_run_and_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    write_files(blocks_of(page), tmp_path)
    with chdir(tmp_path):
        for block in blocks_of(page):
            for command, expected in commands_of(block):
                result = runner.invoke(main, shlex.split(command, comments=True)[1:])
                assert result.exit_code == 0, command
                assert expected is None or result.output == expected


def write_files(blocks: list[Block], folder: Path) -> None:
    """Write the files that a page shows: TOML whose first line names the file."""
    for block in blocks:
        if block.language == "toml" and block.text.startswith("# "):
            name = block.text.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(block.text)


def commands_of(block: Block) -> list[tuple[str, str | None]]:
    """Our commands in a block; after a prompt comes what they print."""
    if block.language == "sh":
        lines = block.text.replace("\\\n", " ").splitlines()
        return [(line, None) for line in lines if line.startswith("penstock ")]
    prompt, _, expected = block.text.partition("\n")
    return [(prompt[2:], expected)] if prompt.startswith("$ penstock ") else []


def test_readme_shows_both_halves_of_the_planning_side() -> None:
    blocks = blocks_of(ROOT / "README.md")
    assert sum(len(commands_of(block)) for block in blocks) >= 3
    assert "python" in {block.language for block in blocks}


# F: tables that put our names beside another library's were written from memory.
@pytest.mark.parametrize(
    "page", ["coming-from-torch.md", "coming-from/megatron.md", "coming-from/deepspeed.md"]
)
def test_our_side_of_a_side_by_side_table_is_run_with_the_page(page: str) -> None:
    path = ROOT / "docs" / page
    _, _, table = path.read_text(encoding="utf-8").partition(RUN_COLUMN)
    _, _, rows = table.partition("\n\n")[0].strip().partition("\n")
    cells = [row.rpartition(" | ")[2].removesuffix(" |").strip("`") for row in rows.splitlines()]
    assert len(cells) >= 10
    code = [block.text for block in blocks_of(path) if block.language == "python"]
    assert [cell for cell in cells if cell not in code] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_numbers_of_the_readme_are_measured() -> None:
    _, _, rest = (ROOT / "README.md").read_text().partition("## Measured")
    table = [line for line in rest.partition("## ")[0].splitlines() if line.startswith("| ")][1:]
    shown = [number for row in table for number in re.findall(r"\d+\.\d+(?= |\Z)", row)]
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    measured = " ".join(file.read_text(encoding="utf-8") for file in results)
    assert len(shown) >= 10
    assert [number for number in shown if f" {number} " not in measured] == []


def test_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", ["design.md", "where.md"])
def test_paths_on_design_pages_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|js))?|[a-z_]+\.py)`", text)
    package = ROOT / "src" / "penstock"
    # The pages name the two ways of splitting by their own folders.
    places = (package, package / "splitting", ROOT)
    missing = [path for path in paths if not any((place / path).exists() for place in places)]
    assert len(paths) > 20
    assert missing == []


def test_design_names_every_folder_of_the_package() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "penstock"
    folders = {path.parent.name for path in package.rglob("__init__.py")} - {"penstock", "startup"}
    unnamed = sorted(name for name in folders if f"{name}/" not in design)
    assert unnamed == []

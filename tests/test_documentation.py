"""Examples that are run: docstrings, and the code blocks of README and docs."""

import doctest
import importlib
import json
import pkgutil
import re
import shlex
import sys
from contextlib import chdir
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

import penstock
from penstock.cli import main
from tests.forked import run_forked
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


def has_example(name: str) -> bool:
    """Return whether the file of a module has the prompt of an example."""
    base = Path(penstock.__path__[0], *name.split(".")[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ">>> " in file.read_text(encoding="utf-8")


def load_module(name: str) -> ModuleType:
    if name.startswith(NEEDS_TORCH):
        pytest.importorskip("torch")
    return importlib.import_module(name)


def run_examples(module: ModuleType) -> tuple[int, int]:
    """Return how many examples of a module were run, and how many failed."""
    # What has no example is left out: doctest looks at every file in memory before each object.
    found = doctest.testmod(module, exclude_empty=True)
    attempted, failed = found.attempted, found.failed
    # Doctest does not look into cached properties before Python 3.12.
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    for owner in [value for value in classes if value.__module__ == module.__name__]:
        for name, value in vars(owner).items():
            if isinstance(value, cached_property) and sys.version_info < (3, 12):
                for test in doctest.DocTestFinder(exclude_empty=True).find(
                    value.func, f"{owner.__name__}.{name}", module, vars(module)
                ):
                    result = doctest.DocTestRunner().run(test)
                    attempted, failed = attempted + result.attempted, failed + result.failed
    return attempted, failed


# The example of a cached property was never run, and nobody noticed: some modules that have
# examples were tested with none.
@pytest.mark.parametrize("name", [name for name in MODULES if has_example(name)])
def test_examples_in_docstrings_run(name: str) -> None:
    attempted, failed = run_examples(load_module(name))
    assert attempted > 0
    assert failed == 0


def test_every_module_can_be_imported_by_its_name() -> None:
    assert [load_module(name).__name__ for name in MODULES] == MODULES


# Runs the blocks of a page in order, and writes what each block printed. Every page gets a
# process of its own, because pages register families and write files. Pages measure, and the
# machine of the tests may be busy.
RUN_PAGE = """
import atexit, contextlib, gc, io, json, sys, warnings

warnings.filterwarnings("ignore", "the measured seconds cannot be trusted")
with open(sys.argv[1]) as file:
    blocks = json.load(file)
printed, names = [], {"__name__": "page"}
for block in blocks:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(block, names)
    printed.append(output.getvalue())
gc.collect()
atexit._run_exitfuncs()
with open(sys.argv[2], "w") as file:
    json.dump(printed, file)
"""


def run_page(blocks: list[Block], folder: Path, scratch: Path) -> list[str]:
    """Run the Python on a page in `folder`; return what each block printed."""
    code, answer = scratch / "code.json", scratch / "answer.json"
    code.write_text(json.dumps([block.text for block in blocks if block.language == "python"]))
    # A page must write nothing to the error stream; transformers would draw a progress bar there.
    ended = run_forked(
        RUN_PAGE,
        str(code),
        str(answer),
        cwd=folder,
        warning="error",
        environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    printed: list[str] = json.loads(answer.read_text())
    return printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_pages_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("torch")
    blocks = blocks_of(page)
    if all(block.language != "python" for block in blocks):
        return
    write_files(blocks, tmp_path)
    printed = iter(run_page(blocks, tmp_path, tmp_path_factory.mktemp("page")))
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
    paths = [path for path in package.rglob("*") if path.is_dir()]
    folders = {path.name for path in paths} - {"__pycache__"}
    unnamed = sorted(name for name in folders if f"{name}/" not in design)
    assert unnamed == []

"""The notebook of `examples/`: its cells run in order, and show what they should, in few words."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

FILE = Path(__file__).parents[2] / "examples" / "first_look.ipynb"
LONGEST_REPR = 250


def read_cells() -> list[dict[str, Any]]:
    notebook = json.loads(FILE.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells: list[dict[str, Any]] = notebook["cells"]
    return cells


def run_cell(source: str, names: dict[str, object]) -> object:
    """Run a cell; return the value of its last line, which a notebook would show."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_every_cell_runs_and_shows_a_picture_or_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    names: dict[str, object] = {}
    code = ["".join(cell["source"]) for cell in read_cells() if cell["cell_type"] == "code"]
    shown = [run_cell(source, names) for source in code]
    values = [value for value in shown if value is not None]
    expected = [ps.Schedule, ps.Timeline, ps.view.Comparison, ps.Plan, ps.Timeline]
    assert [type(value) for value in values] == expected
    assert [len(repr(value)) for value in values if len(repr(value)) > LONGEST_REPR] == []
    assert capsys.readouterr().out.endswith("largest difference: below 1e-12\n")


def test_notebook_is_kept_without_output() -> None:
    cells = read_cells()
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)

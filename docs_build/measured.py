"""The table of measured numbers in the README, whose numbers are cells of the result files.

    python -m docs_build.measured    # write it again after a benchmark has run

A row names a file, a section and cells, so that it shows what was measured last, whoever is ahead.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs_build.results import Result, read_results
from penstock.atomic_files import write_atomically
from penstock.errors import ParseError

__all__ = ["README", "filled", "measured_table"]

README = Path(__file__).parents[1] / "README.md"
_TABLE = re.compile(r"(<!-- measured -->\n).*?(\n<!-- end -->)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class _Cell:
    """The cell of a column in the last row that begins so; `cut` is also `cut, 30.9`."""

    row: tuple[str, ...]
    column: str


@dataclass(frozen=True, slots=True)
class _Row:
    """What was measured, in which section of which file, and the cells of both sides."""

    what: str
    file: str
    section: str
    ours: _Cell
    other: _Cell
    unit: str = ""
    beside: str = "torch"


def _side_by_side(
    what: str, file: str, section: str, row: tuple[str, ...], columns: tuple[str, str], unit: str
) -> _Row:
    """Return a row whose two numbers are in one row of the file."""
    ours, other = columns
    return _Row(what, file, section, _Cell(row, ours), _Cell(row, other), unit)


_STEPS = "steps-on-two-gloo-ranks-8-blocks-of-width-256-8-microbatches-of-2-x-128-tokens"
_SECONDS = ("Penstock s", "torch s")
_H200, _NCCL = "four ranks on one H200", "torch, NCCL"
_LLAMA = "one by one, ms (quartiles)"
_SPLIT = "d=4096 L=4 t=4096"

_ROWS = (
    _side_by_side(
        "build, lower and check ZBV, 64 ranks x 512 microbatches, with numba",
        "planning",
        "build-lower-and-check-zbv",
        ("64", "512"),
        _SECONDS,
        "s",
    ),
    _side_by_side(
        "CPU time per action beyond a plain loop with the same cuts, Interleaved1F1B",
        "runtime",
        "overhead-per-action-one-rank-linear8-stages",
        ("Interleaved1F1B", "512", "cut"),
        ("Penstock, auto", "torch"),
        "us",
    ),
    *(
        _side_by_side(f"step of {name}, two CPU ranks", "runtime", _STEPS, (name,), _SECONDS, "s")
        for name in ("ZBV", "LoopedBFS")
    ),
    _Row(
        "split backward of a stage, as a multiple of an unsplit one, H200",
        "split_backward",
        "phases-and-loops",
        _Cell((_SPLIT, "ours"), "over plain"),
        _Cell((_SPLIT, "torch"), "over plain"),
    ),
    *(
        _side_by_side(
            f"step of {name}, {_H200}, NCCL on both sides",
            "gpu_ranks",
            "steps-one-by-one-ms",
            (name,),
            ("Penstock, NCCL", _NCCL),
            "ms",
        )
        for name in ("ZBV", "1F1B")
    ),
    _side_by_side(
        f"step of ZBV, {_H200}, peer memory beside NCCL",
        "gpu_ranks",
        "steps-one-by-one-ms",
        ("ZBV",),
        ("Penstock, peer memory", _NCCL),
        "ms",
    ),
    _Row(
        f"step of a 1.1B Llama, {_H200}: our plan, torch's fastest family, both NCCL",
        "llama_ranks",
        "",
        _Cell(("planned, v", "penstock, nccl"), _LLAMA),
        _Cell(("GPipe", "torch, nccl"), _LLAMA),
        "ms",
    ),
    *(
        _Row(
            f"idle share as papers count it: plan for a {model} model, {ranks} ranks, memory for "
            f"{2 * ranks} microbatches",
            "solving",
            "one-stage-per-rank-room-for-2p-activations",
            _Cell((model,), "solved"),
            _Cell((model,), "published"),
            beside="published",
        )
        for model, ranks in (("1.5B", 8), ("14.6B", 16))
    ),
)


def measured_table(results: Mapping[str, Result]) -> str:
    """Return the table as Markdown; the ratio is of the two numbers as they are shown."""
    lines = ["| | Penstock | beside it | ratio | file |", "|---|---|---|---|---|"]
    for row in _ROWS:
        result = results[row.file]
        text = result.sections[row.section] if row.section else result.text
        ours, other = (_read(row, text, cell) for cell in (row.ours, row.other))
        ratio = f"{float(ours) / float(other):.2f}" if float(other) else ""
        link = f"[`{row.file}`](benchmarks/results/{row.file}.md)"
        shown = (f"{ours} {row.unit}".strip(), f"{row.beside} {other} {row.unit}".strip())
        lines.append(f"| {row.what} | {' | '.join(shown)} | {ratio} | {link} |")
    return "\n".join(lines)


def filled(page: str, table: str) -> str:
    """Return the page with this table between its two comments."""
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", page)


def _read(row: _Row, text: str, cell: _Cell) -> str:
    """Return the number at the beginning of a cell, as it is written."""
    found = [line[cell.column] for line in _lines(text) if _is_row(line, cell)]
    number = _NUMBER.match(found[-1]) if found else None
    if number is None:
        raise ParseError(
            f"benchmarks/results/{row.file}.md must have a number for {cell.row} in the column "
            f"{cell.column!r} of {row.section!r} (got {found}); name a row that it has in "
            "docs_build/measured.py"
        )
    return number[0]


def _is_row(line: Mapping[str, str], cell: _Cell) -> bool:
    values = list(line.values())[: len(cell.row)]
    return cell.column in line and all(
        re.fullmatch(rf"{re.escape(wanted)}(, [\d.]+)?", value)
        for value, wanted in zip(values, cell.row, strict=False)
    )


def _lines(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all tables of a text, as cells by column."""
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif set(line) - set("|- :"):
            yield dict(zip(headings, cells, strict=True))


def main() -> None:
    """Write the table into the README."""
    page = README.read_text(encoding="utf-8")
    write_atomically(README, filled(page, measured_table(read_results())))


if __name__ == "__main__":
    main()

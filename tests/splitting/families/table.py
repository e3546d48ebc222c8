"""Writes the page about the families that were measured, from lines of JSON."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.splitting.families.building import families
from tests.splitting.families.libraries import LIBRARIES
from tests.splitting.families.measuring import COLUMNS, EXACT, LATE, REFUSED

__all__ = ["NOT_MEASURED", "merge", "read_page", "row_of", "write_table"]

_HEADER = """\
# Model families, measured

The {total} model types of the installed `transformers` release that have a class for a task or a
base model, in a random order that is always the same; {tried} of them were tried. Beside them,
models of diffusers, timm and torchvision. Each is a small model with random weights in
float64, split by the lists of layers that `ps.split` finds. It trains one step of 4 microbatches
in one process, in 4 stages under 1F1B and under ZBV: with an example of its inputs, and without.
Traced, it is 2 stages under 1F1B; where the batch as the example is refused, one microbatch is.
"exact" says that every gradient is that of the unsplit model on the same microbatches, to 1e-7 of
its size (1e-5 where a row says float32); anything else is the error that the user gets, and where.
`python -m tests.splitting.families` writes this page, and a slow test measures some of its rows
again.

Settings: sizes as small as `tests/splitting/families/configs.py` makes them, 4 layers (2 and 2
with two towers), no dropout or layer drop, no cache, experts as batched products, parameters that
begin as zeros filled with small numbers, training mode unless a row says otherwise. Inputs are
words with padding, pictures (as patches, where a family takes them so), sounds or series of one
size, or embeddings where a family does not take our words. Families of pictures and words whose
row names no pictures were given words alone.

| | exact | refused at the split | refused in the first step | other errors | wrong |
|---|---|---|---|---|---|
{counts}

Torch's batch norms compute wrong gradients on a CPU for one picture at a time, or for pictures one
pixel high or wide, where their input and the gradient of their output lie in memory in different
orders; a test shows it without any pipeline, by finite differences. Stages lay out some gradients
in another way than the unsplit model does, and then differ from it. Such a row says "with batch
norms in one memory layout": it is exact if those of both get contiguous tensors, and otherwise
one of the two is wrong.

"""
_LEFT_OUT = """\

## Left out

{count} of the {tried} families that were tried have no row, because there is nothing to compare
with, or nothing to cut:

{groups}
"""
_TABLE = f"| family | class | inputs | {' | '.join(COLUMNS)} |\n|---|---|---|---|---|---|\n"
NOT_MEASURED = "not measured"
_SHOWN = 160
# What a reason begins with or contains, and what it is called; the first that fits counts.
_REASONS = (
    (r"ImportError|ModuleNotFoundError|requires the", "A library is missing"),
    (r"no list", "They have no list of 4 layers, or no 4 in all their lists"),
    (r"it has [\d,]+ parameters", "More than 25 million parameters, in parts that our sizes miss"),
    (r"random numbers", "The unsplit model gives another result each time"),
    (r"unsplit|zero|not finite|within", "The unsplit model does not train at these sizes"),
    (
        r"we know no input|positional argument|specify|NoneType",
        "They take inputs that we do not make",
    ),
    (r"", "They cannot have our sizes, or inputs of them"),
)


def merge(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each family; what was measured later counts."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        before = found.get(row["kind"], {})
        found[row["kind"]] = row if "not built" in row or "not built" in before else before | row
    return list(found.values())


def read_page(page: str) -> list[dict[str, Any]]:
    """Return the rows of a page that was written before, to measure only some of them again."""
    table, _, left_out = page.partition("\n## Left out\n")
    rows = [
        _read_row(line) for line in table.splitlines() if line.count(" | ") == 5 and "`" in line
    ]
    for title, kinds in re.findall(r"^- (.*) \(\d+\): (.*)\.$", left_out, re.MULTILINE):
        rows += [{"kind": kind, "not built": title} for kind in kinds.split(", ")]
    return rows


def _read_row(line: str) -> dict[str, Any]:
    kind, name, inputs, *cells = line.strip("| ").split(" | ")
    names, _, notes = inputs.rstrip(")").partition(" (")
    shown = zip(COLUMNS, cells, strict=True)
    return {
        "kind": kind,
        "class": name.strip("`"),
        "inputs": names.split(", "),
        "type": "float32" if "float32" in notes else "float64",
        "mode": "evaluation" if "evaluation" in notes else "training",
        **{column: cell for column, cell in shown if cell != NOT_MEASURED},
    }


def write_table(given: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    rows = merge(given)
    names = families()
    own = sorted((r for r in rows if r["kind"] in names), key=lambda row: str(row["kind"]))
    measured = [row for row in own if any(column in row for column in COLUMNS)]
    order = [kind for kinds in LIBRARIES.values() for kind in kinds]
    others = [row for kind in order for row in rows if row["kind"] == kind]
    counts = [
        _count(f"{library}, {column}", [row[column] for row in chosen if column in row])
        for library, chosen in (("transformers", measured), ("the other libraries", others))
        for column in COLUMNS
    ]
    left_out = [row for row in own if row not in measured]
    head = _HEADER.format(total=len(names), tried=len(own), counts="\n".join(filter(None, counts)))
    parts = [
        head + "## transformers\n\n" + _TABLE + "\n".join(map(row_of, measured)) + "\n",
        "\n## diffusers, timm and torchvision\n\n",
        "torchvision comes for CUDA: its own operators do not load beside a torch for CPUs, and "
        "no model here calls them.\n\n" + _TABLE + "\n".join(map(row_of, others)) + "\n",
        _LEFT_OUT.format(count=len(left_out), tried=len(own), groups=_group(left_out)),
    ]
    return "".join(parts)


def _count(name: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    exact, at_split, late = (
        sum(text.startswith(start) for text in found) for start in (EXACT, REFUSED, LATE)
    )
    wrong = sum(text.startswith("WRONG") for text in found)
    others = len(found) - exact - at_split - late - wrong
    share = f"{exact} of {len(found)} ({exact / len(found):.1%})"
    return f"| {name} | {share} | {at_split} | {late} | {others} | {wrong} |"


def _group(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        groups[_title("no list" if "no list" in row else row["not built"])].append(row["kind"])
    titles = [title for _, title in _REASONS if title in groups]
    return "\n".join(
        f"- {title} ({len(groups[title])}): {', '.join(groups[title])}." for title in titles
    )


def _title(reason: str) -> str:
    """Return what a reason is called; one that was read from a page has its name already."""
    if any(reason == title for _, title in _REASONS):
        return reason
    return next(title for pattern, title in _REASONS if re.search(pattern, reason))


def row_of(row: Mapping[str, Any]) -> str:
    """Return one line of the table."""
    notes = [row["type"]] * (row["type"] != "float64") + ["evaluation mode"] * (
        row["mode"] != "training"
    )
    inputs = ", ".join(row["inputs"]) + (f" ({', '.join(notes)})" if notes else "")
    cells = [_shorten(row.get(name, NOT_MEASURED)) for name in COLUMNS]
    return f"| {row['kind']} | `{row['class']}` | {inputs} | {' | '.join(cells)} |"


def _shorten(text: str) -> str:
    """Return where a step failed and what is wrong, without what to do."""
    where, _, what = text.partition(": ")
    if not what:
        return text
    what = what.rpartition("Error: ")[2].replace("|", "/")
    for end in (";", "\n", " (", "`"):
        what = what.partition(end)[0]
    return f"{where}: {what[:_SHOWN]}".rstrip()

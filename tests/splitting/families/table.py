"""Writes the page about the families that were measured, from one line of JSON for each."""

from collections.abc import Sequence
from typing import Any

from tests.splitting.families.building import families
from tests.splitting.families.measuring import COLUMNS, EXACT

__all__ = ["HEADER", "row_of", "write_table"]

HEADER = """\
# Model families, measured

Every {step} family of the installed `transformers` release, in the order of its list, beginning
with number {first}, and of these the first {rows} of {total}: a small model with random weights
in float64, split by the lists of layers that `ps.split` finds. It trains one step of 4
microbatches in one process, in 4 stages under 1F1B and under ZBV: with an example of its inputs,
and without. Traced, it is 2 stages under 1F1B. "exact" says that every gradient is that of the
unsplit model on the same microbatches, to 1e-8 of its size; anything else is the error that the
user gets. `python -m tests.splitting.families` writes this page.

Settings: sizes as small as `tests/splitting/families/configs.py` makes them, 4 layers (2 and 2
with two towers), no dropout or layer drop, no cache, experts as batched products, training mode
unless a row says otherwise. Inputs are words with padding, pictures or sounds of one size, or
embeddings where a family does not take our words. Families of pictures and words without a row
for pictures were given words alone.

{counts}

| family | class | inputs | {columns} |
|---|---|---|---|---|---|
"""
_SHOWN = 160


def write_table(rows: Sequence[dict[str, Any]], part: str) -> str:
    """Return the page; `part` is what was measured, such as 0/5 for every fifth family."""
    first, _, step = part.partition("/")
    measured = [row for row in rows if COLUMNS[0] in row]
    left_out = [row for row in rows if COLUMNS[0] not in row]
    lines = [
        f"- {name}: {sum(row[name] == EXACT for row in measured)} of {len(measured)} exact."
        for name in COLUMNS
    ]
    lines.append(
        f"- Left out, because our small sizes or inputs do not fit them, a library is missing, or "
        f"they have no list of 4 layers: {len(left_out)} ("
        f"{', '.join(row['kind'] for row in left_out)})."
    )
    head = HEADER.format(
        first=first,
        step=f"{step}th",
        rows=len(rows),
        total=len(families()[int(first) :: int(step)]),
        counts="\n".join(lines),
        columns=" | ".join(COLUMNS),
    )
    return head + "\n".join(map(row_of, measured)) + "\n"


def row_of(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    inputs = ", ".join(row["inputs"]) + (" (evaluation mode)" if row["mode"] != "training" else "")
    cells = [_shorten(row[name]) for name in COLUMNS]
    return f"| {row['kind']} | `{row['class']}` | {inputs} | {' | '.join(cells)} |"


def _shorten(text: str) -> str:
    """Return what is wrong, without where in the step it was and what to do."""
    text = text.removeprefix("refused: ").rpartition("Error: ")[2].replace("|", "/")
    for end in (";", "\n", " (", "`"):
        text = text.partition(end)[0]
    return text[:_SHOWN]

"""The gallery page: every family with its picture, formulae, numbers and origin."""

from collections.abc import Sequence

import penstock as ps
from docs_build.families import ENTRIES, Entry
from docs_build.pictures import Sizes, one_scale, picture, price
from penstock.schedules.formulae import FORMULAE, Formula
from penstock.schedules.registry import FAMILIES, Family
from penstock.units import format_number, format_share

__all__ = ["gallery_page"]

_SHOWN = Sizes(ranks=4, microbatches=8)
_COMPARED = (
    Sizes(ranks=8, microbatches=32),
    Sizes(ranks=8, microbatches=32, transfer=0.1),
    Sizes(ranks=16, microbatches=64),
)

_OPENING = """\
# Schedules: the gallery

Every family that `penstock list` knows, drawn and priced by the simulator when this page was
built. All pictures have one scale: {ranks} ranks down, time across, {microbatches} microbatches.
A rank's share of the model takes one second each for forward (F), backward for inputs (I) and
backward for weights (W); B is I and W at once. If a rank has several stages, the later ones are
lighter. [How to read them](how-it-works.md).

In the formulae p is ranks, m microbatches, v stages per rank; F&B is a forward and a backward
that run side by side. The bubble is counted as in papers, as the idle time of the rank with the
longest span, with enough microbatches to fill the pipe; memory
is in activations of whole microbatches over one rank's share.

Zoom, hover and search in a page of its own: [1F1B, ZB-H1 and ZBV side by
side](live/comparison.html), the output of `penstock compare 1F1B ZB-H1 ZBV --html both.html`.

## Side by side

The share of the bubble in that rank's span, and the most microbatches that a rank holds. A
transfer is the time of a message; a forward of a rank's share takes one second.
"""


def gallery_page() -> str:
    """Return the page as Markdown, including its pictures."""
    timelines = {name: price(name, _SHOWN) for name in FAMILIES}
    seconds = one_scale(list(timelines.values()))
    opening = _OPENING.format(ranks=_SHOWN.ranks, microbatches=_SHOWN.microbatches)
    sections = [_section(family, timelines[family.name], seconds) for family in FAMILIES.values()]
    return "\n".join([opening, _comparison(), *sections])


def _describe(sizes: Sizes) -> str:
    text = f"{sizes.ranks} ranks, {sizes.microbatches} microbatches"
    return f"{text}, transfer {sizes.transfer:g}" if sizes.transfer else text


def _comparison() -> str:
    """Return the bubble of every family at several sizes, and the memory at the first size."""
    headings = ["family", "held", *(_describe(sizes) for sizes in _COMPARED)]
    rows = []
    for name, family in FAMILIES.items():
        timelines = [price(name, sizes) for sizes in _COMPARED]
        memory = format_number(timelines[0].peak_microbatches)
        if timelines[0].schedule.is_forward_only:
            memory = "none"
        bubbles = [format_share(timeline.papers_bubble_rate) for timeline in timelines]
        rows.append([f"[{name}](#{_anchor(family)})", memory, *bubbles])
    return _table(headings, rows)


def _anchor(family: Family) -> str:
    return family.name.lower()


def _section(family: Family, timeline: ps.Timeline, seconds: float) -> str:
    entry, formulae = ENTRIES[family.name], FORMULAE[family.name]
    facts = [
        ["bubble", _formula(formulae.bubble)],
        ["memory", _formula(formulae.memory)],
        ["stages per rank", _stages_per_rank(family)],
        ["from", _papers(entry)],
        ["other names", ", ".join(f"`{name}`" for name in family.aliases) or "none"],
    ]
    return "\n".join(
        [
            f"\n## {family.name} {{ #{_anchor(family)} }}\n",
            f"{family.summary}\n",
            picture(timeline, seconds=seconds),
            f"\n{entry.use}\n",
            _table(["", ""], facts),
        ]
    )


def _formula(formula: Formula) -> str:
    return f"`{formula.text}`" if formula.is_exact else formula.text


def _papers(entry: Entry) -> str:
    return "<br>".join(f"[{paper.title}]({paper.link})" for paper in entry.papers) or "none"


def _stages_per_rank(family: Family) -> str:
    if family.copies > 1:
        return f"{family.stages_per_rank}, one of each copy of the model"
    return str(family.stages_per_rank)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"

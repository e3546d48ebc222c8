"""The playground as one HTML file: orders from the generators, priced and checked in the page."""

from html import escape
from string import Template

from penstock.ir.actions import COMPUTE_KINDS
from penstock.ir.wording import WORDING
from penstock.view.html.document import embed, join_scripts, policy, read_part
from penstock.view.palette import IDLE, LOOKS, MEMORY, shade, text_colour
from penstock.view.playground.catalogue import (
    MICROBATCHES,
    RANKS,
    STAGES_PER_RANK,
    catalogue,
)
from penstock.view.playground.chapters import chapters

__all__ = ["playground"]

_SCRIPTS = (
    "html/columns",
    "html/units",
    *(
        f"playground/model/{name}"
        for name in (
            "schedule",
            "catalogue",
            "csv",
            "clock",
            "timeline",
            "checks",
            "edits",
            "moments",
        )
    ),
    *(
        f"playground/screen/{name}"
        for name in (
            "elements",
            "surfaces",
            "drawing",
            "settings",
            "controls",
            "cards",
            "player",
            "picture",
            "dragging",
            "chapters",
            "exporting",
            "texts",
            "app",
            "hook",
            "main",
        )
    ),
)


def playground(*, home: str | None = None) -> str:
    """Return the playground as one HTML file, which works from disk and asks no network.

    `home` is the address of the documentation, to which the page then links.

    >>> playground()[:15]
    '<!doctype html>'
    """
    style, script = _style(), join_scripts(_SCRIPTS)
    link = f'<a href="{escape(home)}">Documentation</a>' if home else ""
    return Template(read_part("playground/playground.html")).substitute(
        policy=policy(style, script),
        style=style,
        home=link,
        data=embed(_data()),
        script=script,
    )


def _style() -> str:
    shared = Template(read_part("html/style.css")).substitute(idle=IDLE, memory=MEMORY)
    return shared + read_part("playground/style.css")


def _data() -> dict[str, object]:
    return {
        "sizes": {
            "ranks": RANKS,
            "microbatches": MICROBATCHES,
            "stages_per_rank": STAGES_PER_RANK,
        },
        "labels": [LOOKS[kind].label for kind in COMPUTE_KINDS],
        # By stages on a rank, kind, and index of the stage on its rank: colour and ink.
        "shades": [
            [
                [
                    (fill, text_colour(fill))
                    for fill in (shade(kind, at, count) for at in range(count))
                ]
                for kind in COMPUTE_KINDS
            ]
            for count in STAGES_PER_RANK
        ],
        "wording": WORDING,
        "chapters": chapters(),
        "families": catalogue(),
    }

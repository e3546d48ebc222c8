"""Measured results on pages, from the files in benchmarks/results.

A page shows a file with a line that is nothing but a link to it. The link works where pages are
read unbuilt; in the site the content of the file takes its place:

    [Planning, in tables](../benchmarks/results/planning.md)
    [One table of it](../benchmarks/results/planning.md#simulation-zbv-with-sends-and-receives)

The performance page also shows every file that no page links to, so that a new one needs no edit:

    <!-- results: all other files -->
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ParseError

__all__ = ["FACTS", "Result", "linked_results", "read_results", "show_others", "show_results"]

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
# What every file says of its numbers.
FACTS = ("measured", "command", "machine", "versions", "spread")

_OTHERS = "<!-- results: all other files -->"
_FACT = re.compile(r"- (\w+): (.+)")
_LINK = re.compile(r"^\[[^\]]+\]\((?:\.\./)+benchmarks/results/(\w+)\.md(?:#([\w-]+))?\)$", re.M)


@dataclass(frozen=True, slots=True)
class Result:
    """A result file: its title, how it was measured, and its text with its sections by anchor."""

    title: str
    facts: Mapping[str, str]
    text: str
    sections: Mapping[str, str]

    @property
    def source(self) -> str:
        """The facts as one paragraph."""
        return (
            f"*Measured {self.facts['measured']} by* {self.facts['command']} *on* "
            f"{self.facts['machine']}; {self.facts['versions']}. *Spread:* {self.facts['spread']}."
        )


def read_result(name: str, content: str) -> Result:
    """Read a result file; without a title and all facts it is refused."""
    head, _, rest = content.partition("\n\n")
    given, _, text = rest.partition("\n\n")
    lines = [_FACT.fullmatch(line) for line in given.splitlines()]
    facts = {line[1]: line[2] for line in lines if line is not None}
    if not head.startswith("# ") or None in lines or tuple(facts) != FACTS:
        raise ParseError(
            f"benchmarks/results/{name}.md must begin with a title and lines for "
            f"{', '.join(FACTS)} (got {content[:60]!r}); write it with write_result of "
            "benchmarks/result_files.py"
        )
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    sections = {
        _anchor(heading): f"## {heading}\n{body}".strip()
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    return Result(head.removeprefix("# "), facts, text.strip(), sections)


def read_results(folder: Path = FOLDER) -> dict[str, Result]:
    """Return all result files by name."""
    files = sorted(folder.glob("*.md"))
    return {file.stem: read_result(file.stem, file.read_text(encoding="utf-8")) for file in files}


def linked_results(markdown: str) -> set[str]:
    """Return the names of the files that a page shows."""
    return {link[1] for link in _LINK.finditer(markdown)}


def show_results(markdown: str, results: Mapping[str, Result]) -> str:
    """Replace every line that is a link to a result file by its content, one level deeper.

    How it was measured is said where a file appears first.
    """
    seen: set[str] = set()

    def shown(link: re.Match[str]) -> str:
        name, anchor = link.groups()
        result = results[name]
        text = result.text if anchor is None else result.sections[anchor]
        parts = [_deeper(text)] if name in seen else [result.source, _deeper(text)]
        seen.add(name)
        return "\n\n".join(parts)

    return _LINK.sub(shown, markdown)


def show_others(markdown: str, pages: Iterable[str], results: Mapping[str, Result]) -> str:
    """Replace the comment that asks for the files which no page shows."""
    linked = {name for page in pages for name in linked_results(page)}
    parts = (
        f"## {result.title}\n\n{result.source}\n\n{_deeper(result.text)}"
        for name, result in results.items()
        if name not in linked
    )
    return markdown.replace(_OTHERS, "\n\n".join(parts))


def _deeper(text: str) -> str:
    return re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE)


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as code hosts form it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")

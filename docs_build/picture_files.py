"""Pictures of pages as files, for viewers that show the Markdown itself: a code host, an editor.

    python -m docs_build.picture_files    # draw them again after a page or the simulator changed

Every comment that requests a picture is followed by a link to its file, which this writes too.
The files suit light and dark pages. For the same viewers the playground is a file too.
"""

import re
from os.path import relpath
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from docs_build.memory_curves import memory_drawing
from docs_build.pictures import REQUEST, Request, caption_of, joined, read_request
from penstock.atomic_files import write_atomically
from penstock.view.playground.page import playground
from penstock.view.svg import timeline_drawing

__all__ = ["expected_files", "with_links"]

_ROOT = Path(__file__).parents[1]
_FOLDER = Path("docs/pictures")
_WIDTH, _CAPTION, _GAP = 902.0, 18.0, 10.0
_STYLE = (
    "svg{font:11px sans-serif;color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
)


def expected_files() -> dict[Path, str]:
    """Return every page with pictures and every picture, by path, as they should be."""
    files = {Path("playground.html"): playground()}
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        requests = [found[1] for found in REQUEST.finditer(text)]
        if requests:
            files[page.relative_to(_ROOT)] = with_links(text, page.relative_to(_ROOT))
        for request in requests:
            files[_path_of(request)] = _drawn(read_request(request))
    return files


def with_links(text: str, page: Path) -> str:
    """Return a page on which every request is followed by a link to its picture."""
    folder = relpath(_FOLDER, page.parent)

    def linked(found: re.Match[str]) -> str:
        captions = "; ".join(caption_of(each) for each in read_request(found[1]).timelines)
        return f"<!-- picture: {found[1]} -->\n![{captions}]({folder}/{_path_of(found[1]).name})"

    return REQUEST.sub(linked, text)


def _path_of(request: str) -> Path:
    """Return the file of a request.

    >>> _path_of("1F1B ZBV, ranks=4, microbatches=8").name
    '1F1B-ZBV-ranks-4-microbatches-8.svg'
    """
    return _FOLDER / (re.sub(r"[^A-Za-z0-9.]+", "-", request) + ".svg")


def _drawn(request: Request) -> str:
    """Return the pictures of a request one below the other, each under its caption."""
    whole = Element("svg", xmlns="http://www.w3.org/2000/svg")
    SubElement(whole, "style").text = _STYLE
    down = 0.0
    for timeline in request.timelines:
        line = {"x": "60", "y": f"{down + 12:g}", "fill": "currentColor", "font-weight": "bold"}
        SubElement(whole, "text", line).text = caption_of(timeline)
        down += _CAPTION
        parts = [joined(timeline_drawing(timeline, seconds=request.seconds))]
        if request.with_memory:
            parts.append(memory_drawing(timeline, seconds=request.seconds))
        for part in parts:
            height = float(part.attrib["viewBox"].split()[3])
            place = {"y": f"{down:g}", "width": f"{_WIDTH:g}", "height": f"{height:g}"}
            part.attrib = {"viewBox": part.attrib["viewBox"], **place}
            whole.append(part)
            down += height
        down += _GAP
    whole.set("viewBox", f"0 0 {_WIDTH:g} {down - _GAP:g}")
    return tostring(whole, encoding="unicode") + "\n"


def main() -> None:
    """Write every page and picture that is not as it should be, and remove pictures of none."""
    files = expected_files()
    for path, text in files.items():
        write_atomically(_ROOT / path, text)
    for file in (_ROOT / _FOLDER).glob("*.svg"):
        if file.relative_to(_ROOT) not in files:
            file.unlink()


if __name__ == "__main__":
    main()

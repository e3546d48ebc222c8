"""Pictures of schedules, drawn by the simulator.

A page requests one with a comment, which other viewers of the page hide:

    <!-- picture: GPipe, ranks=4, microbatches=8 -->
    <!-- picture: 1F1B ZBV, ranks=4, microbatches=8, transfer=0.25 -->
    <!-- picture: 1F1B, microbatches=8, seconds=40, memory=yes -->

Several names share one time scale, and `seconds` sets the time of the full width, so that all
pictures of a page can share one. `memory` adds what every rank holds. When the site is built, the
picture replaces the comment and the link to an image below it, which is for viewers that show
the Markdown itself (`docs_build/picture_files.py`).
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

import penstock as ps
from docs_build.memory_curves import memory_drawing
from penstock.errors import ArgumentError
from penstock.sim.comparison import compare
from penstock.units import format_number, format_share
from penstock.view.svg import timeline_drawing

__all__ = [
    "REQUEST",
    "Request",
    "Sizes",
    "caption_of",
    "draw_pictures",
    "joined",
    "numbers_of",
    "one_scale",
    "picture",
    "price",
    "read_request",
]

# A comment that requests a picture, and the link to its file if there is one.
REQUEST = re.compile(r"^<!-- picture: (.+?) -->$(?:\n!\[[^\n]*\]\([^\n]*\)$)?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings of a picture; a transfer is relative to the forward of a rank's share."""

    ranks: int = 4
    microbatches: int = 8
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """The pictures of one comment: timelines on one scale, with or without their memory."""

    timelines: tuple[ps.Timeline, ...]
    seconds: float
    with_memory: bool


def price(name: str, sizes: Sizes) -> ps.Timeline:
    """Price a family at these sizes, with one second each for a rank's F, I and W."""
    schedule = ps.build(name, ranks=sizes.ranks, microbatches=sizes.microbatches)
    (timeline,) = compare([schedule], ps.Costs(transfer=sizes.transfer)).values()
    return timeline


def one_scale(timelines: Sequence[ps.Timeline]) -> float:
    """Return the seconds of the full width, for pictures on the same scale."""
    return max(timeline.end_time for timeline in timelines)


def numbers_of(timeline: ps.Timeline) -> str:
    """Describe end time, bubble and memory of a timeline."""
    bubble = format_share(timeline.bubble_rate)
    text = f"end time {format_number(timeline.end_time)} s, bubble {bubble}"
    if timeline.schedule.is_forward_only:
        return text
    return f"{text}, at most {_count(timeline.peak_microbatches, 'microbatch')} in memory"


def picture(timeline: ps.Timeline, *, seconds: float, with_memory: bool = False) -> str:
    """Return a timeline as a figure element, with its name and numbers below."""
    schedule = timeline.schedule
    figure = Element("figure", {"class": "timeline"})
    figure.append(joined(timeline_drawing(timeline, seconds=seconds)))
    if with_memory:
        figure.append(memory_drawing(timeline, seconds=seconds))
    for drawing in figure:
        # Otherwise the search finds the digits in the bars.
        drawing.set("data-search-exclude", "")
    caption = SubElement(figure, "figcaption")
    SubElement(caption, "strong").text = schedule.name
    caption[0].tail = caption_of(timeline).removeprefix(schedule.name)
    return tostring(figure, encoding="unicode", short_empty_elements=False)


def caption_of(timeline: ps.Timeline) -> str:
    """Return the line below a picture: name, sizes and numbers."""
    schedule = timeline.schedule
    sizes = f"{_count(schedule.num_ranks, 'rank')}, {_count(schedule.microbatches, 'microbatch')}"
    return f"{schedule.name}, {sizes}: {numbers_of(timeline)}"


def _count(number: float, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{format_number(number)} {plural}"


def draw_pictures(markdown: str) -> str:
    """Replace the comments of a page with the pictures they request."""
    return REQUEST.sub(lambda found: _draw(found[1]), markdown)


def _draw(text: str) -> str:
    request = read_request(text)
    return "\n\n".join(
        picture(timeline, seconds=request.seconds, with_memory=request.with_memory)
        for timeline in request.timelines
    )


def read_request(text: str) -> Request:
    """Return what a comment asks for: names, then settings.

    >>> read_request("GPipe, ranks=2, microbatches=3").seconds
    12.0
    """
    names, *settings = (part.strip() for part in text.split(","))
    given = dict(setting.split("=", 1) for setting in settings)
    known = ("ranks", "microbatches", "transfer", "seconds", "memory")
    if unknown := sorted(given.keys() - set(known)):
        raise ArgumentError(
            f"settings of a picture must be among {', '.join(known)} (got {unknown[0]})"
        )
    sizes = _sizes(given)
    timelines = tuple(price(name, sizes) for name in names.split())
    shortest = one_scale(timelines)
    seconds = float(given.get("seconds", shortest))
    if seconds < shortest:
        raise ArgumentError(f"seconds must be at least {shortest:g} for {names} (got {seconds:g})")
    return Request(timelines, seconds, given.get("memory") == "yes")


def _sizes(given: Mapping[str, str]) -> Sizes:
    default = Sizes()
    return Sizes(
        int(given.get("ranks", default.ranks)),
        int(given.get("microbatches", default.microbatches)),
        float(given.get("transfer", default.transfer)),
    )


def joined(drawing: Element) -> Element:
    """Return the picture in a fifth of the bytes: one path per colour, one text per lane."""
    bars: dict[str, list[str]] = defaultdict(list)
    digits: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    light = Element("svg", dict(drawing.attrib))
    for element in drawing:
        is_digit = element.get("text-anchor") == "middle" and len(element.text or "") == 1
        if element.tag == "rect" and element.find("title") is not None:
            bars[element.attrib["fill"]].append(_outline(element))
        elif is_digit:
            lane = element.attrib["y"], element.attrib["fill"]
            digits[lane].append((_short(element.attrib["x"]), element.text or ""))
        else:
            light.append(element)
    for fill, outlines in bars.items():
        SubElement(light, "path", fill=fill, d="".join(outlines))
    for (down, fill), written in digits.items():
        across = " ".join(position for position, _ in written)
        text = SubElement(light, "text", {"x": across, "y": down, "fill": fill})
        text.set("text-anchor", "middle")
        text.text = "".join(digit for _, digit in written)
    return light


def _outline(box: Element) -> str:
    left, top, width, height = (_short(box.attrib[key]) for key in ("x", "y", "width", "height"))
    return f"M{left} {top}h{width}v{height}h-{width}z"


def _short(number: str) -> str:
    return f"{round(float(number), 1):g}"

"""Pictures of schedules for the site, drawn by the simulator when the site is built.

A page requests one with a comment, which other viewers of the page hide:

    <!-- picture: GPipe, ranks=4, microbatches=8 -->
    <!-- picture: 1F1B ZBV, ranks=4, microbatches=8, transfer=0.25 -->

Several names share one time scale.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

import penstock as ps
from penstock.errors import ArgumentError
from penstock.sim.comparison import compare
from penstock.view.svg import timeline_drawing
from penstock.view.units import format_number, format_share

__all__ = ["Sizes", "draw_pictures", "numbers_of", "one_scale", "picture", "price"]

_MARK = re.compile(r"^<!-- picture: (.+?) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings of a picture; a transfer is relative to the forward of a rank's share."""

    ranks: int = 4
    microbatches: int = 8
    transfer: float = 0.0


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


def picture(timeline: ps.Timeline, *, seconds: float) -> str:
    """Return a timeline as a figure element, with its name and numbers below."""
    schedule = timeline.schedule
    figure = Element("figure", {"class": "timeline"})
    figure.append(_joined(timeline_drawing(timeline, seconds=seconds)))
    caption = SubElement(figure, "figcaption")
    SubElement(caption, "strong").text = schedule.name
    sizes = f"{_count(schedule.num_ranks, 'rank')}, {_count(schedule.microbatches, 'microbatch')}"
    caption[0].tail = f", {sizes}: {numbers_of(timeline)}"
    return tostring(figure, encoding="unicode", short_empty_elements=False)


def _count(number: float, noun: str) -> str:
    plural = noun if number == 1 else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{format_number(number)} {plural}"


def draw_pictures(markdown: str) -> str:
    """Replace the comments of a page with the pictures they request."""
    return _MARK.sub(lambda found: _draw(found[1]), markdown)


def _draw(request: str) -> str:
    names, *settings = (part.strip() for part in request.split(","))
    given = dict(setting.split("=", 1) for setting in settings)
    sizes = _sizes(given)
    timelines = [price(name, sizes) for name in names.split()]
    seconds = one_scale(timelines)
    return "\n\n".join(picture(timeline, seconds=seconds) for timeline in timelines)


def _sizes(given: Mapping[str, str]) -> Sizes:
    if unknown := sorted(given.keys() - {"ranks", "microbatches", "transfer"}):
        raise ArgumentError(
            f"settings of a picture must be ranks, microbatches or transfer (got {unknown[0]})"
        )
    default = Sizes()
    return Sizes(
        int(given.get("ranks", default.ranks)),
        int(given.get("microbatches", default.microbatches)),
        float(given.get("transfer", default.transfer)),
    )


def _joined(drawing: Element) -> Element:
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

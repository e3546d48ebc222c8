"""Helpers for tests of pages: costs, screen sizes, and mouse and keyboard."""

from penstock.costs import Costs
from penstock.sim.timeline import Timeline
from tests.browser import Visit

__all__ = ["COSTS", "DESK", "PHONE", "click_on", "find_row", "point_at", "press", "text_of"]

DESK = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 740}
# Sums of these are exact.
COSTS = Costs(forward=1, backward_input=1, backward_weight=1, transfer=0.25)


def find_row(timeline: Timeline, text: str) -> int:
    rows = timeline.schedule.rows
    return next(row for row in range(len(rows)) if str(rows.action(row)) == text)


def point_at(visit: Visit, row: int, at: int = 0) -> None:
    box = visit.ask("box", at, row)
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def click_on(visit: Visit, row: int, at: int = 0) -> None:
    box = visit.ask("box", at, row)
    visit.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def press(visit: Visit, *keys: str) -> None:
    for key in keys:
        visit.page.keyboard.press(key)
    visit.settle()


def text_of(visit: Visit, selector: str) -> str:
    return visit.page.locator(selector).inner_text()

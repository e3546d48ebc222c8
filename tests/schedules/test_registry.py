from collections.abc import Iterator

import pytest

from penstock.errors import ScheduleNameError, SizeError
from penstock.ir.schedule import Schedule
from penstock.schedules.gpipe import gpipe
from penstock.schedules.registry import FAMILIES, find_family, register

NAMES = [
    "ForwardOnly",
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "ZB-H1",
    "ZB-H2",
    "InterleavedZeroBubble",
    "ZBV",
    "V-Half",
    "V-Min",
    "DualPipeV",
    "DualPipe",
]


def halves(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Repeat GPipe under another name."""
    return gpipe(ranks, microbatches, stages_per_rank)


@pytest.fixture
def registered_halves() -> Iterator[None]:
    register("Halves", halves)
    yield
    del FAMILIES["Halves"]


def test_families_are_listed_in_this_order() -> None:
    assert list(FAMILIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_name_is_found_in_any_case(name: str) -> None:
    found = [find_family(spelling) for spelling in (name, name.lower(), name.upper())]
    assert found == [FAMILIES[name]] * 3


@pytest.mark.parametrize(
    ("torch_name", "name"),
    [
        ("_ScheduleForwardOnly", "ForwardOnly"),
        ("ScheduleGPipe", "GPipe"),
        ("Schedule1F1B", "1F1B"),
        ("ScheduleInterleaved1F1B", "Interleaved1F1B"),
        ("ScheduleLoopedBFS", "LoopedBFS"),
        ("ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"),
        ("ScheduleZBVZeroBubble", "ZBV"),
        ("ZBVZeroBubble", "ZBV"),
        ("ScheduleDualPipeV", "DualPipeV"),
    ],
)
def test_names_that_torch_uses_are_known(torch_name: str, name: str) -> None:
    assert find_family(torch_name) == FAMILIES[name]


@pytest.mark.parametrize("name", NAMES)
def test_schedule_bears_the_name_of_its_family(name: str) -> None:
    family = FAMILIES[name]
    assert family.generate(2, 4, family.stages_per_rank).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_a_one_line_summary(name: str) -> None:
    assert FAMILIES[name].summary.endswith(".")


def test_unknown_name_is_answered_with_the_nearest_and_with_all() -> None:
    with pytest.raises(ScheduleNameError) as caught:
        find_family("gpip")
    assert str(caught.value) == (
        "unknown schedule 'gpip'; did you mean GPipe? known are ForwardOnly, GPipe, 1F1B, "
        "Interleaved1F1B, LoopedBFS, ZB-H1, ZB-H2, InterleavedZeroBubble, ZBV, V-Half, V-Min, "
        "DualPipeV, DualPipe"
    )


def test_unknown_name_like_none_is_answered_with_all() -> None:
    with pytest.raises(ScheduleNameError) as caught:
        find_family("waterfall")
    assert str(caught.value) == f"unknown schedule 'waterfall'; known are {', '.join(NAMES)}"


@pytest.mark.usefixtures("registered_halves")
def test_registered_family_is_found_like_any_other() -> None:
    family = find_family("halves")
    assert (family.name, family.stages_per_rank) == ("Halves", 1)
    assert family.summary == "Repeat GPipe under another name."
    assert family.generate(2, 3, 1) == gpipe(2, 3)


@pytest.mark.usefixtures("registered_halves")
def test_unknown_name_is_answered_with_registered_families_too() -> None:
    with pytest.raises(ScheduleNameError) as caught:
        find_family("half")
    assert str(caught.value) == (
        f"unknown schedule 'half'; did you mean V-Half? known are {', '.join(NAMES)}, Halves"
    )


@pytest.mark.parametrize(
    ("taken", "family"),
    [("gpipe", "GPipe"), ("ScheduleDualPipeV", "DualPipeV"), ("vmin", "V-Min")],
)
def test_name_or_alias_that_is_taken_cannot_be_registered(taken: str, family: str) -> None:
    with pytest.raises(ScheduleNameError) as caught:
        register(taken, halves)
    assert str(caught.value) == f"{taken!r} is already the name of {family}; choose another"
    assert list(FAMILIES) == NAMES


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("GPipe", 2, "GPipe has 1 stage per rank (stages_per_rank: 2); "
            "use stages_per_rank=1, or LoopedBFS for more"),
        ("1F1B", 3, "1F1B has 1 stage per rank (stages_per_rank: 3); "
            "use stages_per_rank=1, or Interleaved1F1B for more"),
        ("ZB-H1", 2, "ZB-H1 has 1 stage per rank (stages_per_rank: 2); "
            "use stages_per_rank=1, or InterleavedZeroBubble for more"),
        ("ZB-H2", 2, "ZB-H2 has 1 stage per rank (stages_per_rank: 2); "
            "use stages_per_rank=1, or ZBV for more"),
        ("ZBV", 3, "ZBV has 2 stages per rank (stages_per_rank: 3); "
            "use stages_per_rank=2, or InterleavedZeroBubble for more"),
        ("V-Half", 1, "V-Half has 2 stages per rank (stages_per_rank: 1); "
            "use stages_per_rank=2"),
        ("V-Min", 3, "V-Min has 2 stages per rank (stages_per_rank: 3); "
            "use stages_per_rank=2, or InterleavedZeroBubble for more"),
        ("DualPipeV", 1, "DualPipeV has 2 stages per rank (stages_per_rank: 1); "
            "use stages_per_rank=2"),
        ("DualPipe", 4, "DualPipe has 2 stages per rank (stages_per_rank: 4); "
            "use stages_per_rank=2"),
    ],
)  # fmt: skip
def test_stages_per_rank_that_a_family_does_not_have_are_refused(
    name: str, given: int, message: str
) -> None:
    with pytest.raises(SizeError) as caught:
        FAMILIES[name].generate(4, 8, given)
    assert str(caught.value) == message

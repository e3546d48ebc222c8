import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray

from penstock.assembly import build, lower
from penstock.costs import Costs
from penstock.errors import MissingDependencyError
from penstock.ir.actions import Kind
from penstock.ir.schedule import Schedule
from penstock.sim.engine import simulate
from penstock.sim.timeline import Timeline
from penstock.view.figure import draw, draw_comparison, save, show
from penstock.view.layout import rectangles
from penstock.view.palette import IDLE, LOOKS, shade
from tests.covering import all_but_slow
from tests.view.timelines import EVERY_FAMILY, timeline_of


def boxes(axes: Axes) -> list[PolyCollection]:
    """Return the idle lanes, the bars and the borders of overlapped pairs, in this order."""
    found = [artist for artist in axes.collections if isinstance(artist, PolyCollection)]
    assert len(found) == 3
    return found


def corners(collection: PolyCollection) -> NDArray[np.float64]:
    """Return left, right, top and bottom of every drawn box."""
    vertices = np.array([path.vertices for path in collection.get_paths()])
    low, high = vertices.min(axis=1), vertices.max(axis=1)
    return np.stack([low[:, 0], high[:, 0], low[:, 1], high[:, 1]], axis=-1)


def colours(collection: PolyCollection) -> list[str]:
    return [to_hex(colour) for colour in np.array(collection.get_facecolor())]


def numbers(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("name", [name for name in EVERY_FAMILY if "-4-8-uneven" in name])
def test_drawn_boxes_are_the_rectangles_of_the_timeline(name: str) -> None:
    timeline = EVERY_FAMILY[name]
    _, bars, _ = boxes(draw(timeline).axes[0])
    wanted = rectangles(timeline)
    columns = (wanted.left, wanted.right, wanted.top, wanted.bottom)
    np.testing.assert_allclose(corners(bars), np.stack(columns, axis=-1), atol=1e-12)
    count = wanted.num_local_stages
    pairs = zip(wanted.kind.tolist(), wanted.local_stage.tolist(), strict=True)
    assert colours(bars) == [shade(Kind(kind), at, count) for kind, at in pairs]


def test_idle_time_is_visible_on_every_lane_from_first_start_to_last_end() -> None:
    lanes, _, _ = boxes(draw(timeline_of("1F1B", 2, 4)).axes[0])
    np.testing.assert_allclose(corners(lanes), [(0, 15, -0.42, 0.42), (0, 15, 0.58, 1.42)])
    assert set(colours(lanes)) == {IDLE}


def test_overlapped_pair_is_two_half_bars_inside_a_thicker_border() -> None:
    timeline = simulate(Schedule.from_orders([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]]))
    _, bars, borders = boxes(draw(timeline).axes[0])
    np.testing.assert_allclose(corners(bars)[1:3], [(1, 4, -0.42, 0), (1, 4, 0, 0.42)])
    np.testing.assert_allclose(corners(borders), [(1, 4, -0.42, 0.42)] * 2)
    assert np.max(borders.get_linewidth()) > np.max(bars.get_linewidth())


def test_recorded_times_may_start_at_any_offset() -> None:
    simulated = timeline_of("1F1B", 2, 4)
    moved = (simulated.start + 700, simulated.end + 700, simulated.memory)
    recorded = Timeline(simulated.schedule, *moved)
    one, other = (corners(boxes(draw(timeline).axes[0])[1]) for timeline in (simulated, recorded))
    np.testing.assert_allclose(one, other, atol=1e-9)


def test_every_bar_with_enough_room_shows_its_microbatch() -> None:
    axes = draw(timeline_of("1F1B", 2, 3)).axes[0]
    assert numbers(axes) == ["0", "1", "0", "2", "1", "2", "0", "0", "1", "1", "2", "2"]


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 40), (16, 64)])
def test_numbers_lie_inside_their_bars(ranks: int, microbatches: int) -> None:
    timeline = timeline_of("1F1B", ranks, microbatches)
    figure = draw(timeline)
    axes = figure.axes[0]
    figure.draw_without_rendering()
    boxes_by_centre = {
        ((left + right) / 2, (top + bottom) / 2): (left, right)
        for left, right, top, bottom in corners(boxes(axes)[1]).tolist()
    }
    assert axes.texts
    for text in axes.texts:
        extent = text.get_window_extent().transformed(axes.transData.inverted())
        left, right = boxes_by_centre[text.get_position()]
        assert left <= extent.x0
        assert extent.x1 <= right


def test_narrow_bars_show_no_number() -> None:
    assert numbers(draw(timeline_of("1F1B", 8, 500)).axes[0]) == []


def test_legend_lists_only_kinds_that_occur() -> None:
    assert legend_labels(draw(timeline_of("GPipe", 2, 4))) == ["Forward", "Full backward", "Idle"]
    assert legend_labels(draw(timeline_of("DualPipeV", 4, 10))) == [
        "Forward",
        "Backward input",
        "Backward weight",
        "Full backward",
        "Idle",
        "Overlapped",
    ]


def test_memory_panel_has_a_bar_per_rank() -> None:
    memory = draw(timeline_of("1F1B", 4, 8)).axes[1]
    assert [bar.get_height() for bar in memory.patches] == [4, 3, 2, 1]  # type: ignore[attr-defined]  # bars
    assert memory.get_title(loc="left") == "peak activations per rank"


def test_memory_is_in_bytes_if_they_are_known() -> None:
    costs = Costs(activation_bytes=[2**30, 2**31])
    memory = draw(timeline_of("1F1B", 2, 4, costs)).axes[1]
    assert [text.get_text() for text in memory.texts] == ["2 GiB", "2 GiB"]
    assert memory.get_title(loc="left") == "peak bytes per rank"


def test_title_defaults_to_the_name_of_the_schedule() -> None:
    timeline = timeline_of("ZBV", 2, 4)
    axes = draw(timeline).axes[0]
    assert axes.get_title(loc="left") == "ZBV"
    assert axes.get_title(loc="right") == "end time 12.5 s    bubble 4.0 %    peak 2 microbatches"
    assert draw(timeline, title="Figure 1").axes[0].get_title(loc="left") == "Figure 1"


def test_comparison_has_one_panel_per_timeline_on_one_time_axis() -> None:
    timelines = {name: timeline_of(name, 4, 8) for name in ("1F1B", "ZB-H1", "DualPipeV")}
    figure = draw_comparison(timelines)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(timelines)
    longest = max(timeline.end_time for timeline in timelines.values())
    assert {axes.get_xlim() for axes in figure.axes} == {(0, longest)}
    widths = {round(axes.get_position().width, 9) for axes in figure.axes}
    assert len(widths) == 1


def test_empty_comparison_is_rejected() -> None:
    with pytest.raises(ValueError, match="timelines must not be empty; give at least one"):
        draw_comparison({})


@pytest.mark.parametrize(
    ("suffix", "first_bytes"),
    [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".pdf", b"%PDF-"), (".PNG", b"\x89PNG")],
)
def test_suffix_selects_the_format(tmp_path: Path, suffix: str, first_bytes: bytes) -> None:
    file = tmp_path / f"picture{suffix}"
    save(draw(timeline_of("DualPipeV", 4, 10)), file)
    assert file.read_bytes().startswith(first_bytes)


def test_other_suffixes_are_rejected_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "picture.jpeg"
    with pytest.raises(
        ValueError, match=r"must end in \.png, \.svg, \.pdf \(got 'picture\.jpeg'\)"
    ):
        save(draw(timeline_of("GPipe", 1, 1)), file)
    assert not file.exists()


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    all_but_slow([(1, 1), (1, 300), (16, 4), (64, 8), (256, 4)], [(1, 1), (1, 300), (16, 4)]),
)
def test_picture_stays_within_a_page(tmp_path: Path, ranks: int, microbatches: int) -> None:
    figure = draw(timeline_of("1F1B", ranks, microbatches))
    width, height = figure.get_size_inches()
    assert 5 < width < 17
    assert 2 < height < 18
    save(figure, tmp_path / "picture.png")


def test_labels_of_many_ranks_are_thinned_out_evenly() -> None:
    axes = draw(timeline_of("GPipe", 256, 1)).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"rank {rank}" for rank in range(0, 256, 4)]


def test_many_bars_become_an_image_inside_a_vector_file(tmp_path: Path) -> None:
    timeline = timeline_of("1F1B", 32, 400)
    save(draw(timeline), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "<image" in text
    assert len(text) < 1_000_000


def test_timeline_of_zero_length_can_be_drawn(tmp_path: Path) -> None:
    costs = Costs(forward=0, backward_input=0, backward_weight=0)
    save(draw(timeline_of("GPipe", 2, 2, costs)), tmp_path / "picture.png")


def test_drawing_does_not_change_matplotlib_settings(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    save(draw(timeline_of("ZBV", 2, 4)), tmp_path / "picture.pdf")
    assert dict(mpl.rcParams) == before


def test_sends_that_take_time_are_drawn_and_in_the_legend() -> None:
    lowered = lower(build("1F1B", ranks=2, microbatches=2))
    busy, free = (legend_labels(draw(simulate(lowered, Costs(send=s)))) for s in (0.5, 0))
    assert busy == ["Forward", "Full backward", "Send forward", "Send backward", "Idle"]
    assert free == ["Forward", "Full backward", "Idle"]


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_shown_figure_has_its_own_window() -> None:
    pyplot.switch_backend("agg")
    figure = draw(timeline_of("ZBV", 2, 4))
    show(figure)
    manager = pyplot.get_current_fig_manager()
    assert manager is not None
    assert manager.canvas.figure is figure
    pyplot.close("all")


def test_error_without_matplotlib_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Python itself marks a module that is not installed like this.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'penstock\[figure\]'"):
        draw(timeline_of("GPipe", 1, 1))


def test_colours_come_from_the_palette() -> None:
    _, bars, _ = boxes(draw(timeline_of("1F1B", 2, 2)).axes[0])
    assert set(colours(bars)) == {LOOKS[Kind.FORWARD].colour, LOOKS[Kind.FULL_BACKWARD].colour}

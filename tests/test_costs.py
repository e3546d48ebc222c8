"""Costs as a value: what is taken, what is refused, how they are divided again."""

from pathlib import Path

import numpy as np
import pytest

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import CostsError
from penstock.sim.engine import simulate
from tests.tables import read_schedule

NO_PAIR = "overlap_gain is for pairs of F, I, W, B"
TWO_RANKS = build("1F1B", ranks=2, microbatches=2)


def test_numbers_become_floats_and_lists_become_tuples() -> None:
    costs = Costs(forward=2, backward_input=[1, 2], transfer=[[0, 1], [2, 0]])
    assert costs.forward == 2.0
    assert costs.backward_input == (1.0, 2.0)
    assert costs.transfer == ((0.0, 1.0), (2.0, 0.0))
    assert hash(costs) == hash(Costs(2.0, (1.0, 2.0), transfer=((0, 1), (2, 0))))


def test_arrays_are_taken_like_lists() -> None:
    values = {"forward": np.array([1, 2]), "transfer": np.ones((2, 2), dtype=np.float32)}
    costs = Costs.from_mapping(values)
    assert costs == Costs(forward=[1, 2], transfer=[[1, 1], [1, 1]])
    assert Costs.from_mapping({"forward": np.float32(0.5)}) == Costs(forward=0.5)


def test_full_backward_is_the_sum_of_its_halves_unless_given() -> None:
    costs = Costs(backward_input=[1, 2], backward_weight=3)
    assert [costs.full_backward_seconds(stage) for stage in (0, 1)] == [4.0, 5.0]
    assert Costs(full_backward=[7, 8]).full_backward_seconds(1) == 8.0
    assert Costs(full_backward=7).full_backward_seconds(1) == 7.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("forward", -1, "forward must be from 0 to 1e+100 (got -1)"),
        ("forward", float("nan"), "forward must be from 0 to 1e+100 (got nan)"),
        ("forward", float("inf"), "forward must be from 0 to 1e+100 (got inf)"),
        ("forward", "fast", "forward must be from 0 to 1e+100 (got 'fast')"),
        ("forward", b"ab", "forward must be from 0 to 1e+100 (got b'ab')"),
        ("forward", True, "forward must be from 0 to 1e+100 (got True)"),
        ("forward", None, "forward must be from 0 to 1e+100 (got None)"),
        ("forward", [1, -2], "forward must be from 0 to 1e+100 (got -2)"),
        ("forward", [1, "2"], "forward must be from 0 to 1e+100 (got '2')"),
        ("forward", [[1]], "forward must be from 0 to 1e+100 (got [1])"),
        ("forward", {"a": 1}, "forward must be from 0 to 1e+100 (got {'a': 1})"),
        ("forward", 1j, "forward must be from 0 to 1e+100 (got 1j)"),
        ("forward", np.array(1.0), "forward must be from 0 to 1e+100 (got array(1.))"),
        # More than a float holds; converting it once failed with an OverflowError.
        ("forward", 10**309, f"forward must be from 0 to 1e+100 (got 1{'0' * 76}...)"),
        # Without values there is nothing to divide by; that once failed in `compare`.
        ("forward", [], "forward has no values; give at least one number"),
        ("transfer", [], "transfer has no values; give at least one number"),
        ("transfer", [1, 2], "transfer must be one number or a square table of numbers"),
        ("transfer", [[1, 2]], "transfer must be one number or a square table of numbers"),
        ("transfer", [[1, 2], [3]], "transfer must be one number or a square table of numbers"),
        ("transfer", ["ab", "cd"], "transfer must be one number or a square table of numbers"),
        ("transfer", [[0, -1], [0, 0]], "transfer must be from 0 to 1e+100 (got -1)"),
        ("send", [1], "send must be from 0 to 1e+100 (got [1])"),
        ("overlap_gain", 1.5, "overlap_gain must be between 0 and 1 (got 1.5)"),
        ("overlap_gain", -0.5, "overlap_gain must be from 0 to 1e+100 (got -0.5)"),
        (
            "fwd",
            1,
            "unknown cost 'fwd'; known are forward, backward_input, backward_weight, "
            "full_backward, transfer, send, overlap_gain, activation_bytes, "
            "weight_stash_bytes, parameter_bytes, gradient_bytes, optimizer_bytes, "
            "message_bytes, workspace_bytes, host_action, host_message, unshard, reshard, "
            "reduce_grad, collective_overlap, wires, microbatch_scale, recompute, "
            "input_bytes, host_link",
        ),
    ],
)
def test_invalid_cost_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(CostsError) as caught:
        Costs.from_mapping({name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(forward=[1, 2, 3]),
            "forward has 3 values, but the schedule has 2 stages; "
            "give one number, or one per stage",
        ),
        (
            Costs(full_backward=[1]),
            "full_backward has 1 values, but the schedule has 2 stages; "
            "give one number, or one per stage",
        ),
        (
            Costs(parameter_bytes=[1, 2, 3]),
            "parameter_bytes has 3 values, but the schedule has 2 stages; "
            "give one number, or one per stage",
        ),
        (
            Costs(transfer=[[0] * 3] * 3),
            "transfer is a table of 3 by 3, but the schedule has 2 ranks; "
            "give one number, or one per sender and receiver",
        ),
    ],
)
def test_costs_of_another_size_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(CostsError) as caught:
        simulate(TWO_RANKS, costs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("costs.toml", "forward = 1.5\nbackward_weight = [1, 2]\ntransfer = [[0, 1], [1, 0]]\n"),
        (
            "costs.json",
            '{"forward": 1.5, "backward_weight": [1, 2], "transfer": [[0, 1], [1, 0]]}',
        ),
    ],
)
def test_costs_are_read_from_a_file(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    expected = Costs(forward=1.5, backward_weight=[1, 2], transfer=[[0, 1], [1, 0]])
    assert Costs.from_file(file) == Costs.from_file(str(file)) == expected


@pytest.mark.parametrize("name", ["costs.toml", "costs.json", "costs"])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(forward=[1e-7, 1 / 3], full_backward=[5e21, 2], transfer=[[0, 1e-5], [2e-5, 0]]),
        Costs(send=0.1, overlap_gain=0.5, message_bytes=[0, 4096], workspace_bytes=1e12),
    ],
)
def test_costs_come_back_from_a_file_unchanged(tmp_path: Path, name: str, costs: Costs) -> None:
    costs.to_file(tmp_path / name)
    assert Costs.from_file(tmp_path / name) == costs


def test_a_file_of_costs_has_a_line_for_each(tmp_path: Path) -> None:
    costs = Costs(forward=[1, 2.5], transfer=[[0, 1], [1, 0]])
    costs.to_file(tmp_path / "costs.toml")
    lines = (tmp_path / "costs.toml").read_text().splitlines()
    assert lines[:5] == [
        "forward = [1.0, 2.5]",
        "backward_input = 1.0",
        "backward_weight = 1.0",
        "transfer = [[0.0, 1.0], [1.0, 0.0]]",
        "send = 0.0",
    ]
    costs.to_file(tmp_path / "costs.json")
    lines = (tmp_path / "costs.json").read_text().splitlines()
    assert lines[:3] == ["{", '  "forward": [1.0, 2.5],', '  "backward_input": 1.0,']


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.toml", b"forward =", "not readable as TOML: Invalid value (at end of document)"),
        (
            "bad.json",
            b'{"forward": }',
            "not readable as JSON: Expecting value: line 1 column 13 (char 12)",
        ),
        ("bad.json", b"", "not readable as JSON: Expecting value: line 1 column 1 (char 0)"),
        ("bad.json", b"[1, 2]", "write names and numbers, such as forward = 1.5"),
        ("bad.json", b'{"forward": NaN}', "NaN is not a valid number"),
        ("bad.json", b'{"forward": null}', "forward must be from 0 to 1e+100 (got None)"),
        ("bad.toml", b"forward = true", "forward must be from 0 to 1e+100 (got True)"),
        ("bad.toml", b"[forward]\na = 1", "forward must be from 0 to 1e+100 (got {'a': 1})"),
        (
            "bad.toml",
            b"\xff",
            "not a text file: byte 0 is not UTF-8 (invalid start byte)",
        ),
    ],
)
def test_file_that_holds_no_costs_is_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(CostsError) as caught:
        Costs.from_file(file)
    assert str(caught.value) == f"{file}: {message}"


def test_file_of_endless_brackets_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(CostsError, match=r"deep\.json: too many brackets"):
        Costs.from_file(file)


def test_single_numbers_are_shares_that_a_finer_cut_divides() -> None:
    costs = Costs(forward=6, full_backward=8, activation_bytes=4, transfer=1).recut(2, 4)
    assert costs.forward == (3.0,) * 4
    assert costs.full_backward == (4.0,) * 4
    assert costs.activation_bytes == (2.0,) * 4
    assert costs.transfer == 1.0


def test_lists_are_divided_or_added_up_in_the_order_of_the_model() -> None:
    costs = Costs(forward=[1, 2, 3, 4])
    assert costs.recut(2, 8).forward == (0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2)
    assert costs.recut(2, 2).forward == (3, 7)
    assert costs.recut(2, 4).forward == (1, 2, 3, 4)


def test_messages_and_room_to_work_in_do_not_shrink_with_the_stages() -> None:
    costs = Costs(message_bytes=[4, 6], workspace_bytes=[2, 3])
    finer, joined = costs.recut(2, 4), costs.recut(2, 1)
    assert (finer.message_bytes, finer.workspace_bytes) == ((4, 4, 6, 6), (2, 2, 3, 3))
    assert (joined.message_bytes, joined.workspace_bytes) == ((4,), (3,))


def test_cut_that_does_not_come_out_even_is_refused() -> None:
    with pytest.raises(CostsError) as caught:
        Costs(forward=[1, 2, 3]).recut(2, 2)
    assert str(caught.value) == (
        "forward has 3 values, which cannot be divided evenly among 2 stages"
    )


def test_copies_of_a_part_cost_what_the_part_costs() -> None:
    costs = Costs(forward=[1, 2], backward_input=5).for_parts((0, 1, 1, 0))
    assert (costs.forward, costs.backward_input) == ((1, 2, 2, 1), 5)


def test_repr_shows_what_was_given_and_the_range_of_long_columns() -> None:
    assert repr(Costs()) == "Costs()"
    links = np.full((4, 4), 0.5).tolist()
    costs = Costs(forward=[1, 2], backward_input=range(1, 9), transfer=links)
    assert repr(costs) == (
        "Costs(forward=(1.0, 2.0), backward_input=<8 from 1 to 8>, transfer=<16 from 0.5 to 0.5>)"
    )


def test_gains_of_pairs_are_kept_in_one_order_and_come_back_from_files(tmp_path: Path) -> None:
    costs = Costs(overlap_gain={"W+F": 0.25, "B+F": 0.5, "I+W": 0})
    assert costs.overlap_gain == (("F+B", 0.5), ("F+W", 0.25))
    assert costs == Costs(overlap_gain={"F+B": 0.5, "F+W": 0.25})
    assert repr(costs) == "Costs(overlap_gain={'F+B': 0.5, 'F+W': 0.25})"
    for name in ("costs.json", "costs.toml"):
        costs.to_file(tmp_path / name)
        assert Costs.from_file(tmp_path / name) == costs


@pytest.mark.parametrize(
    ("gains", "message"),
    [
        (
            {"F+X": 0.5},
            "overlap_gain is for pairs of F, I, W, B (got 'F+X'); write 'F+B' for example",
        ),
        ({"F": 0.5}, "overlap_gain is for pairs of F, I, W, B (got 'F'); write 'F+B' for example"),
        ({"F+B": 1.5}, "overlap_gain of F+B must be between 0 and 1 (got 1.5)"),
    ],
)
def test_gains_are_for_pairs_of_kinds_only(gains: dict[str, float], message: str) -> None:
    with pytest.raises(CostsError) as caught:
        Costs(overlap_gain=gains)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("gains", "seconds"),
    [(0.0, 12), (1.0, 11), ({"W+I": 0.5}, 11.5), ({"F+B": 1.0}, 12), ({"F+B": 1, "I+W": 1}, 11)],
)
def test_a_pair_saves_what_its_kinds_save(gains: float | dict[str, float], seconds: float) -> None:
    schedule = read_schedule("0F0 0F1 0I0 (0I1;0W0)OVERLAP_F_B 0W1")
    assert simulate(schedule, Costs(2, 3, 1, overlap_gain=gains)).end_time == seconds

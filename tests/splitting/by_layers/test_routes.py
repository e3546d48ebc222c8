"""Where values go: each to the first stage that needs it, and on from there."""

from collections.abc import Sequence

import pytest

from penstock.splitting.by_layers.notes import INPUTS, Value
from penstock.splitting.by_layers.routes import LayerRoutes


def make(needs: dict[Value, Sequence[int]]) -> LayerRoutes:
    paths = {f"layers.{i}": i for i in range(4)}
    return LayerRoutes(4, paths, frozenset(paths), needs=needs)


def test_without_an_example_inputs_and_last_layers_go_to_the_next_stage() -> None:
    plain = make({})
    assert plain.is_guessed
    layers = [Value(f"layers.{i}", 0, "") for i in range(4)]
    assert [plain.next_stop(value, i) for i, value in enumerate(layers)] == [1, 2, 3, None]
    assert plain.next_stop(layers[0], 1) is None
    assert [plain.next_stop(Value(INPUTS, 0, "x"), i) for i in range(4)] == [1, 2, 3, None]
    assert plain.dataflow().edges == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("stages", "stops", "edges"),
    [
        ([], [None] * 4, []),
        ([0], [None] * 4, []),
        ([3], [3, 3, 3, None], [(0, 3)]),
        ([1, 3], [1, 3, 3, None], [(1, 3)]),
        ([0, 1, 2, 3], [1, 2, 3, None], []),
    ],
)
def test_a_value_is_relayed_by_those_that_need_it(
    stages: list[int], stops: list[int | None], edges: list[tuple[int, int]]
) -> None:
    value = Value("layers.0", 0, "")
    found = make({value: stages, Value("layers.2", 0, ""): []})
    assert [found.next_stop(value, stage) for stage in range(4)] == stops
    assert found.dataflow().edges == tuple(sorted([(0, 1), (1, 2), (2, 3), *edges]))
    assert not found.is_guessed


def test_inputs_that_the_example_did_not_have_go_everywhere() -> None:
    found = make({Value("layers.0", 0, ""): [1]})
    assert [found.next_stop(Value(INPUTS, 0, "new"), stage) for stage in range(4)] == [
        1,
        2,
        3,
        None,
    ]
    assert found.next_stop(Value("layers.1", 0, ""), 1) is None


def test_a_unit_is_held_where_it_is_called() -> None:
    calls = {("layers.0", 0): 0, ("layers.0", 1): 2}
    found = LayerRoutes(4, {"layers.0": 0, "other": 3}, frozenset(), calls)
    assert found.callers("layers.0") == {0, 2}
    assert found.callers("other") == {3}
    assert [found.stage("layers.0", call) for call in range(3)] == [0, 2, 0]


def test_loose_parameters_are_held_where_they_are_used() -> None:
    found = LayerRoutes(3, {}, frozenset(), loose={"token": frozenset([1, 2])})
    assert [found.holds_loose(stage, "token") for stage in range(3)] == [False, True, True]
    assert [found.holds_loose(stage, "other") for stage in range(3)] == [True, False, False]


def test_parts_of_a_unit_are_held_where_they_are_used_without_a_call() -> None:
    loose = {"embed.weight": frozenset([2]), "embed.a.b": frozenset([1, 2]), "embedder.x": {2}}
    found = LayerRoutes(3, {}, frozenset(), loose={k: frozenset(v) for k, v in loose.items()})
    assert [found.held_parts(stage, "embed") for stage in range(3)] == [
        [],
        ["a.b"],
        ["weight", "a.b"],
    ]

"""Each value is sent to the first stage that needs it, and from there to the next one."""

from collections.abc import Sequence

import pytest

from penstock.splitting.by_layers.records.call_records import INPUTS, Value
from penstock.splitting.by_layers.routes import LayerRoutes


def make(needed_by: dict[Value, Sequence[int]]) -> LayerRoutes:
    paths = {f"layers.{i}": i for i in range(4)}
    return LayerRoutes(4, paths, frozenset(paths), needed_by=needed_by)


def test_without_an_example_inputs_and_last_layers_go_to_the_next_stage() -> None:
    plain = make({})
    assert plain.is_guessed
    layers = [Value(f"layers.{i}", 0, "") for i in range(4)]
    assert [plain.next_stage(value, i) for i, value in enumerate(layers)] == [1, 2, 3, None]
    assert plain.next_stage(layers[0], 1) is None
    assert [plain.next_stage(Value(INPUTS, 0, "x"), i) for i in range(4)] == [1, 2, 3, None]
    assert plain.dataflow().edges == ((0, 1), (1, 2), (2, 3))


@pytest.mark.parametrize(
    ("stages", "next_stages", "edges"),
    [
        ([], [None] * 4, []),
        ([0], [None] * 4, []),
        ([3], [3, 3, 3, None], [(0, 3)]),
        ([1, 3], [1, 3, 3, None], [(1, 3)]),
        ([0, 1, 2, 3], [1, 2, 3, None], []),
    ],
)
def test_a_value_is_forwarded_by_the_stages_that_need_it(
    stages: list[int], next_stages: list[int | None], edges: list[tuple[int, int]]
) -> None:
    value = Value("layers.0", 0, "")
    found = make({value: stages, Value("layers.2", 0, ""): []})
    assert [found.next_stage(value, stage) for stage in range(4)] == next_stages
    assert found.dataflow().edges == tuple(sorted([(0, 1), (1, 2), (2, 3), *edges]))
    assert not found.is_guessed


def test_inputs_that_the_example_did_not_have_are_sent_to_all_stages() -> None:
    found = make({Value("layers.0", 0, ""): [1]})
    assert [found.next_stage(Value(INPUTS, 0, "new"), stage) for stage in range(4)] == [
        1,
        2,
        3,
        None,
    ]
    assert found.next_stage(Value("layers.1", 0, ""), 1) is None


def test_a_unit_is_held_where_it_is_called() -> None:
    calls = {("layers.0", 0): 0, ("layers.0", 1): 2}
    found = LayerRoutes(4, {"layers.0": 0, "other": 3}, frozenset(), calls)
    assert found.callers("layers.0") == {0, 2}
    assert found.callers("other") == {3}
    assert [found.stage("layers.0", call) for call in range(3)] == [0, 2, 0]


def test_parameters_of_containers_are_held_where_they_are_used() -> None:
    found = LayerRoutes(3, {}, frozenset(), holders={"token": frozenset([1, 2])})
    assert [found.holds_tensor(stage, "token") for stage in range(3)] == [False, True, True]
    assert [found.holds_tensor(stage, "other") for stage in range(3)] == [True, False, False]


def test_tensors_of_a_unit_are_held_where_they_are_used_without_a_call() -> None:
    holders = {"embed.weight": frozenset([2]), "embed.a.b": frozenset([1, 2]), "embedder.x": {2}}
    found = LayerRoutes(3, {}, frozenset(), holders={k: frozenset(v) for k, v in holders.items()})
    assert [found.held_tensors(stage, "embed") for stage in range(3)] == [
        [],
        ["a.b"],
        ["weight", "a.b"],
    ]

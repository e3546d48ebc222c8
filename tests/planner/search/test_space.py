"""Everything there is to choose is looked at once, and what cannot fit is known to."""

from dataclasses import replace

import pytest

from penstock.costs import Costs
from penstock.errors import ArgumentError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.choices import Choices
from penstock.planner.search.space import Candidate, Space

BLOCK = {
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "parameter_bytes": 10.0,
    "activation_bytes": 8.0,
    "weight_stash_bytes": 4.0,
    "message_bytes": 1.0,
}
LAYERS = [Piece(f"block.{number}", **BLOCK) for number in range(8)]


def candidates(memory: float | None = None, **changes: object) -> list[Candidate]:
    settings = {"layers": LAYERS, "ranks": 2, "batch": 4, "transfer": 0.0} | changes
    return list(Space.of(memory=memory, boundary="everything", **settings).candidates())  # type: ignore[arg-type]  # each test gives what it needs


def test_without_a_limit_every_placement_is_one_candidate() -> None:
    found = candidates()
    assert [one.problem.placement for one in found] == [
        Placement.loop(2),
        Placement.loop(2, 2),
        Placement.v(2),
        Placement.loop(2, 3),
        Placement.v(2, 4),
    ]
    assert {one.choices.checkpointed for one in found} == {()}
    assert found[0].choices == Choices((4, 4))
    assert found[0].problem.costs == Costs(
        forward=[4, 4],
        backward_input=[4, 4],
        backward_weight=[4, 4],
        activation_bytes=[32, 32],
        weight_stash_bytes=[16, 16],
        parameter_bytes=[40, 40],
        gradient_bytes=[0, 0],
        optimizer_bytes=[0, 0],
        message_bytes=[1, 1],
        workspace_bytes=[0, 0],
    )


def test_every_size_that_fills_the_batch_is_tried() -> None:
    found = candidates(layers={1: LAYERS, 2: LAYERS, 3: LAYERS}, batch=4)
    assert {(o.choices.microbatch_size, o.problem.microbatches) for o in found} == {(1, 4), (2, 2)}


def test_transfer_may_depend_on_the_size() -> None:
    found = candidates(layers={1: LAYERS, 2: LAYERS}, transfer={1: 0.5, 2: 0.75})
    by_size = {one.choices.microbatch_size: one.problem.costs.transfer for one in found}
    assert by_size == {1: 0.5, 2: 0.75}


def test_under_a_limit_stages_are_checkpointed_too() -> None:
    found = candidates(memory=150.0)
    loops = [one for one in found if one.problem.placement == Placement.loop(2)]
    # 1F1B holds two microbatches on rank 0, and one on rank 1; GPipe holds four on both.
    assert {one.choices.checkpointed for one in loops} == {(), (0, 1)}
    tighter = candidates(memory=90.0)
    assert (0,) in {one.choices.checkpointed for one in tighter}


def test_no_combination_comes_twice() -> None:
    found = [(one.problem.placement, one.choices) for one in candidates(memory=100.0)]
    assert len(set(found)) == len(found)


def test_candidates_know_whether_they_fit() -> None:
    for one in candidates(memory=75.0):
        least = one.problem.least_bytes
        assert one.missing_bytes == max(least) - 75
        assert least[one.fullest_rank] == max(least)
    assert any(one.missing_bytes > 0 for one in candidates(memory=75.0))
    assert all(one.missing_bytes <= 0 for one in candidates(memory=1000.0))


def test_cuts_follow_the_bytes_where_the_fastest_do_not_fit() -> None:
    heavy = [Piece("embedding", forward=0.1, parameter_bytes=40.0), *LAYERS]
    found = candidates(layers=heavy, memory=100.0)
    plain = [o for o in found if o.problem.stages == 2 and not o.choices.checkpointed]
    assert {one.choices.sizes: one.missing_bytes <= 0 for one in plain} == {
        (5, 4): False,
        (4, 5): True,
    }


def test_stages_that_recompute_get_fewer_layers() -> None:
    many = [Piece(f"block.{number}", **BLOCK) for number in range(16)]
    found = candidates(layers=many, memory=220.0)
    cut = {o.choices.sizes for o in found if o.choices.checkpointed == (0,)}
    assert cut == {(8, 8), (7, 9), (4, 4, 4, 4), (3, 4, 5, 4)}


def test_neighbours_checkpoint_one_stage_more_or_less() -> None:
    space = Space.of(LAYERS, 2, 4, 150.0, 0.0, boundary="everything")
    one = space.candidate(Placement.v(2), Choices((2, 2, 2, 2), (1,)))
    found = space.neighbours(one)
    assert [n.choices.checkpointed for n in found] == [(0, 1), (), (1, 2), (1, 3)]
    assert all(n == space.candidate(Placement.v(2), n.choices) for n in found)


def test_candidates_without_a_limit_have_no_neighbours() -> None:
    space = Space.of(LAYERS, 2, 4, None, 0.0, boundary="everything")
    assert space.neighbours(next(space.candidates())) == []


def test_models_without_message_sizes_are_not_checkpointed() -> None:
    silent = [Piece(f"block.{n}", **(BLOCK | {"message_bytes": 0.0})) for n in range(8)]
    assert {one.choices.checkpointed for one in candidates(layers=silent, memory=90.0)} == {()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ranks": 0}, SizeError, "ranks and batch must be at least 1 (ranks: 0, batch: 4)"),
        (
            {"layers": {}},
            ArgumentError,
            "every microbatch size must have the same layers, by name",
        ),
        (
            {"layers": {1: LAYERS, 2: LAYERS[1:]}},
            ArgumentError,
            "every microbatch size must have the same layers, by name",
        ),
        (
            {"ranks": 9},
            SizeError,
            "every rank needs a layer (layers: 8, ranks: 9); use 8 ranks or fewer, "
            "or finer layers",
        ),
        (
            {"layers": {0: LAYERS}},
            ArgumentError,
            "microbatch sizes must be whole numbers of rows (got 0)",
        ),
        (
            {"layers": {3: LAYERS}, "batch": 4},
            SizeError,
            "no microbatch size fills a batch of 4 evenly (sizes: 3); "
            "use a multiple of one of them",
        ),
        (
            {"transfer": {2: 0.5}},
            ArgumentError,
            "transfer must be one value, or have the same sizes as the layers",
        ),
        (
            {"memory": [1.0, 2.0, 3.0]},
            SizeError,
            "memory must be one limit, or one per rank (ranks: 2, got 3)",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        candidates(**changes)  # type: ignore[arg-type]  # wrong on purpose
    assert str(caught.value) == message


def test_the_host_costs_as_much_as_for_the_layer_that_costs_it_most() -> None:
    layers = [*LAYERS[:-1], replace(LAYERS[-1], host_action=0.125)]
    space = Space.of(layers, 2, 4, None, 0.0, "everything")
    found = replace(space, host_message=0.25).candidates()
    assert {(o.problem.costs.host_action, o.problem.costs.host_message) for o in found} == {
        (0.125, 0.25)
    }

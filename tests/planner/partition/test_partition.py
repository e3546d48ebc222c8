from collections.abc import Sequence
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.costs import Costs
from penstock.errors import ArgumentError, CostsError, SizeError
from penstock.ir.placement import Placement
from penstock.planner.partition.partition import Partition, partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.in_flight import count_in_flight
from penstock.sim.engine import simulate
from tests.covering import all_but_slow
from tests.planner.brute_force import Score, all_scores
from tests.strategies import examples

PLACEMENTS = [
    *(Placement.loop(ranks, turns) for ranks in (1, 2, 3, 4) for turns in (1, 2, 3)),
    *(Placement.v(ranks, turns) for ranks in (2, 3, 4) for turns in (2, 3)),
    Placement((0, 1, 1, 2, 0)),
    Placement((1, 0, 0, 0, 2, 1)),
]


def weighed(*weights: float) -> list[Piece]:
    return [Piece(f"layers.{i}", forward=weight) for i, weight in enumerate(weights)]


def sized(*parameter_bytes: int) -> list[Piece]:
    return [
        Piece(f"layers.{i}", forward=1, parameter_bytes=size)
        for i, size in enumerate(parameter_bytes)
    ]


def score_of(found: Partition) -> Score:
    squares = sum(second**2 for second in found.stage_seconds)
    return Score(max(found.stage_seconds), max(found.rank_seconds), squares)


def check_against_all(
    pieces: Sequence[Piece],
    placement: Placement,
    memory: Sequence[float],
    in_flight: Sequence[int],
) -> None:
    scores = list(all_scores(pieces, placement, memory, in_flight))
    fitting = [score for score, excess in scores if excess <= 0]
    if not fitting:
        least = min(excess for _, excess in scores)
        with pytest.raises(SizeError, match=f"which is {least:,.0f} too few"):
            partition(pieces, placement, memory=memory, in_flight=in_flight)
        return
    found = partition(pieces, placement, memory=memory, in_flight=in_flight)
    assert (score_of(found), found.is_best) == (min(fitting), True)
    assert all(held <= cap for held, cap in zip(found.rank_bytes, memory, strict=True))


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[list[Piece], Placement, list[int], list[int]]:
    placement = draw(st.sampled_from([p for p in PLACEMENTS if p.num_stages <= 9]))
    stages, ranks = placement.num_stages, placement.num_ranks
    largest = draw(st.sampled_from([1, 4, 1000]))
    numbers = [st.integers(0, largest), st.integers(0, 20), st.integers(0, 5)]
    rows = draw(st.lists(st.tuples(*numbers), min_size=stages, max_size=max(stages, 9)))
    pieces = [
        Piece(str(i), forward=ticks, parameter_bytes=held, activation_bytes=each)
        for i, (ticks, held, each) in enumerate(rows)
    ]
    in_flight = draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    mean = sum(held + 2 * each for _, held, each in rows) / ranks
    caps = st.integers(int(0.8 * mean), int(2.5 * mean) + 1)
    memory = draw(st.lists(caps, min_size=ranks, max_size=ranks))
    return pieces, placement, memory, in_flight


@settings(max_examples=examples(300))
@given(problems())
def test_no_other_cuts_are_better_under_a_cap(
    problem: tuple[list[Piece], Placement, list[int], list[int]],
) -> None:
    check_against_all(*problem)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: str(p.rank_of_stage))
def test_no_other_cuts_are_better_without_a_cap(placement: Placement) -> None:
    random = Random(0)
    for num_pieces in range(placement.num_stages, max(10, placement.num_stages + 2)):
        weights = [random.choice([0, 1, 1, 1, 2, 3, 10]) for _ in range(num_pieces)]
        found = partition(weighed(*weights), placement)
        unlimited = [inf] * placement.num_ranks, [1] * placement.num_stages
        scores = all_scores(found.pieces, placement, *unlimited)
        assert score_of(found) == min(score for score, _ in scores), weights


@pytest.mark.parametrize("length", all_but_slow([5, 6], [5]))
@pytest.mark.parametrize("placement", [Placement.loop(3), Placement.loop(2, 2), Placement.v(2)])
def test_every_chain_of_small_pieces_is_cut_best(placement: Placement, length: int) -> None:
    unlimited = [inf] * placement.num_ranks, [1] * placement.num_stages
    for weights in product((0, 1, 3), repeat=length):
        found = partition(weighed(*weights), placement)
        scores = all_scores(found.pieces, placement, *unlimited)
        assert score_of(found) == min(score for score, _ in scores), weights


def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    found = partition(weighed(1, 1, 1, 1, 1, 1, 3), Placement.loop(3))
    assert found.cuts == (0, 3, 6, 7)
    assert found.stage_seconds == (3, 3, 3)


def test_equal_pieces_that_do_not_divide_are_spread_evenly() -> None:
    for layers, stages in [(30, 4), (7, 2), (61, 16)]:
        found = partition(weighed(*[0.1] * layers), Placement.loop(stages))
        least, rest = divmod(layers, stages)
        assert sorted(found.sizes) == [least] * (stages - rest) + [least + 1] * rest


def test_a_rank_with_a_slow_stage_gets_a_fast_one_beside_it() -> None:
    # The head makes stage 3 slow, and with it rank 0 of the V: its other stage is kept short.
    found = partition(weighed(1, 1, 1, 1, 1, 1, 5), Placement.v(2))
    assert found.stage_seconds in [(1, 3, 2, 5), (1, 2, 3, 5)]
    assert found.rank_seconds == (6, 5)


def test_memory_moves_the_cut_away_from_the_even_one() -> None:
    pieces = sized(30, 10, 10, 10)
    assert partition(pieces, Placement.loop(2)).sizes == (2, 2)
    assert partition(pieces, Placement.loop(2), memory=30).sizes == (1, 3)
    assert partition(pieces, Placement.loop(2), memory=[60, 10]).sizes == (3, 1)


def test_microbatches_in_flight_multiply_activations() -> None:
    pieces = [Piece(str(i), forward=1, activation_bytes=1) for i in range(6)]
    assert partition(pieces, Placement.loop(2), memory=4, in_flight=[2, 1]).sizes == (2, 4)


def test_pieces_without_any_cost_can_be_cut() -> None:
    found = partition(weighed(0, 0, 0), Placement.loop(3))
    assert (found.sizes, found.balance) == ((1, 1, 1), 1.0)


def test_properties_of_a_partition() -> None:
    pieces = [
        Piece(name, forward=1, backward_input=2, backward_weight=0.5, parameter_bytes=8)
        for name in "abc"
    ] + [
        Piece(
            "d",
            forward=1,
            backward_input=2,
            backward_weight=0.5,
            parameter_bytes=8,
            weight_stash_bytes=1,
            message_bytes=2,
            workspace_bytes=7,
        ),
        Piece(
            "e",
            forward=1,
            activation_bytes=3,
            weight_stash_bytes=2,
            message_bytes=4,
            workspace_bytes=5,
        ),
    ]
    found = partition(pieces, Placement.v(2), memory=99, in_flight=2)
    assert found == Partition(
        pieces=tuple(pieces),
        placement=Placement.v(2),
        cuts=(0, 1, 2, 3, 5),
        in_flight=(2, 2, 2, 2),
        memory=(99, 99),
        is_best=True,
    )
    assert [[piece.name for piece in stage] for stage in found.stages] == [
        ["a"],
        ["b"],
        ["c"],
        ["d", "e"],
    ]
    assert found.stage_seconds == (3.5, 3.5, 3.5, 4.5)
    assert found.rank_seconds == (8, 7)
    assert found.stage_bytes == (8, 8, 8, 14)
    assert found.rank_bytes == (22, 16)
    assert (found.slowest_stage, found.balance) == (3, 15 / 18)
    assert found.to_costs() == Costs(
        forward=(1, 1, 1, 2),
        backward_input=(2, 2, 2, 2),
        backward_weight=(0.5, 0.5, 0.5, 0.5),
        activation_bytes=(0, 0, 0, 3),
        weight_stash_bytes=(0, 0, 0, 3),
        parameter_bytes=(8, 8, 8, 8),
        gradient_bytes=(0, 0, 0, 0),
        optimizer_bytes=(0, 0, 0, 0),
        message_bytes=(0, 0, 0, 2),
        workspace_bytes=(0, 0, 0, 7),
    )


def test_costs_of_a_partition_simulate_at_once() -> None:
    schedule = build("ZBV", ranks=2, microbatches=4)
    pieces = [Piece.of_weight(str(i), 3) for i in range(8)]
    in_flight = count_in_flight(schedule)
    found = partition(pieces, schedule.placement, memory=100, in_flight=in_flight)
    timeline = simulate(schedule, found.to_costs())
    assert timeline.busy_seconds == (48, 48)


def test_weights_of_any_scale_give_the_same_cuts() -> None:
    random = Random(1)
    weights = [random.randint(1, 50) for _ in range(20)]
    cuts = {
        partition(weighed(*[scale * weight for weight in weights]), Placement.v(3)).cuts
        for scale in (1e-9, 1.0, 1024.0, 1e12)
    }
    assert len(cuts) == 1


@pytest.mark.parametrize(
    "placement",
    [Placement.loop(16), Placement.v(16), Placement.loop(16, 2), Placement.loop(16, 3)],
    ids=lambda p: f"{p.style} of {p.num_stages}",
)
def test_many_pieces_are_cut_best(placement: Placement) -> None:
    random = Random(2)
    pieces = weighed(*[random.random() + 0.2 for _ in range(200)])
    found = partition(pieces, placement)
    assert found.is_best
    assert min(found.sizes) >= 1
    # A stage can be no faster than a perfect share, and no slower than that and one more piece.
    share = sum(found.stage_seconds) / placement.num_stages
    assert share <= max(found.stage_seconds) <= share + 1.2


def test_refuses_more_stages_than_pieces() -> None:
    with pytest.raises(SizeError) as error:
        partition(weighed(1, 1, 1), Placement.loop(2, 2))
    assert str(error.value) == (
        "every stage needs a piece (pieces: 3, stages: 4); use 3 stages or fewer, or finer pieces"
    )


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(SizeError) as error:
        partition(sized(10, 10, 10, 30, 10, 10), Placement.loop(2), memory=35)
    assert str(error.value) == (
        "the pieces do not fit: with the cuts that come closest, rank 1 needs 50 bytes and has "
        "35, which is 15 too few; memory=50 is the least that fits, or 3 ranks"
    )


def test_where_no_number_of_ranks_would_do_none_is_named() -> None:
    with pytest.raises(SizeError) as error:
        partition(sized(10, 90), Placement.loop(2), memory=80)
    assert str(error.value) == (
        "the pieces do not fit: with the cuts that come closest, rank 1 needs 90 bytes and has "
        "80, which is 10 too few; memory=90 is the least that fits"
    )


def test_where_ranks_differ_the_message_says_how_much_more_each_needs() -> None:
    with pytest.raises(SizeError) as error:
        partition(sized(10, 10, 10, 10), Placement.loop(2), memory=[5, 20])
    assert str(error.value) == (
        "the pieces do not fit: with the cuts that come closest, rank 1 needs 30 bytes and has "
        "20, which is 10 too few; 10 bytes more on every rank would do"
    )


@settings(max_examples=examples(60))
@given(problems())
def test_the_cap_that_is_named_fits_and_one_byte_less_does_not(
    problem: tuple[list[Piece], Placement, list[int], list[int]],
) -> None:
    pieces, placement, _, in_flight = problem
    if not any(p.parameter_bytes for p in pieces):
        return
    with pytest.raises(SizeError) as error:
        partition(pieces, placement, memory=0, in_flight=in_flight)
    cap = int(str(error.value).partition("memory=")[2].split()[0])
    assert max(partition(pieces, placement, memory=cap, in_flight=in_flight).rank_bytes) == cap
    with pytest.raises(SizeError):
        partition(pieces, placement, memory=cap - 1, in_flight=in_flight)


@pytest.mark.parametrize(
    ("memory", "in_flight", "message"),
    [
        ([1, 2, 3], 1, "memory has 3 values for 2 ranks; give one number, or one per rank"),
        (-1, 1, "memory must be numbers from 0 up (got -1)"),
        (9, [1], "in_flight has 1 values for 2 stages; give one number, or one per stage"),
        (9, 1.5, "in_flight must be whole numbers of microbatches (got 1.5)"),
    ],
)
def test_invalid_numbers_are_refused(memory: float, in_flight: int, message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        partition(weighed(1, 1), Placement.loop(2), memory=memory, in_flight=in_flight)
    assert str(error.value) == message


@pytest.mark.parametrize("value", [-1.0, inf, float("nan")])
def test_refuses_pieces_with_impossible_costs(value: float) -> None:
    with pytest.raises(CostsError, match="forward of piece 'a' is"):
        Piece("a", forward=value)


def test_refuses_sums_beyond_counting() -> None:
    with pytest.raises(CostsError, match="too many bytes to add up; use a larger unit"):
        partition(sized(1 << 50, 1), Placement.loop(2))


def test_a_weight_is_shared_out_over_forward_and_backward() -> None:
    assert Piece.of_weight("a", 6) == Piece("a", forward=2, backward_input=2, backward_weight=2)


def test_prints_as_lines() -> None:
    found = partition(weighed(1, 1, 1, 2.5, 1), Placement.v(2))
    assert str(found).splitlines() == [
        "stage 0  rank 0  layers.0 .. layers.1  pieces: 2  2 s",
        "stage 1  rank 1  layers.2              pieces: 1  1 s",
        "stage 2  rank 1  layers.3              pieces: 1  2.5 s",
        "stage 3  rank 0  layers.4              pieces: 1  1 s",
        "balance 65.0 %, slowest stage 2.5 s, slowest rank 3.5 s",
    ]


def test_repr_of_a_partition_is_one_line() -> None:
    assert repr(partition(weighed(1, 1, 1, 3), Placement.loop(2))) == (
        "<Partition: 4 pieces in 2 stages, balance 100.0 %, slowest stage 3 s>"
    )

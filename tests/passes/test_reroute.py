"""Orders of a chain serve a model whose parts feed one another in another way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.assembly import build, lower
from penstock.checks.report import check
from penstock.errors import PenstockError, SizeError
from penstock.ir.dataflow import Dataflow
from penstock.passes.reroute import reroute
from tests.strategies import FAMILY_NAMES


@st.composite
def rerouted(draw: st.DrawFn) -> tuple[str, int, int, list[tuple[int, int]]]:
    """Draw a family in some size, and links that skip parts of the model."""
    name = draw(st.sampled_from(FAMILY_NAMES))
    ranks = draw(st.sampled_from([2, 4]))
    parts = _parts(name, ranks)
    pairs = st.tuples(st.integers(0, parts - 1), st.integers(0, parts - 1))
    links = [(min(a, b), max(a, b)) for a, b in draw(st.lists(pairs, max_size=6)) if a != b]
    return name, ranks, draw(st.sampled_from([4, 6, 8])), links


def _parts(name: str, ranks: int) -> int:
    return build(name, ranks=ranks, microbatches=4).dataflow.num_parts


@given(rerouted())
def test_every_family_runs_with_every_skip(
    drawn: tuple[str, int, int, list[tuple[int, int]]],
) -> None:
    name, ranks, microbatches, links = drawn
    chain = build(name, ranks=ranks, microbatches=microbatches)
    parts = chain.dataflow.num_parts
    flow = Dataflow(parts, [*Dataflow.chain(parts).edges, *links])
    found = reroute(chain, flow)
    check(found)
    assert found.orders == chain.orders
    assert found.placement == chain.placement
    assert found.dataflow.parts == chain.dataflow.parts
    assert found.dataflow == flow.with_parts(chain.dataflow.parts)
    check(lower(found))


def test_a_chain_stays_unchanged() -> None:
    chain = build("1F1B", ranks=3, microbatches=4)
    assert reroute(chain, Dataflow.chain(3)) == chain


def test_other_numbers_of_parts_are_refused() -> None:
    chain = build("1F1B", ranks=3, microbatches=4)
    with pytest.raises(SizeError) as caught:
        reroute(chain, Dataflow.chain(4))
    assert str(caught.value) == (
        "the schedule must have 4 parts and no communication to take this dataflow "
        "(parts: 3, communication: no)"
    )


def test_a_schedule_that_talks_already_is_refused() -> None:
    with pytest.raises(PenstockError, match="communication: yes"):
        reroute(lower(build("1F1B", ranks=2, microbatches=2)), Dataflow.chain(2))

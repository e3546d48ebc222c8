"""What a rank concludes from the goodbye of rank 0."""

import pytest

from penstock.alive.rank_status import RankStatus
from penstock.alive.timeouts import Timeouts
from penstock.alive.tree.root_view import RootView

TIMEOUTS = Timeouts(stop_seconds=10)
BETWEEN = RankStatus(call=3)
INSIDE = RankStatus(call=3, is_inside=True)
LATER = RankStatus(call=4, is_inside=True)
HELD = RankStatus(call=3, is_inside=True, is_with_replicas=True, seconds=10.0)


# Ranks of other replicas waited as long as for one that had left between calls. Meanwhile they
# raised what torch said of a broken connection. Other ranks than 0 were named at once.
@pytest.mark.parametrize(
    ("root", "status", "own", "other"),
    [
        (BETWEEN, BETWEEN, False, False),
        (BETWEEN, INSIDE, False, False),
        (BETWEEN, LATER, True, False),
        (BETWEEN, HELD, False, True),
        (INSIDE, BETWEEN, False, False),
        (INSIDE, INSIDE, True, True),
        (INSIDE, LATER, True, True),
        (INSIDE, HELD, True, True),
    ],
)
def test_goodbye_in_the_middle_of_a_call_ends_the_calls_of_all_replicas(
    root: RankStatus, status: RankStatus, own: bool, other: bool
) -> None:
    view = RootView()
    assert view.find_lost(0, status, TIMEOUTS) is None
    view.leave(root.call - root.is_inside, "closed", 0, root)
    found = [view.find_lost(pipeline, status, TIMEOUTS) for pipeline in (0, 1)]
    assert [lost is not None for lost in found] == [own, other]
    for lost in found:
        assert lost is None or (lost.rank, lost.what) == (0, "has left (closed)")

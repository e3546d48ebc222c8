from collections.abc import Callable

from penstock.dropin.run.p2p import Outgoing, ReceiveQueue


class Work:
    """Notes when it is waited for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


def starter(name: str, log: list[str]) -> Callable[[], list[Work]]:
    def start() -> list[Work]:
        log.append(f"start {name}")
        return [Work(name, log)]

    return start


A, B = frozenset({0}), frozenset({1})


def test_known_receives_start_at_once() -> None:
    log: list[str] = []
    (work,) = ReceiveQueue().post(A, starter("a", log), is_known=True)
    assert log == ["start a"]
    work.wait()
    assert log == ["start a", "wait a"]


def test_unknown_receives_start_when_waited_for_after_those_of_the_same_rank() -> None:
    log: list[str] = []
    queue = ReceiveQueue()
    queue.post(A, starter("a1", log), is_known=False)
    queue.post(B, starter("b1", log), is_known=False)
    # What is known has to wait behind what is not, for messages of a rank come in their order.
    (second,) = queue.post(A, starter("a2", log), is_known=True)
    (third,) = queue.post(A, starter("a3", log), is_known=True)
    assert log == []
    second.wait()
    assert log == ["start a1", "start a2", "wait a2"]
    third.wait()
    second.wait()
    assert log[3:] == ["start a3", "wait a3", "wait a2"]
    queue.post(A, starter("a4", log), is_known=True)
    assert log[6:] == ["start a4"]


def test_receives_of_a_rank_can_be_started_together() -> None:
    log: list[str] = []
    queue = ReceiveQueue()
    for name, ranks in (("a1", A), ("b1", B), ("both", A | B)):
        queue.post(ranks, starter(name, log), is_known=False)
    queue.start_from(1)
    assert log == ["start b1", "start both"]
    queue.clear()
    queue.post(A, starter("a2", log), is_known=True)
    assert log[2:] == ["start a2"]


def test_few_sends_to_a_rank_are_under_way_where_waiting_is_safe() -> None:
    log: list[str] = []
    sends = Outgoing()
    for number in range(6):
        sends.add(0, [Work(f"a{number}", log)], may_wait=True)
        sends.add(1, [Work(f"b{number}", log)], may_wait=False)
    assert log == ["wait a0", "wait a1"]
    sends.wait()
    expected = [f"wait a{n}" for n in range(2, 6)] + [f"wait b{n}" for n in range(6)]
    assert log[2:] == expected
    sends.add(0, [Work("lost", log)], may_wait=True)
    sends.clear()
    sends.wait()
    assert log[-1] == "wait b5"

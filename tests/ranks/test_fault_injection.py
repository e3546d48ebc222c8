"""Injected faults: whatever they do, every promise to the transport and to the ranks is kept.

One test starts a process that is lost, one runs in four processes.
"""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assembly import build
from penstock.errors import ArgumentError, BoundaryError
from penstock.ir.schedule import Schedule
from penstock.ranks.fault_injection import Drop, FaultInjectingTransport, FaultInjection
from penstock.ranks.transport import LocalTransport, Message
from penstock.tensors.packet import Packet
from penstock.training.options import RunOptions
from penstock.training.pipeline import Pipeline
from tests.forked import run_forked
from tests.models import gradients_of, make_batch, make_blocks, mean_loss
from tests.processes import Processes
from tests.strategies import examples, schedules

NOTHING = Packet("", [])


class Notebook:
    """A transport of one rank among others that writes down what it is asked to do."""

    has_unknown_hooks = False

    def __init__(self, refused: Sequence[Message] = ()) -> None:
        self.ranks = (0,)
        self.num_ranks = 4
        self.has_untold_hooks = False
        self.calls: list[tuple[str, Message | None]] = []
        self._refused = refused

    def begin_step(self, signature: bytes) -> None:
        self.calls.append((f"begin {signature!r}", None))

    def send(self, message: Message, packet: Packet) -> None:
        assert packet is NOTHING
        if message in self._refused:
            raise BoundaryError("refused")
        self.calls.append(("send", message))

    def send_failure(self, message: Message) -> None:
        self.calls.append(("send failure", message))

    def post_receive(self, message: Message) -> None:
        self.calls.append(("post", message))

    def receive(self, message: Message) -> Packet:
        self.calls.append(("receive", message))
        return NOTHING

    def discard(self, message: Message) -> None:
        self.calls.append(("discard", message))

    def release_sends(self) -> None:
        self.calls.append(("release", None))

    def end_step(self) -> None:
        self.calls.append(("end", None))

    def watch_sends(self, note: object) -> None:
        self.calls.append((f"watch {note}", None))

    def remember_shapes(self) -> None:
        self.calls.append(("remember", None))

    def forget_shapes(self) -> None:
        self.calls.append(("forget", None))

    def messages(self, *names: str) -> list[Message]:
        return [message for name, message in self.calls if name in names and message is not None]


def outgoing(microbatch: int, to: int = 1) -> Message:
    return Message(is_forward=True, edge=to, microbatch=microbatch, source=0, destination=to)


def incoming(microbatch: int, source: int = 1, *, is_forward: bool = True) -> Message:
    return Message(is_forward, edge=source, microbatch=microbatch, source=source, destination=0)


def ask(transport: FaultInjectingTransport, call: tuple[str, Message]) -> None:
    name, message = call
    match name:
        case "send":
            transport.send(message, NOTHING)
        case "post":
            transport.post_receive(message)
        case "receive":
            transport.receive(message)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, Message]]:
    """Sends, receives that are posted, and waits for some that were, to and from three peers."""
    calls: list[tuple[str, Message]] = []
    posted: list[Message] = []
    for number in range(draw(st.integers(1, 30))):
        peer = draw(st.integers(1, 3))
        match draw(st.sampled_from(["send", "send", "post", "receive"])):
            case "send":
                calls.append(("send", outgoing(number, peer)))
            case "receive" if posted:
                calls.append(("receive", posted.pop(draw(st.integers(0, len(posted) - 1)))))
            case _:
                message = incoming(number, peer, is_forward=draw(st.booleans()))
                posted.append(message)
                calls.append(("post", message))
    return calls


@given(calls=conversations(), seed=st.integers(0, 1000))
def test_only_legal_orders_reach_the_transport(
    calls: list[tuple[str, Message]], seed: int
) -> None:
    notebook = Notebook()
    transport = FaultInjectingTransport(notebook, FaultInjection(seed, reorders=True))
    transport.begin_step(b"")
    for call in calls:
        ask(transport, call)
    transport.end_step()
    done = [call for call in notebook.calls[1:-1] if call[1] is not None]
    # Nothing is lost, made up or done twice.
    assert sorted(map(str, done)) == sorted(map(str, calls))
    # When this rank waits, all that was asked before is on its way, and nothing that was not.
    for number, call in enumerate(calls):
        if call[0] == "receive":
            assert set(map(str, done[: done.index(call)])) == set(map(str, calls[:number]))
    # Receives from one source keep their order.
    for source in range(1, 4):
        posts = [m for m in notebook.messages("post") if m.source == source]
        assert posts == sorted(posts, key=lambda message: message.microbatch)
    # What overtakes has the same destination, and passes three others at most.
    sent = notebook.messages("send")
    asked = [message for name, message in calls if name == "send"]
    for older, younger in pairwise([asked.index(message) for message in sent]):
        if younger < older:
            assert asked[younger].destination == asked[older].destination
            assert older - younger <= 3


@given(calls=conversations(), seed=st.integers(0, 1000))
def test_gradient_is_posted_after_its_activation_is_sent(
    calls: list[tuple[str, Message]], seed: int
) -> None:
    notebook = Notebook()
    transport = FaultInjectingTransport(notebook, FaultInjection(seed, reorders=True))
    for number, call in enumerate(calls):
        ask(transport, call)
        if call[0] == "post" and not call[1].is_forward:
            asked = [message for name, message in calls[:number] if name == "send"]
            assert sorted(notebook.messages("send")) == sorted(asked)


def order_of_sends(seed: int) -> list[Message]:
    notebook = Notebook()
    transport = FaultInjectingTransport(notebook, FaultInjection(seed, reorders=True))
    for number in range(4):
        transport.send(outgoing(number), NOTHING)
    transport.end_step()
    return notebook.messages("send")


def test_seed_decides_which_messages_overtake_one_another() -> None:
    orders = [order_of_sends(seed) for seed in range(20)]
    assert orders == [order_of_sends(seed) for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 10


def test_receives_from_several_sources_are_posted_in_another_order() -> None:
    orders = set()
    for seed in range(20):
        notebook = Notebook()
        transport = FaultInjectingTransport(notebook, FaultInjection(seed, reorders=True))
        for source in (1, 2, 3):
            transport.post_receive(incoming(0, source))
        transport.end_step()
        orders.add(tuple(message.source for message in notebook.messages("post")))
    assert len(orders) > 3


def test_calls_pass_through_unchanged_without_faults() -> None:
    notebook = Notebook()
    transport = FaultInjectingTransport(notebook, FaultInjection())
    transport.begin_step(b"s")
    transport.post_receive(incoming(0))
    transport.send(outgoing(0), NOTHING)
    transport.send_failure(outgoing(1))
    transport.receive(incoming(0))
    transport.discard(incoming(1))
    transport.end_step()
    transport.remember_shapes()
    transport.forget_shapes()
    assert notebook.calls == [
        ("begin b's'", None),
        ("post", incoming(0)),
        ("send", outgoing(0)),
        ("send failure", outgoing(1)),
        ("receive", incoming(0)),
        ("discard", incoming(1)),
        ("end", None),
        ("remember", None),
        ("forget", None),
    ]


# A rank kept messages while it reduced gradients with its replica, whose pipeline could wait for
# them: the soak with replicas hung.
def test_nothing_is_held_back_while_copies_of_a_stage_meet() -> None:
    notebook = Notebook()
    transport = FaultInjectingTransport(notebook, FaultInjection(reorders=True))
    transport.send(outgoing(0), NOTHING)
    assert notebook.calls == []
    transport.release_sends()
    assert notebook.calls == [("send", outgoing(0)), ("release", None)]


def test_send_that_fails_later_is_announced_and_delays_no_other() -> None:
    notebook = Notebook(refused=[outgoing(1)])
    transport = FaultInjectingTransport(notebook, FaultInjection(reorders=True))
    for number in range(3):
        transport.send(outgoing(number), NOTHING)
    with pytest.raises(BoundaryError, match="refused"):
        transport.receive(incoming(0))
    assert sorted(notebook.messages("send")) == [outgoing(0), outgoing(2)]
    assert notebook.messages("send failure") == [outgoing(1)]
    assert notebook.messages("receive") == []


@pytest.mark.parametrize("reorders", [False, True])
def test_silent_rank_never_sends_again(reorders: bool) -> None:
    notebook = Notebook()
    drop = Drop(rank=0, after=2, how="silence")
    transport = FaultInjectingTransport(notebook, FaultInjection(reorders=reorders, drop=drop))
    for step in range(2):
        transport.begin_step(b"")
        for number in range(3):
            transport.send(outgoing(3 * step + number), NOTHING)
        transport.end_step()
    transport.send_failure(outgoing(6))
    assert sorted(notebook.messages("send", "send failure")) == [outgoing(0), outgoing(1)]


def test_other_ranks_are_not_dropped() -> None:
    notebook = Notebook()
    drop = Drop(rank=1, after=0, how="silence")
    FaultInjectingTransport(notebook, FaultInjection(drop=drop)).send(outgoing(0), NOTHING)
    assert notebook.messages("send") == [outgoing(0)]


LOST = """
from penstock.ranks.fault_injection import Drop, FaultInjectingTransport, FaultInjection
from tests.ranks.test_fault_injection import NOTHING, Notebook, outgoing

transport = FaultInjectingTransport(Notebook(), FaultInjection(drop=Drop(rank=0, after=1)))
for number in range(2):
    print("sends", number, flush=True)
    transport.send(outgoing(number), NOTHING)
print("goes on", flush=True)
"""


def test_dropped_rank_ends_at_once() -> None:
    result = run_forked(LOST)
    assert (result.returncode, result.stdout) == (75, "sends 0\nsends 1\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FaultInjection(delay_seconds=-1.0),
            "delay_seconds must be 0 or more (got -1.0)",
        ),
        (
            lambda: FaultInjection(delay_seconds=float("nan")),
            "delay_seconds must be 0 or more (got nan)",
        ),
        (
            lambda: FaultInjection(by_order=True, reorders=True),
            "messages that are matched by order must not overtake one another (got by_order and "
            "reorders); leave out one of them",
        ),
        (
            lambda: FaultInjectingTransport(LocalTransport(2), FaultInjection(by_order=True)),
            "by_order must be used with a process for each rank (got all ranks in one process); "
            "leave it out, or give every rank a process",
        ),
        (
            lambda: Drop(rank=0, after=-1),
            "rank and after must be 0 or more (got 0 and -1)",
        ),
        (
            lambda: Drop(rank=0, after=0, how="loudly"),  # type: ignore[arg-type]  # the error tested
            "how must be 'exit' or 'silence' (got 'loudly')",
        ),
        (
            lambda: FaultInjectingTransport(LocalTransport(2), FaultInjection(drop=Drop(1, 0))),
            "drop must be used with a process for each rank (got all ranks in one process); "
            "leave it out, or give every rank a process",
        ),
    ],
)
def test_invalid_faults_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == message


# The loss of a step, and its gradients by name.
Step = tuple[float | None, dict[str, list[float]]]


def train(
    schedule: Schedule,
    fault_injection: FaultInjection | None,
    group: dist.ProcessGroup | None = None,
) -> list[Step]:
    """Train three steps with two sizes of batch."""
    blocks = make_blocks(schedule.dataflow.num_parts)
    pipeline = Pipeline(
        [blocks[part] for part in schedule.dataflow.parts],
        schedule,
        loss=mean_loss,
        group=group,
        options=RunOptions(fault_injection=fault_injection),
    )
    run = pipeline.evaluate if schedule.is_forward_only else pipeline.step
    steps: list[Step] = []
    for rows in (schedule.microbatches, schedule.microbatches + 3, schedule.microbatches):
        batch, target = make_batch(rows)
        loss = run(batch, target=target).loss
        gradients = gradients_of(pipeline.named_parameters())
        steps.append((loss, {name: value.flatten().tolist() for name, value in gradients.items()}))
    return steps


@settings(max_examples=examples(30))
@given(schedule=schedules(max_ranks=4, max_microbatches=6), seed=st.integers(0, 1000))
def test_steps_are_bitwise_equal_under_any_faults(schedule: Schedule, seed: int) -> None:
    fault_injection = FaultInjection(seed, delay_seconds=1e-6, reorders=True)
    assert train(schedule, fault_injection) == train(schedule, None)


def train_both_ways(_rank: int, cases: Sequence[tuple[str, int]]) -> list[bool]:
    """Return whether steps with faults equal those without."""
    group = dist.group.WORLD
    is_same = []
    for name, seed in cases:
        schedule = build(name, ranks=4, microbatches=8)
        fault_injection = FaultInjection(seed, delay_seconds=1e-4, reorders=True)
        is_same.append(train(schedule, fault_injection, group) == train(schedule, None, group))
    return is_same


def test_processes_get_bitwise_equal_results_under_faults(
    four_processes: Processes,
) -> None:
    cases = [("GPipe", 0), ("InterleavedZeroBubble", 1), ("DualPipe", 2)]
    found = four_processes.run(train_both_ways, cases, seconds=300.0)
    assert found == [[True] * len(cases)] * 4

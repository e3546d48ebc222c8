"""Runs a lowered schedule: each row is bound once to what it will call, then a step is a loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from penstock.alive.progress_log import Log, NoLog, Note
from penstock.ir.actions import Action, Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.schedule import Schedule
from penstock.loss.contract import require_graph, require_number
from penstock.loss.weigher import Share, Weigher
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.ranks.transport import Message, Transport
from penstock.step.clocks import Clock, NoClock
from penstock.step.outputs import KeptOutput, keep_output
from penstock.step.stage import Stage
from penstock.tensors.packet import Packet

__all__ = [
    "Around",
    "Executor",
    "LossFunction",
    "Microbatches",
    "Results",
    "StepRecording",
    "order_for_one_process",
]

# What a user may put around every action of a kind: gets the action and what it would do.
Around: TypeAlias = Callable[[Action, Callable[[], None]], None]
LossFunction: TypeAlias = Callable[..., torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A step's batch as its stages take it, one item per microbatch."""

    args: Sequence[tuple[Any, ...]]
    kwargs: Mapping[int, Sequence[dict[str, Any]]]
    targets: Sequence[Any]
    weigher: Weigher
    row_weights: Sequence[float]
    gradient_scale: float = 1.0
    keeps_outputs: bool = False


@dataclass(slots=True)
class Results:
    """What comes out of a step on this process.

    Losses come with their weights: those of the microbatches, and those that stages have added.
    """

    losses: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    outputs: dict[int, KeptOutput] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecording:
    """The rows that this process ran: when each started and ended, and the bytes in use then."""

    row: list[int]
    start: list[float]
    end: list[float]
    memory: list[float]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A row bound to what it does, with the messages from other ranks that it uses up."""

    row: int
    action: Action
    note: Note
    call: Callable[[], None]
    takes: list[Message]


def order_for_one_process(schedule: Schedule) -> list[int]:
    """All rows in an order in which one thread can run every rank."""
    graph = build_graph(schedule)
    ones, zeros = np.ones(len(schedule.rows)), np.zeros(len(graph.need))
    run = run_in_order(schedule.rows, graph, duration=ones, busy=ones, lag=zeros)
    order: list[int] = np.lexsort((np.arange(len(ones)), run.start)).tolist()
    return order


class Executor:
    """The rows of a lowered schedule that this process runs, bound to its stages.

    Whether gradients are recorded is the caller's to say.
    """

    def __init__(
        self,
        schedule: Schedule,
        rows: Iterable[int],
        stages: Mapping[int, Stage],
        transport: Transport,
        *,
        loss: LossFunction | None,
        around: Mapping[Kind, Around],
        log: Log | None = None,
    ) -> None:
        self._log = NoLog() if log is None else log
        self._schedule = schedule
        self._stages = stages
        self._transport = transport
        self._loss = loss
        self._is_training = not schedule.is_forward_only
        self._holder = schedule.placement.rank_of_stage
        self._edges = {edge: number for number, edge in enumerate(schedule.dataflow.edges)}
        # Made here and not yet taken: by a stage of the same rank, or by a send.
        self._held: dict[Message, Packet] = {}
        # What to note of each message from another rank while it is waited for.
        self._notes: dict[Message, Note] = {}
        self._clock: Clock = NoClock()
        self._started: Any = 0.0
        self._batch: Microbatches | None = None
        self._results = Results()
        self._program = [self._bind(row, schedule.rows.action(row), around) for row in rows]

    def run(self, batch: Microbatches, results: Results) -> None:
        """Run every action once."""
        with self._step(batch, results):
            for entry in self._program:
                self._call(entry)

    def abandon(self) -> None:
        """Run nothing, for there is no batch here, but let the other ranks get to the end."""
        if self._program:
            self._drain(self._program[0])

    def profile(
        self, batch: Microbatches, results: Results, name: Callable[[Action], str] = str
    ) -> None:
        """Run every action once, each visible in the profiler under its name."""
        with self._step(batch, results):
            for entry in self._program:
                with torch.profiler.record_function(name(entry.action)):
                    self._call(entry)

    def record(self, batch: Microbatches, results: Results, clock: Clock) -> StepRecording:
        """Run every action once and note when, each from the moment that its inputs were there."""
        recording = StepRecording([], [], [], [])
        marks: list[tuple[Any, Any]] = []
        self._clock = clock
        with self._step(batch, results):
            for entry in self._program:
                self._started = clock.mark()
                self._call(entry)
                marks.append((self._started, clock.mark()))
                recording.row.append(entry.row)
                recording.memory.append(clock.held_bytes())
        recording.start.extend(clock.seconds(start) for start, _ in marks)
        recording.end.extend(clock.seconds(end) for _, end in marks)
        return recording

    @contextmanager
    def _step(self, batch: Microbatches, results: Results) -> Iterator[None]:
        self._batch, self._results = batch, results
        try:
            yield
        finally:
            self._batch, self._results, self._clock = None, Results(), NoClock()
            self._held.clear()

    def _call(self, entry: _Entry) -> None:
        self._log.start(entry.note)
        try:
            entry.call()
        except LinkLostError:
            raise
        except Exception as error:
            failure = StepFailedError(self._place(entry.action), error)
            self._log.fail(str(failure))
            self._drain(entry)
            raise failure from error
        self._log.end()

    def _place(self, action: Action) -> str:
        place = f"rank {self._holder[action.stage]}, stage {action.stage}"
        if action.microbatch is not None:
            place += f", microbatch {action.microbatch}"
        return f"{place}, {action}"

    def _drain(self, failed: _Entry) -> None:
        """Keep the other ranks going: do the communication of what is left, without the work."""
        try:
            for entry in self._program[self._program.index(failed) :]:
                self._pass_over(entry)
        except LinkLostError:
            raise
        except Exception as error:
            # Others would wait for messages that are not brought to an end.
            raise LinkLostError(f"a failed step could not be ended: {error}") from error

    def _pass_over(self, entry: _Entry) -> None:
        for message in entry.takes:
            self._transport.discard(message)
        if entry.action.kind in (Kind.RECV_F, Kind.RECV_B):
            self._transport.post_receive(self.message_of(entry.action))
        elif entry.action.kind in (Kind.SEND_F, Kind.SEND_B):
            self._send_what_there_is(self.message_of(entry.action))

    def _send_what_there_is(self, message: Message) -> None:
        if message not in self._held:
            self._transport.send_failure(message)
            return
        try:
            self._transport.send(message, self._held.pop(message))
        except LinkLostError:
            raise
        except Exception:
            # The step has failed already, and the error that came first is the one to raise.
            self._transport.send_failure(message)

    def _bind(self, row: int, action: Action, around: Mapping[Kind, Around]) -> _Entry:
        call = self._find_call(action)
        takes = [m for m in self.takes(action) if m.source != m.destination]
        self._notes.update((message, self._note_of(message)) for message in takes)
        is_send = action.kind in (Kind.SEND_F, Kind.SEND_B)
        note = Note.of(action, self.message_of(action).destination if is_send else None)
        if action.kind in around:
            call = partial(around[action.kind], action, call)
        return _Entry(row, action, note, call, takes)

    def takes(self, action: Action) -> list[Message]:
        """Return the messages that an action uses up, also those from stages of its own rank."""
        flow, stage, microbatch = self._schedule.dataflow, action.stage, action.microbatch or 0
        match action.kind:
            case Kind.FORWARD:
                producers = flow.producers(stage)
                return [self._message(True, p, stage, microbatch) for p in producers]
            case Kind.FULL_BACKWARD | Kind.BACKWARD_INPUT:
                consumers = flow.consumers(stage)
                return [self._message(False, stage, c, microbatch) for c in consumers]
            case _:
                return []

    def _find_call(self, action: Action) -> Callable[[], None]:
        stage, microbatch = self._stages[action.stage], action.microbatch or 0
        match action.kind:
            case Kind.FORWARD:
                return self._bind_forward(stage, microbatch)
            case Kind.FULL_BACKWARD:
                return self._bind_backward(stage.backward, stage, microbatch)
            case Kind.BACKWARD_INPUT:
                return self._bind_backward(stage.backward_input, stage, microbatch)
            case Kind.BACKWARD_WEIGHT:
                return lambda: stage.backward_weight(microbatch)
            case Kind.SEND_F | Kind.SEND_B:
                return self._bind_send(action)
            case Kind.RECV_F | Kind.RECV_B:
                return self._bind_receive(action)
            case Kind.UNSHARD:
                return stage.replica.unshard
            case Kind.RESHARD:
                return stage.replica.reshard
            case Kind.REDUCE_GRAD:
                return stage.replica.reduce_gradients

    def _bind_forward(self, stage: Stage, microbatch: int) -> Callable[[], None]:
        flow = self._schedule.dataflow
        incoming = self.takes(Action(Kind.FORWARD, stage.index, microbatch))
        outgoing = [
            self._message(True, stage.index, consumer, microbatch)
            for consumer in flow.consumers(stage.index)
        ]
        fed = [flow.parts[consumer] for consumer in flow.consumers(stage.index)]
        run = self._train if self._is_training else self._evaluate

        def forward() -> None:
            batch = self._current()
            received = [self.take(message) for message in incoming]
            self._started = self._clock.mark()
            args = () if incoming else batch.args[microbatch]
            kwargs = batch.kwargs[stage.index][microbatch]
            with nullcontext() if outgoing else batch.weigher.watch_stage(stage.module):
                output = run(stage, microbatch, received, args, kwargs)
            if outgoing:
                packets = stage.depart(microbatch, output, fed)
                self._held.update(zip(outgoing, packets, strict=True))
            else:
                self._finish(stage, microbatch, output)

        return forward

    def _train(
        self,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        batch = self._current()
        output, added = stage.forward(microbatch, received, args, kwargs)
        weight = batch.row_weights[microbatch]
        for loss in added:
            stage.add_root(microbatch, loss, weight * batch.gradient_scale)
            self._results.losses.append((_keep_loss(loss), weight))
        return output

    def _evaluate(
        self,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return stage.evaluate(microbatch, received, args, kwargs)

    def _finish(self, stage: Stage, microbatch: int, output: Any) -> None:
        """At the end of the model: the loss, and the output if it is asked for."""
        batch = self._current()
        loss: torch.Tensor | None = None
        share = Share(batch.row_weights[microbatch])
        if self._loss is not None and batch.targets:
            before = stage.mark_gradients(microbatch) if self._is_training else None
            target = batch.targets[microbatch]
            loss = batch.weigher.make_loss(self._loss, microbatch, output, target)
            stage.compare_gradients(microbatch, before)
            # A model that makes its own loss makes none where it is given no labels.
            if loss is not None or self._is_training or batch.targets[microbatch] is not None:
                share = self._take_loss(stage, microbatch, require_number(loss), output)
        if batch.keeps_outputs:
            self._results.outputs[microbatch] = keep_output(output, loss, share)

    def _take_loss(self, stage: Stage, microbatch: int, loss: torch.Tensor, output: Any) -> Share:
        batch = self._current()
        share = batch.weigher.weigh(microbatch, loss)
        # A mean over nothing is not a number, and counts for nothing.
        if share.weight == 0:
            return share
        if self._is_training:
            require_graph(loss, output, stage.module)
            stage.add_root(microbatch, loss, share.weight * batch.gradient_scale)
        self._results.losses.append((_keep_loss(loss), share.weight))
        for part in share.parts:
            self._results.losses.append((part.value, part.weight))
            if part.edge is not None and self._is_training:
                weight = part.weight * batch.gradient_scale
                stage.add_root(microbatch, part.value, weight, part.edge)
        return share

    def _bind_backward(
        self,
        run: Callable[[int, Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]],
        stage: Stage,
        microbatch: int,
    ) -> Callable[[], None]:
        flow = self._schedule.dataflow
        incoming = self.takes(Action(Kind.FULL_BACKWARD, stage.index, microbatch))
        outgoing = [
            self._message(False, producer, stage.index, microbatch)
            for producer in flow.producers(stage.index)
        ]

        def backward() -> None:
            gradients = [self.take(message).tensors for message in incoming]
            self._started = self._clock.mark()
            answers = run(microbatch, gradients)
            for message, tensors in zip(outgoing, answers, strict=True):
                self._held[message] = Packet("", tensors)

        return backward

    def _bind_send(self, action: Action) -> Callable[[], None]:
        message = self.message_of(action)
        return lambda: self._transport.send(message, self._held.pop(message))

    def _bind_receive(self, action: Action) -> Callable[[], None]:
        message = self.message_of(action)
        return lambda: self._transport.post_receive(message)

    def hold(self, message: Message, packet: Packet) -> None:
        """Keep what its send, or a stage of the same rank, will take."""
        self._held[message] = packet

    def take(self, message: Message) -> Packet:
        """Wait for a message, and take it."""
        if message.source == message.destination:
            return self._held.pop(message)
        self._log.wait(self._notes[message])
        packet = self._transport.receive(message)
        self._log.arrived()
        return packet

    def _note_of(self, message: Message) -> Note:
        """A message from another rank as the receive of it."""
        producer, consumer = self._schedule.dataflow.edges[message.edge]
        if message.is_forward:
            receive = Action(Kind.RECV_F, consumer, message.microbatch, producer)
        else:
            receive = Action(Kind.RECV_B, producer, message.microbatch, consumer)
        return Note.of(receive, message.source)

    def message_of(self, action: Action) -> Message:
        """Return the message that a send or a receive is for."""
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        ends = (action.stage, action.peer or 0)
        producer, consumer = min(ends), max(ends)
        return self._message(is_forward, producer, consumer, action.microbatch or 0)

    def _message(self, is_forward: bool, producer: int, consumer: int, microbatch: int) -> Message:
        source, destination = self._holder[producer], self._holder[consumer]
        if not is_forward:
            source, destination = destination, source
        edge = self._edges[producer, consumer]
        return Message(is_forward, edge, microbatch, source, destination)

    def _current(self) -> Microbatches:
        assert self._batch is not None, "no step is running"
        return self._batch


def _keep_loss(loss: torch.Tensor) -> torch.Tensor:
    """A copy: a loss may be a number at the head of a buffer as large as the output."""
    return loss.detach().clone()

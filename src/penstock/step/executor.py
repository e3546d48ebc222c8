"""Run a lowered schedule: every row is bound to its call once, and a step is a loop over calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.alive.progress_log import Log, NoLog, Note
from penstock.ir.actions import Action, Kind
from penstock.ir.clock import run_in_order
from penstock.ir.graph import build_graph
from penstock.ir.schedule import Schedule
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.ranks.transport import Message, Transport
from penstock.step.clocks import Clock, NoClock
from penstock.step.messages import StepMessages
from penstock.step.model_end import ModelEnd, keep_loss
from penstock.step.stage import Stage
from penstock.step.step_data import Around, LossFunction, Microbatches, Results, StepRecording
from penstock.tensors.packet import Packet

__all__ = ["Executor", "order_for_one_process"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A row with its call, and the messages from other ranks that the call uses up."""

    row: int
    action: Action
    note: Note
    call: Callable[[], None]
    takes: list[Message]


def order_for_one_process(schedule: Schedule) -> list[int]:
    """Return all rows in an order in which one thread can run every rank."""
    graph = build_graph(schedule)
    ones, zeros = np.ones(len(schedule.rows)), np.zeros(len(graph.need))
    run = run_in_order(schedule.rows, graph, duration=ones, busy=ones, lag=zeros)
    order: list[int] = np.lexsort((np.arange(len(ones)), run.start)).tolist()
    return order


class Executor:
    """The rows of a lowered schedule that this process runs, bound to its stages.

    The caller decides whether gradients are recorded. `messages` has the messages of its actions.
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
        self._end = ModelEnd(loss, is_training=not schedule.is_forward_only)
        self.messages = StepMessages(schedule)
        # Packets made here that neither a send nor a stage of the same rank has taken yet.
        self._held: dict[Message, Packet] = {}
        # For each message from another rank, the note while it is awaited.
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
        """Skip a step without a batch on this rank, and let the other ranks finish theirs."""
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
        """Run every action once and record when; the time waiting for inputs does not count."""
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
        rank = self._schedule.placement.rank_of_stage[action.stage]
        place = f"rank {rank}, stage {action.stage}"
        if action.microbatch is not None:
            place += f", microbatch {action.microbatch}"
        return f"{place}, {action}"

    def _drain(self, failed: _Entry) -> None:
        """Do the communication that is left, without the work, so that other ranks can finish."""
        try:
            for entry in self._program[self._program.index(failed) :]:
                self._skip(entry)
        except LinkLostError:
            raise
        except Exception as error:
            # Others may wait for messages that will never be complete.
            raise LinkLostError(
                f"the communication of a failed step could not be completed: {error}"
            ) from error

    def _skip(self, entry: _Entry) -> None:
        for message in entry.takes:
            self._transport.discard(message)
        if entry.action.kind in (Kind.RECV_F, Kind.RECV_B):
            self._transport.post_receive(self.messages.of(entry.action))
        elif entry.action.kind in (Kind.SEND_F, Kind.SEND_B):
            self._send_if_made(self.messages.of(entry.action))

    def _send_if_made(self, message: Message) -> None:
        if message not in self._held:
            self._transport.send_failure(message)
            return
        try:
            self._transport.send(message, self._held.pop(message))
        except LinkLostError:
            raise
        except Exception:
            # The step has failed already; the first error is the one to raise.
            self._transport.send_failure(message)

    def _bind(self, row: int, action: Action, around: Mapping[Kind, Around]) -> _Entry:
        call = self._find_call(action)
        takes = [m for m in self.messages.used_by(action) if m.source != m.destination]
        self._notes.update((message, self.messages.note_of(message)) for message in takes)
        is_send = action.kind in (Kind.SEND_F, Kind.SEND_B)
        note = Note.of(action, self.messages.of(action).destination if is_send else None)
        if action.kind in around:
            call = partial(around[action.kind], action, call)
        return _Entry(row, action, note, call, takes)

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
        action = Action(Kind.FORWARD, stage.index, microbatch)
        incoming, outgoing = self.messages.used_by(action), self.messages.made_by(action)
        fed = [flow.parts[consumer] for consumer in flow.consumers(stage.index)]
        run = self._train if self._end.is_training else self._evaluate

        def forward() -> None:
            batch = self._current()
            received = [self.take(message) for message in incoming]
            self._started = self._clock.mark()
            args = () if incoming else batch.args[microbatch]
            kwargs = batch.kwargs[stage.index][microbatch]
            with nullcontext() if outgoing else batch.weigher.observe_stage(stage.module):
                output = run(stage, microbatch, received, args, kwargs)
            if outgoing:
                packets = stage.depart(microbatch, output, fed)
                self._held.update(zip(outgoing, packets, strict=True))
            else:
                self._end.finish(batch, self._results, stage, microbatch, output)

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
            self._results.losses.append((keep_loss(loss), weight))
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

    def _bind_backward(
        self,
        run: Callable[[int, Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]],
        stage: Stage,
        microbatch: int,
    ) -> Callable[[], None]:
        action = Action(Kind.FULL_BACKWARD, stage.index, microbatch)
        incoming, outgoing = self.messages.used_by(action), self.messages.made_by(action)

        def backward() -> None:
            gradients = [self.take(message).tensors for message in incoming]
            self._started = self._clock.mark()
            answers = run(microbatch, gradients)
            for message, tensors in zip(outgoing, answers, strict=True):
                self._held[message] = Packet("", tensors)

        return backward

    def _bind_send(self, action: Action) -> Callable[[], None]:
        message = self.messages.of(action)
        return lambda: self._transport.send(message, self._held.pop(message))

    def _bind_receive(self, action: Action) -> Callable[[], None]:
        message = self.messages.of(action)
        return lambda: self._transport.post_receive(message)

    def hold(self, message: Message, packet: Packet) -> None:
        """Keep a packet until its send, or a stage of the same rank, takes it."""
        self._held[message] = packet

    def take(self, message: Message) -> Packet:
        """Wait for a message and return its packet."""
        if message.source == message.destination:
            return self._held.pop(message)
        self._log.wait(self._notes[message])
        packet = self._transport.receive(message)
        self._log.arrived()
        return packet

    def _current(self) -> Microbatches:
        assert self._batch is not None, "no step is running"
        return self._batch

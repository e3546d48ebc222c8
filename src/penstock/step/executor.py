"""Run a lowered schedule: every row is bound to its call once, and a step is a loop over calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from penstock.alive.progress_log import Log, NoLog, Note
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.loss.weigher import KnownWeights
from penstock.ranks.faults import LinkLostError, StepFailedError
from penstock.ranks.transport import Message, Transport
from penstock.step.clocks import Clock, StepRecorder
from penstock.step.model_end import ModelEnd, keep_loss
from penstock.step.overlap.by_turns import MemberError
from penstock.step.overlap.overlaps import Overlaps
from penstock.step.overlap.turning import without_turns
from penstock.step.program.draining import drain
from penstock.step.program.entries import BoundRow, join_overlapped
from penstock.step.program.messages import StepMessages
from penstock.step.saved.actions import Run, SavedActions
from penstock.step.stage import Stage
from penstock.step.step_data import Around, LossFunction, Microbatches, Results, StepRecording
from penstock.tensors.packet import Packet

__all__ = ["Executor"]

# The batch while no step is running.
_NOTHING = Microbatches((), {}, (), KnownWeights(()), ())


def _call(entry: BoundRow) -> None:
    entry.call()


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
        overlaps: Overlaps,
        log: Log | None = None,
    ) -> None:
        self._overlaps = overlaps
        self._log = NoLog() if log is None else log
        self._schedule = schedule
        self._stages = stages
        self._transport = transport
        self._end = ModelEnd(loss, is_training=not schedule.is_forward_only)
        self.saved = SavedActions(schedule, stages, self._finish)
        self.messages = StepMessages(schedule)
        # Packets made here that neither a send nor a stage of the same rank has taken yet.
        self._held: dict[Message, Packet] = {}
        # For each message from another rank, the note while it is awaited.
        self._notes: dict[Message, Note] = {}
        # Marks when the actions of a recorded step begin their work.
        self._recorder: StepRecorder | None = None
        self._batch = _NOTHING
        self._results = Results()
        self._program = [self._bind(row, schedule.rows.action(row), around) for row in rows]
        joined = schedule.rows.joined
        self._units = list(join_overlapped(self._program, joined, self._as_one))
        self._work = [entry for entry in self._units if not self._is_idle(entry, around)]

    def run(self, batch: Microbatches, results: Results) -> None:
        """Run every action once; those that have nothing to do here are left out."""
        log = self._log
        begin = log.start
        with self._step(batch, results):
            for entry in self._work:
                begin(entry.note)
                try:
                    entry.call()
                except Exception as error:
                    self._fail(entry, error)
                begin = log.follow
            log.end()

    def abandon(self) -> None:
        """Skip a step without a batch on this rank, and let the other ranks finish theirs."""
        if self._program:
            self._drain(0)

    def profile(
        self, batch: Microbatches, results: Results, name: Callable[[Action], str] = str
    ) -> None:
        """Run every action once, each visible in the profiler under its name."""

        def profiled(entry: BoundRow) -> None:
            with torch.profiler.record_function(name(entry.action)):
                entry.call()

        with self._step(batch, results):
            for entry in self._units:
                self._call(entry, profiled)

    def record(self, batch: Microbatches, results: Results, clock: Clock) -> StepRecording:
        """Run every action once and record when; the time waiting for inputs does not count."""
        recorder = StepRecorder(clock)

        def recorded(entry: BoundRow) -> None:
            recorder.start()
            entry.call()
            recorder.end(entry.row)

        self._transport.watch_sends(recorder.note_sent)
        try:
            with self._step(batch, results, recorder):
                for entry in self._units:
                    self._call(entry, recorded)
        finally:
            self._transport.watch_sends(None)
        return recorder.finish()

    @contextmanager
    def _step(
        self, batch: Microbatches, results: Results, recorder: StepRecorder | None = None
    ) -> Iterator[None]:
        self._batch, self._results, self._recorder = batch, results, recorder
        try:
            yield
        finally:
            self._batch, self._results, self._recorder = _NOTHING, Results(), None
            self._held.clear()
            self.saved.clear()

    def _call(self, entry: BoundRow, do: Callable[[BoundRow], None]) -> None:
        self._log.start(entry.note)
        try:
            if entry.members:
                self._run_together(entry.members, do)
            else:
                do(entry)
        except Exception as error:
            self._fail(entry, error)
        self._log.end()

    def _fail(self, entry: BoundRow, error: Exception) -> NoReturn:
        """Let the other ranks finish the step, and raise where this one failed."""
        if isinstance(error, MemberError):
            entry, error = entry.members[error.number], error.error
        if isinstance(error, LinkLostError):
            raise error
        failure = StepFailedError(self._place(entry.action), error)
        self._log.fail(str(failure))
        self._drain(self._program.index(entry))
        raise failure from error

    def _is_idle(self, entry: BoundRow, around: Mapping[Kind, Around]) -> bool:
        """Whether an action concerns data parallelism, which its stage does not have."""
        kind, stage = entry.action.kind, self._stages[entry.action.stage]
        is_parallel = kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
        return is_parallel and kind not in around and stage.replica.is_alone

    def _place(self, action: Action) -> str:
        rank = self._schedule.placement.rank_of_stage[action.stage]
        number = "" if action.microbatch is None else f", microbatch {action.microbatch}"
        return f"rank {rank}, stage {action.stage}{number}, {action}"

    def _drain(self, first: int) -> None:
        """Do the communication that is left, without the work, so that other ranks can finish."""
        left = [(e.action, e.takes) for e in self._program[first:]]
        drain(left, self._transport, self.messages, self._held)

    def _as_one(self, group: Sequence[BoundRow]) -> BoundRow:
        members = tuple(group)
        call = partial(self._run_together, members, _call)
        return replace(members[0], call=call, members=members)

    def _run_together(self, members: Sequence[BoundRow], do: Callable[[BoundRow], None]) -> None:
        """Run overlapped actions; they are noted one after the other, as they begin."""

        def begin(entry: BoundRow) -> None:
            if entry is not members[0]:
                self._log.follow(entry.note)
            do(entry)

        actions = [entry.action for entry in members]
        stages = [self._stages[action.stage] for action in actions]
        self._overlaps.run(actions, stages, [partial(begin, entry) for entry in members])

    def _bind(self, row: int, action: Action, around: Mapping[Kind, Around]) -> BoundRow:
        call = self._find_call(action)
        takes = [m for m in self.messages.used_by(action) if m.source != m.destination]
        self._notes.update((message, self.messages.note_of(message)) for message in takes)
        is_send = action.kind in (Kind.SEND_F, Kind.SEND_B)
        note = Note.of(action, self.messages.of(action).destination if is_send else None)
        if action.kind in around:
            call = partial(around[action.kind], action, call)
        return BoundRow(row, action, note, call, takes)

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
                message, held, send = self.messages.of(action), self._held, self._transport.send
                return lambda: send(message, held.pop(message))
            case Kind.RECV_F | Kind.RECV_B:
                return partial(self._transport.post_receive, self.messages.of(action))
            case Kind.UNSHARD:
                return partial(self._meet, stage.replica.unshard)
            case Kind.RESHARD:
                return stage.replica.reshard
            case Kind.REDUCE_GRAD:
                return partial(self._meet, stage.replica.reduce_gradients)
            case Kind.RECOMPUTE | Kind.OFFLOAD | Kind.RELOAD:
                return self.saved.find_call(action)

    def _meet(self, work: Callable[[], None]) -> None:
        """Do what waits for other copies of a stage, beside the transport."""
        self._transport.release_sends()
        work()

    def _bind_forward(self, stage: Stage, microbatch: int) -> Callable[[], None]:
        action = Action(Kind.FORWARD, stage.index, microbatch)
        takes = [self._bind_take(message) for message in self.messages.used_by(action)]
        outgoing = self.messages.made_by(action)
        run: Run = self._train if self._end.is_training else self._evaluate
        run = self.saved.find_run((stage.index, microbatch), run)
        if not outgoing:
            return self._bind_last_forward(stage, microbatch, takes, run)
        flow, held, index = self._schedule.dataflow, self._held, stage.index
        fed = [flow.parts[consumer] for consumer in flow.consumers(index)]

        def forward() -> None:
            batch, received = self._batch, [take() for take in takes]
            if self._recorder is not None:
                self._recorder.start()
            args = () if takes else batch.args[microbatch]
            output = run(batch, stage, microbatch, received, args)
            held.update(zip(outgoing, stage.depart(microbatch, output, fed), strict=True))

        return self.saved.follow((stage.index, microbatch), forward)

    def _bind_last_forward(
        self, stage: Stage, microbatch: int, takes: Sequence[Callable[[], Packet]], run: Run
    ) -> Callable[[], None]:
        is_recomputed = self.saved.is_recomputed((stage.index, microbatch))

        def forward() -> None:
            batch, received = self._batch, [take() for take in takes]
            if self._recorder is not None:
                self._recorder.start()
            args = () if takes else batch.args[microbatch]
            if is_recomputed:
                run(batch, stage, microbatch, received, args)
                return
            with batch.weigher.observe_stage(stage.module) or nullcontext():
                output = run(batch, stage, microbatch, received, args)
            self._finish(stage, microbatch, output)

        return self.saved.follow((stage.index, microbatch), forward)

    def _finish(self, stage: Stage, microbatch: int, output: Any) -> None:
        # A loss may put gradients away while it takes its own; no other action may add to them.
        with without_turns():
            self._end.finish(self._batch, self._results, stage, microbatch, output)

    def _train(
        self,
        batch: Microbatches,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
    ) -> Any:
        kwargs = batch.kwargs[stage.index][microbatch]
        output, added = stage.forward(microbatch, received, args, kwargs)
        if added:
            weight = batch.row_weights[microbatch]
            for loss in added:
                stage.add_root(microbatch, loss, weight * batch.gradient_scale)
                self._results.losses.append((keep_loss(loss), weight))
        return output

    def _evaluate(
        self,
        batch: Microbatches,
        stage: Stage,
        microbatch: int,
        received: Sequence[Packet],
        args: tuple[Any, ...],
    ) -> Any:
        kwargs, flow = batch.kwargs[stage.index][microbatch], self._schedule.dataflow
        with_graph = batch.weigher.needs_graph and not flow.consumers(stage.index)
        return stage.evaluate(microbatch, received, args, kwargs, with_graph=with_graph)

    def _bind_backward(
        self,
        run: Callable[[int, Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]],
        stage: Stage,
        microbatch: int,
    ) -> Callable[[], None]:
        action = Action(Kind.FULL_BACKWARD, stage.index, microbatch)
        takes = [self._bind_take(message) for message in self.messages.used_by(action)]
        outgoing, held = self.messages.made_by(action), self._held

        def backward() -> None:
            gradients = [take().tensors for take in takes]
            if self._recorder is not None:
                self._recorder.start()
            answers = run(microbatch, gradients)
            for message, tensors in zip(outgoing, answers, strict=True):
                held[message] = Packet("", tensors)

        return self.saved.precede((stage.index, microbatch), backward)

    def _bind_take(self, message: Message) -> Callable[[], Packet]:
        """Return a call that waits for a message and returns its packet."""
        if message.source == message.destination:
            return partial(self._held.pop, message)
        return partial(self.take, message)

    def hold(self, message: Message, packet: Packet) -> None:
        """Keep a packet until its send, or a stage of the same rank, takes it."""
        self._held[message] = packet

    def take(self, message: Message) -> Packet:
        """Wait for a message and return its packet."""
        if message.source == message.destination:
            return self._held.pop(message)
        recorder, receive = self._recorder, self._transport.receive
        self._log.wait(self._notes[message])
        # Nothing else may use the transport before it has returned.
        with without_turns():
            packet = receive(message) if recorder is None else recorder.wait(message, receive)
        self._log.arrived()
        return packet

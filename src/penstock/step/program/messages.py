"""The messages that the actions of a schedule send, receive and use up."""

from penstock.alive.progress_log import Note
from penstock.ir.actions import Action, Kind
from penstock.ir.schedule import Schedule
from penstock.ranks.transport import Message

__all__ = ["StepMessages"]


class StepMessages:
    """The messages of one step of a schedule, found by action."""

    def __init__(self, schedule: Schedule) -> None:
        self._flow = schedule.dataflow
        self._holder = schedule.placement.rank_of_stage
        self._edges = {edge: number for number, edge in enumerate(self._flow.edges)}

    def of(self, action: Action) -> Message:
        """Return the message of a send or a receive."""
        is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        ends = (action.stage, action.peer or 0)
        producer, consumer = min(ends), max(ends)
        return self._message(is_forward, producer, consumer, action.microbatch or 0)

    def used_by(self, action: Action) -> list[Message]:
        """Return the messages that an action uses up, also those from stages of its own rank."""
        stage, microbatch = action.stage, action.microbatch or 0
        match action.kind:
            case Kind.FORWARD:
                producers = self._flow.producers(stage)
                return [self._message(True, p, stage, microbatch) for p in producers]
            case Kind.FULL_BACKWARD | Kind.BACKWARD_INPUT:
                consumers = self._flow.consumers(stage)
                return [self._message(False, stage, c, microbatch) for c in consumers]
            case _:
                return []

    def made_by(self, action: Action) -> list[Message]:
        """Return the messages that an action makes, also those to stages of its own rank."""
        stage, microbatch = action.stage, action.microbatch or 0
        match action.kind:
            case Kind.FORWARD:
                consumers = self._flow.consumers(stage)
                return [self._message(True, stage, c, microbatch) for c in consumers]
            case Kind.FULL_BACKWARD | Kind.BACKWARD_INPUT:
                producers = self._flow.producers(stage)
                return [self._message(False, p, stage, microbatch) for p in producers]
            case _:
                return []

    def note_of(self, message: Message) -> Note:
        """Return the note for the progress log while a message from another rank is awaited."""
        producer, consumer = self._flow.edges[message.edge]
        if message.is_forward:
            receive = Action(Kind.RECV_F, consumer, message.microbatch, producer)
        else:
            receive = Action(Kind.RECV_B, producer, message.microbatch, consumer)
        return Note.of(receive, message.source)

    def _message(self, is_forward: bool, producer: int, consumer: int, microbatch: int) -> Message:
        source, destination = self._holder[producer], self._holder[consumer]
        if not is_forward:
            source, destination = destination, source
        edge = self._edges[producer, consumer]
        return Message(is_forward, edge, microbatch, source, destination)

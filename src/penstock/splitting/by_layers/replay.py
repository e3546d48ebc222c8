"""One run of the model's own forward on one stage.

    stage 1 of 3:   embed_tokens   layers.0   layers.1   layers.2   layers.3   norm
                    stand-in       received   runs       runs       stop

Calls of units that earlier stages hold are answered from what these stages sent and noted. The
first call of a unit that a later stage holds ends the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.ir.dataflow import Routed
from penstock.splitting.by_layers.example.changed_attributes import changed_names
from penstock.splitting.by_layers.example.side_outputs import SideOutputs, SideOutputWatch
from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.splitting.by_layers.hooks.inner_values import (
    Observed,
    observe,
    seen_by_hooks,
    version_of,
)
from penstock.splitting.by_layers.hooks.rebinding import StageHooks
from penstock.splitting.by_layers.notes import (
    INPUTS,
    Note,
    Side,
    Value,
    describe,
    describe_inputs,
    describe_side,
    read_notes,
    read_sides,
    rebuild,
    rebuild_side,
    write_notes,
)
from penstock.splitting.by_layers.reentrant import is_in_reentrant_checkpoint, refuse_reentrant
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stand_ins import ADVICE, StandIn
from penstock.torch_private import tree_leaves

__all__ = ["Departure", "Replay"]


class Departure(BaseException):  # no error: the way out of the user's code
    """Ends a run, through whatever the model's code would catch."""


class Replay:
    """What a stage knows while it runs the model's forward, and what it has to tell afterwards."""

    def __init__(
        self,
        index: int,
        itinerary: LayerRoutes,
        own: Sequence[str],
        inputs: Sequence[str],
        hooks: StageHooks | None = None,
    ) -> None:
        self.index = index
        self.is_running = False
        self.hooks = StageHooks() if hooks is None else hooks
        # Called when a unit of this stage begins, to see which hooks it has by now.
        self.attend: Callable[[str], None] = _ignore
        self.look_at: Callable[[str], dict[str, Any]] = _see_nothing
        # Plain attributes of units that their calls change, by path.
        self.changed: dict[str, tuple[str, ...]] = dict(itinerary.changed)
        # Where the stage is and what its dtype has become, once it is not as it was built.
        self.moved: tuple[torch.device, Mapping[torch.dtype, torch.dtype]] | None = None
        self._itinerary = itinerary
        self._own_layers = own
        self._inputs = inputs
        self._consumers = itinerary.dataflow().consumers(index)
        self._stops: dict[Value, int | None] = {}
        self._is_proven = not itinerary.is_guessed
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """All but who watches the modules, since those of a copy are others."""
        return {**vars(self), "attend": _ignore, "look_at": _see_nothing}

    def _clear(self) -> None:
        self._calls: Counter[str] = Counter()
        self._depth = 0
        self._inside: str | None = None
        self._observed: list[Observed] = []
        self._before: dict[str, Any] = {}
        self._side_calls: Counter[str] = Counter()
        self._leaks: SideOutputs | None = None
        self._earlier = ""
        self._answers: dict[tuple[str, int], Note] = {}
        self._sides: Mapping[tuple[str, int], tuple[Side, ...]] = {}
        self._received: dict[Value, torch.Tensor] = {}
        self._outgoing: dict[int, dict[Value, torch.Tensor]] = {c: {} for c in self._consumers}
        # What each tensor that is sent has been written to when it was kept.
        self._versions: dict[Value, int] = {}
        self._added: list[Note] = []
        self._added_sides: list[Side] = []
        self._device = torch.device("cpu")
        self._has_gradients = False
        # Units whose outputs were made without a history.
        self._unsure: set[str] = set()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """From the moment that the inputs are there to the parcels for the next stages."""
        self.is_running, self._device = True, device
        self._has_gradients = torch.is_grad_enabled() and self._itinerary.num_stages > 1
        try:
            with self._watch_first_run():
                yield
        finally:
            self.is_running = False
            self._clear()

    def _watch_first_run(self) -> AbstractContextManager[object]:
        """See once whether units keep to what they return; with an example, that is known."""
        if self._is_proven:
            return nullcontext()
        self._is_proven, self._leaks = True, SideOutputs()
        return SideOutputWatch(self._leaks, lambda: self._inside)

    @property
    def is_watched(self) -> bool:
        """Whether every operation of this run is looked at."""
        return self._leaks is not None

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """On the first stage: the model's inputs."""
        self._note(*describe_inputs(self._inputs, args, kwargs))

    def unpack(self, parcels: Sequence[dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """On any other stage: what came, and the model's inputs among it."""
        for parcel in parcels:
            entries, sent, changed = read_notes(parcel["notes"])
            self.changed.update(changed)
            self._received.update(zip(sent, parcel["values"], strict=True))
            if entries:
                self._earlier, self._answers = parcel["notes"], entries
                self._sides = read_sides(parcel["notes"])
        for value, tensor in self._received.items():
            self._forward(value, tensor)
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = self._rebuild(INPUTS, 0)
        return inputs

    def answer(self, path: str) -> Any:
        """What a unit that this stage does not hold returns."""
        return self.answer_with_sides(path)[0]

    def answer_with_sides(self, path: str) -> tuple[Any, list[tuple[str, Any]]]:
        """What a unit of another stage returns, and what hooks inside of it see, by module."""
        call = self._count(path)
        if self._itinerary.stage(path, call) > self.index:
            raise Departure
        if self._is_without_history():
            raise refuse_reentrant(path)
        sides = self._sides.get((path, call), ())
        if not sides:
            return self._rebuild(path, call), []
        self._side_calls.update(side.module for side in sides)
        seen = [(s.module, rebuild_side(s, self._received, self._device)) for s in sides]
        return self._rebuild(path, call), seen

    def is_own_call(self, path: str) -> bool:
        """Whether the next call of a unit that several stages hold is for this one to make."""
        return bool(self._depth) or self._itinerary.stage(path, self._calls[path]) == self.index

    def enter(self, path: str, given: Any) -> None:
        """A unit of this stage is called; what it calls inside is its own business."""
        if not self._depth and self._itinerary.stage(path, self._calls[path]) > self.index:
            raise Departure
        if not self._depth:
            self._inside = path
            if self._consumers:
                self.attend(path)
            if self._leaks is not None:
                self._leaks.enter(given)
                self._before = self.look_at(path)
        self._depth += 1

    def observe(self, path: str, given: Given, output: Any) -> None:
        """A module has made something inside of a unit, and hooks are about to see it."""
        if self._inside is not None and f"{path}.".startswith(f"{self._inside}."):
            self._observed.append(observe(path, given, output))

    def _is_without_history(self) -> bool:
        """Whether what is made here leads back to nothing, though it is to be trained."""
        return self._has_gradients and not torch.is_grad_enabled() and is_in_reentrant_checkpoint()

    def leave(self, path: str, output: Any) -> None:
        """Note what a unit of this stage returned."""
        self._depth -= 1
        if not self._depth:
            self._inside = None
            observed, self._observed = seen_by_hooks(path, self._observed, output), []
            if self._leaks is not None:
                self._note_changes(path)
                self._leaks.forgive((output, [o.tree for o in observed if not o.is_written]))
            if self._is_without_history():
                self._unsure.add(path)
            call = self._count(path)
            entry, tensors = describe(path, call, output)
            self._note(entry, tensors)
            if observed:
                self._note_sides((path, call), observed, tensors)

    def _note_changes(self, path: str) -> None:
        """Note which attributes a call has changed; it is looked for in the first run."""
        names = changed_names(self._before, self.look_at(path))
        if names:
            self.changed[path] = tuple(dict.fromkeys((*self.changed.get(path, ()), *names)))

    def _note_sides(
        self,
        unit: tuple[str, int],
        observed: Sequence[Observed],
        returned: list[tuple[Value, torch.Tensor]],
    ) -> None:
        """Note what hooks saw inside of a unit, for stages that call them without it."""
        sent = (item for values in self._outgoing.values() for item in values.items())
        known = {id(tensor): value for value, tensor in (*self._received.items(), *sent)}
        known.update((id(tensor), value) for value, tensor in returned)
        for one in observed:
            number = self._side_calls[one.path]
            self._side_calls[one.path] += 1
            names = {} if one.is_written else known
            side, tensors = describe_side(unit, one.path, number, one.tree, names)
            self._added_sides.append(side)
            for value, tensor in () if one.is_written else tensors:
                self._forward(value, tensor)

    def pack(self) -> Routed:
        """A parcel for every stage that this one feeds."""
        self._require_own_calls()
        return Routed({stage: self._parcel(stage, sent) for stage, sent in self._outgoing.items()})

    def _parcel(self, stage: int, outgoing: dict[Value, torch.Tensor]) -> dict[str, Any]:
        sent = {v: tensor for v, tensor in outgoing.items() if self._is_unwritten(v, tensor)}
        for value, tensor in sent.items():
            # The checkpoint gives what it returns itself a history when it ends, and only that.
            is_lost = tensor.is_floating_point() and not tensor.requires_grad
            if is_lost and value.path in self._unsure:
                raise refuse_reentrant(value.path)
            self._require_real(tensor, f"stage {stage} needs what {value.path!r} returns, but it")
        if stage == self.index + 1:
            notes = write_notes(
                self._earlier,
                tuple(self._added),
                tuple(sent),
                tuple(self._added_sides),
                tuple(self.changed.items()),
            )
        else:
            notes = write_notes("", (), tuple(sent))
        return {"notes": notes, "values": list(sent.values())}

    def _is_unwritten(self, value: Value, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what it was; an input that is not may be sent to nobody.

        What was written to would be written to again, as later stages run the same code.
        """
        if version_of(tensor) == self._versions[value]:
            return True
        if value.path == INPUTS and self._itinerary.is_guessed:
            return False
        what = f"what {value.path!r} returns" if value.path else "an input of the model"
        advice = f", or {ADVICE}" if self._itinerary.is_guessed else ""
        raise ModelError(
            f"stage {self.index} sends {what} to another stage, but it was written to in place "
            f"meanwhile; write the result to a new tensor{advice}"
        )

    def check_output(self, output: Any) -> Any:
        """The model's output, if it is that of the whole model and nothing in it is a stand-in."""
        if self._consumers:
            raise ModelError(
                f"the model returned on stage {self.index}, before it called any module of stage "
                f"{self.index + 1}; {ADVICE}"
            )
        leaves = tree_leaves(output)
        for leaf in leaves:
            self._require_real(leaf, "the model's output")
        self._require_all_leaves(len(leaves))
        if self._leaks is not None:
            self._leaks.refuse(output, "the model returns")
        return output

    def _require_all_leaves(self, count: int) -> None:
        tree, expected = self._itinerary.outlines
        if self._answers and self._answers[INPUTS, 0].tree == tree and count != expected:
            raise ModelError(
                f"the model's output has {count} values, where that of the example had {expected};"
                " what is collected while layers run, as by output_hidden_states, is not on one "
                "stage, so leave it out"
            )

    def _require_real(self, tensor: object, what: str) -> None:
        if isinstance(tensor, StandIn):
            names = ", ".join(repr(name) for name in sorted(tensor.sources))
            raise ModelError(
                f"{what} depends on what {names} returned on an earlier stage, which was not sent "
                f"to stage {self.index}; {ADVICE}"
            )

    def _require_own_calls(self) -> None:
        missed = [path for path in self._own_layers if not self._calls[path]]
        if missed:
            raise ModelError(
                f"stage {self.index} holds {missed[0]!r}, but a later stage's module was called "
                f"before it; {ADVICE}"
            )

    def _count(self, path: str) -> int:
        call = self._calls[path]
        self._calls[path] += 1
        return call

    def _note(self, entry: Note, tensors: list[tuple[Value, torch.Tensor]]) -> None:
        self._added.append(entry)
        for value, tensor in tensors:
            self._forward(value, tensor)

    def _forward(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep a value that is to be sent on; the model itself decides how long others live."""
        if value not in self._stops:
            self._stops[value] = self._itinerary.next_stop(value, self.index)
        stop = self._stops[value]
        if stop is not None:
            # Code that writes to it is run by every stage, each on the value as it was.
            kept = tensor.clone() if value in self._itinerary.rewritten else tensor
            self._outgoing[stop][value] = kept
            self._versions[value] = version_of(kept)

    def _rebuild(self, path: str, call: int) -> Any:
        if (path, call) not in self._answers:
            raise ModelError(
                f"{path!r} is called {call + 1} times on stage {self.index}, but was not on the "
                f"stage that holds it; {ADVICE}"
            )
        return rebuild(self._answers[path, call], self._received, self._device)


def _ignore(_path: str) -> None:
    pass


def _see_nothing(_path: str) -> dict[str, Any]:
    return {}

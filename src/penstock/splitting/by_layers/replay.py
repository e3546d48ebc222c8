"""One run of the model's own forward on one stage.

    stage 1 of 3:   embed_tokens   layers.0   layers.1   layers.2   layers.3   norm
                    stand-in       received   runs       runs       ends here

A call of a unit on an earlier stage returns what that stage has sent or recorded. The first call
of a unit on a later stage ends the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from penstock.errors import ModelError
from penstock.ir.dataflow import Routed
from penstock.splitting.by_layers.example.changed_attributes import changed_names
from penstock.splitting.by_layers.example.side_outputs import SideOutputMode, SideOutputs
from penstock.splitting.by_layers.hooks.hooks import Given
from penstock.splitting.by_layers.hooks.inner_values import Observed, observe, seen_by_hooks
from penstock.splitting.by_layers.hooks.rebinding import StageHooks
from penstock.splitting.by_layers.outgoing import Outgoing
from penstock.splitting.by_layers.records.call_records import (
    INPUTS,
    CallRecord,
    HookRecord,
    Value,
    describe,
    describe_hook_call,
    describe_inputs,
    rebuild,
    rebuild_hook_call,
)
from penstock.splitting.by_layers.records.record_text import (
    read_hook_records,
    read_records,
    write_records,
)
from penstock.splitting.by_layers.records.shared_containers import (
    Contents,
    Returned,
    contents_of,
    look_into,
    returned_by,
    write_entries,
)
from penstock.splitting.by_layers.reentrant import is_in_reentrant_checkpoint, refuse_reentrant
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stand_ins import ADVICE, StandIn
from penstock.torch_private import tree_leaves

__all__ = ["EndOfStage", "Replay"]


class EndOfStage(BaseException):  # not an Exception, so that the model's code does not catch it
    """Ends the run of a stage from inside of the model's code."""


class Replay:
    """The state of a stage while it runs the model's forward: records, and values to send."""

    def __init__(
        self,
        index: int,
        routes: LayerRoutes,
        own: Sequence[str],
        inputs: Sequence[str],
        hooks: StageHooks | None = None,
    ) -> None:
        self.index = index
        self.is_running = False
        self.hooks = StageHooks() if hooks is None else hooks
        # Called when a unit of this stage begins, to find the hooks that it has by now.
        self.prepare_hooks: Callable[[str], None] = _ignore
        self.read_attributes: Callable[[str], dict[str, Any]] = _read_nothing
        # Plain attributes of units that their calls change, by path.
        self.changed: dict[str, tuple[str, ...]] = dict(routes.changed)
        # The stage's device and dtypes, once it was moved since it was built.
        self.moved: tuple[torch.device, Mapping[torch.dtype, torch.dtype]] | None = None
        self._routes = routes
        self._own_layers = own
        self._inputs = inputs
        self._outgoing = Outgoing(index, routes)
        # Whether it is known that units hand out nothing but what they return.
        self._is_proven = not routes.is_guessed
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the functions that belong to modules, because a copy has its own modules."""
        return {**vars(self), "prepare_hooks": _ignore, "read_attributes": _read_nothing}

    def _clear(self) -> None:
        self._calls: Counter[str] = Counter()
        self._depth = 0
        self._unit: str | None = None
        self._given: Given = ((), {})
        self._contents_before: Contents = {}
        self._observed: list[Observed] = []
        self._attributes_before: dict[str, Any] = {}
        self._hook_calls: Counter[str] = Counter()
        self._side_outputs: SideOutputs | None = None
        self._earlier = ""
        self._records: dict[tuple[str, int], CallRecord] = {}
        self._hook_records: Mapping[tuple[str, int], tuple[HookRecord, ...]] = {}
        self._received: dict[Value, torch.Tensor] = {}
        self._outgoing.clear()
        self._new_records: list[CallRecord] = []
        self._new_hook_records: list[HookRecord] = []
        self._device = torch.device("cpu")
        self._has_gradients = False
        # Units whose outputs were computed without a graph.
        self._without_history: set[str] = set()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Run the stage: from its inputs to the messages for the next stages."""
        self.is_running, self._device = True, device
        self._has_gradients = torch.is_grad_enabled() and self._routes.num_stages > 1
        try:
            with self._observe_first_run():
                yield
        finally:
            self.is_running = False
            self._clear()

    def _observe_first_run(self) -> AbstractContextManager[object]:
        """Check once that units hand out only what they return; an example has shown that."""
        if self._is_proven:
            return nullcontext()
        self._is_proven, self._side_outputs = True, SideOutputs()
        return SideOutputMode(self._side_outputs, lambda: self._unit)

    @property
    def is_observed(self) -> bool:
        """Whether every operation of this run is observed."""
        return self._side_outputs is not None

    def record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the model's inputs, on the first stage."""
        self._add_record(*describe_inputs(self._inputs, args, kwargs))

    def receive(
        self, messages: Sequence[dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Read the messages of earlier stages, and return the model's inputs from them."""
        for message in messages:
            records, sent, changed = read_records(message["records"])
            self.changed.update(changed)
            self._received.update(zip(sent, message["values"], strict=True))
            if records:
                self._earlier, self._records = message["records"], records
                self._hook_records = read_hook_records(message["records"])
        for value, tensor in self._received.items():
            self._outgoing.add(value, tensor)
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = self._rebuild(INPUTS, 0)
        return inputs

    def remote_output(self, path: str) -> Any:
        """Return what a unit that this stage does not hold returned."""
        return self.remote_output_with_hooks(path, ((), {}))[0]

    def remote_output_with_hooks(
        self, path: str, given: Given
    ) -> tuple[Any, list[tuple[str, Any]]]:
        """Return the output of a unit of another stage, and what hooks inside got, by module.

        What the call wrote to its arguments is written to those that are given here.
        """
        call = self._count(path)
        if self._routes.stage(path, call) > self.index:
            raise EndOfStage
        if self._is_without_history():
            raise refuse_reentrant(path)
        output = self._rebuild(path, call)
        if isinstance(output, Returned):
            output = write_entries(output, given)
        records = self._hook_records.get((path, call), ())
        if not records:
            return output, []
        self._hook_calls.update(record.module for record in records)
        seen = [(r.module, rebuild_hook_call(r, self._received, self._device)) for r in records]
        return output, seen

    def is_own_call(self, path: str) -> bool:
        """Return whether this stage makes the next call of a unit that several stages hold."""
        return bool(self._depth) or self._routes.stage(path, self._calls[path]) == self.index

    def enter(self, path: str, given: Given) -> None:
        """Begin a call of a unit of this stage; calls inside of it are not recorded."""
        if not self._depth and self._routes.stage(path, self._calls[path]) > self.index:
            raise EndOfStage
        if not self._depth:
            self._unit = path
            self._given, self._contents_before = given, contents_of(given)
            if self._outgoing.consumers:
                self.prepare_hooks(path)
            if self._side_outputs is not None:
                self._side_outputs.enter(look_into(given))
                self._attributes_before = self.read_attributes(path)
        self._depth += 1

    def observe(self, path: str, given: Given, output: Any) -> None:
        """Record the output of a module inside of a unit, before its hooks get it."""
        if self._unit is not None and f"{path}.".startswith(f"{self._unit}."):
            self._observed.append(observe(path, given, output))

    def _is_without_history(self) -> bool:
        """Return whether values get no graph here, although they are to be trained."""
        return self._has_gradients and not torch.is_grad_enabled() and is_in_reentrant_checkpoint()

    def leave(self, path: str, output: Any) -> None:
        """End a call of a unit of this stage, and record what it returned."""
        self._depth -= 1
        if not self._depth:
            self._unit = None
            returned = returned_by(output, self._contents_before, self._given)
            observed, self._observed = seen_by_hooks(path, self._observed, output), []
            if self._side_outputs is not None:
                self._record_changes(path)
                seen = [o.tree for o in observed if not o.is_written]
                self._side_outputs.allow((output, returned.entries, seen))
            if self._is_without_history():
                self._without_history.add(path)
            call = self._count(path)
            record, tensors = describe(path, call, returned)
            self._add_record(record, tensors)
            if observed:
                self._record_hook_calls((path, call), observed, tensors)

    def _record_changes(self, path: str) -> None:
        """Record which attributes a call has changed, in the first run."""
        names = changed_names(self._attributes_before, self.read_attributes(path))
        if names:
            self.changed[path] = tuple(dict.fromkeys((*self.changed.get(path, ()), *names)))

    def _record_hook_calls(
        self,
        unit: tuple[str, int],
        observed: Sequence[Observed],
        returned: list[tuple[Value, torch.Tensor]],
    ) -> None:
        """Record what hooks got inside of a unit, because stages without it call them too."""
        sent = self._outgoing.items()
        known = {id(tensor): value for value, tensor in (*self._received.items(), *sent)}
        known.update((id(tensor), value) for value, tensor in returned)
        for one in observed:
            number = self._hook_calls[one.path]
            self._hook_calls[one.path] += 1
            names = {} if one.is_written else known
            record, tensors = describe_hook_call(unit, one.path, number, one.tree, names)
            self._new_hook_records.append(record)
            for value, tensor in () if one.is_written else tensors:
                self._outgoing.add(value, tensor)

    def messages(self) -> Routed:
        """Return a message for every stage that this one feeds."""
        self._require_own_calls()
        return Routed({stage: self._message(stage) for stage in self._outgoing.consumers})

    def _message(self, stage: int) -> dict[str, Any]:
        sent = self._outgoing.for_stage(stage)
        for value, tensor in sent.items():
            # At its end, the checkpoint gives a graph to what it returns itself, and only that.
            is_lost = tensor.is_floating_point() and not tensor.requires_grad
            if is_lost and value.path in self._without_history:
                raise refuse_reentrant(value.path)
            self._require_real(tensor, f"stage {stage} needs what {value.path!r} returns, but it")
        if stage == self.index + 1:
            text = write_records(
                self._earlier,
                tuple(self._new_records),
                tuple(sent),
                tuple(self._new_hook_records),
                tuple(self.changed.items()),
            )
        else:
            text = write_records("", (), tuple(sent))
        return {"records": text, "values": list(sent.values())}

    def check_output(self, output: Any) -> Any:
        """Return the model's output; raise if it is incomplete or has a stand-in in it."""
        if self._outgoing.consumers:
            raise ModelError(
                f"the model returned on stage {self.index}, before it called any module of stage "
                f"{self.index + 1}; {ADVICE}"
            )
        leaves = tree_leaves(output)
        for leaf in leaves:
            self._require_real(leaf, "the model's output")
        self._require_all_leaves(len(leaves))
        if self._side_outputs is not None:
            self._side_outputs.refuse(output, "the model returns")
        return output

    def _require_all_leaves(self, count: int) -> None:
        tree, expected = self._routes.example_form
        if self._records and self._records[INPUTS, 0].tree == tree and count != expected:
            raise ModelError(
                f"the model's output must have as many values as that of the example (got {count},"
                f" example: {expected}); leave out options that collect values while layers run, "
                "such as output_hidden_states, because no stage has all of them"
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

    def _add_record(self, record: CallRecord, tensors: list[tuple[Value, torch.Tensor]]) -> None:
        self._new_records.append(record)
        for value, tensor in tensors:
            self._outgoing.add(value, tensor)

    def _rebuild(self, path: str, call: int) -> Any:
        if (path, call) not in self._records:
            raise ModelError(
                f"{path!r} is called {call + 1} times on stage {self.index}, but was not on the "
                f"stage that holds it; {ADVICE}"
            )
        return rebuild(self._records[path, call], self._received, self._device)


def _ignore(_path: str) -> None:
    pass


def _read_nothing(_path: str) -> dict[str, Any]:
    return {}

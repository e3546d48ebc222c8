"""Values that one run of a stage sends to later stages."""

from collections.abc import Iterator

import torch

from penstock.errors import ModelError
from penstock.splitting.by_layers.hooks.inner_values import version_of
from penstock.splitting.by_layers.records.call_records import INPUTS, Value
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stand_ins import ADVICE

__all__ = ["Outgoing"]


class Outgoing:
    """The tensors to send, by the stage that gets them; other tensors are not kept alive."""

    def __init__(self, index: int, routes: LayerRoutes) -> None:
        self._index, self._routes = index, routes
        self.consumers = routes.dataflow().consumers(index)
        self._next_stages: dict[Value, int | None] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the tensors of a run."""
        self._tensors: dict[int, dict[Value, torch.Tensor]] = {c: {} for c in self.consumers}
        # The version of each tensor when it was added.
        self._versions: dict[Value, int] = {}

    def add(self, value: Value, tensor: torch.Tensor) -> None:
        """Send a tensor, if a later stage needs it."""
        if value not in self._next_stages:
            self._next_stages[value] = self._routes.next_stage(value, self._index)
        stage = self._next_stages[value]
        if stage is not None:
            # Every stage runs the code that writes to it, each on the unchanged value.
            sent = tensor.clone() if value in self._routes.rewritten else tensor
            self._tensors[stage][value] = sent
            self._versions[value] = version_of(sent)

    def items(self) -> Iterator[tuple[Value, torch.Tensor]]:
        """Return all that is sent so far."""
        return (item for tensors in self._tensors.values() for item in tensors.items())

    def for_stage(self, stage: int) -> dict[Value, torch.Tensor]:
        """Return what a stage gets."""
        tensors = self._tensors[stage]
        return {value: t for value, t in tensors.items() if self._is_unwritten(value, t)}

    def _is_unwritten(self, value: Value, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is unchanged; an input that is not may be left out.

        Later stages run the same code, and would write to it once more.
        """
        if version_of(tensor) == self._versions[value]:
            return True
        if value.path == INPUTS and self._routes.is_guessed:
            return False
        what = f"what {value.path!r} returns" if value.path else "an input of the model"
        advice = f", or {ADVICE}" if self._routes.is_guessed else ""
        raise ModelError(
            f"stage {self._index} sends {what} to another stage, but it was written to in place "
            f"meanwhile; write the result to a new tensor{advice}"
        )

"""The first half of a save: all processes agree who writes what, and each copies its part.

After this the training may continue, because the copies no longer change.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from penstock.checkpoint.content import Content
from penstock.checkpoint.folders import StepFolders
from penstock.checkpoint.messages import (
    plan_from_values,
    plan_to_values,
    section_of,
    setting_from_value,
    setting_to_value,
)
from penstock.errors import CheckpointError
from penstock.ranks.control import Control, RankFailure, Refusal, describe_error

__all__ = ["Draft", "HostCopies", "Whole", "draft_save", "refuse_save"]


class HostCopies(SavePlanner):
    """Torch's default planner, which copies this process's part when the plan is final."""

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner()
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state to be saved."""
        self._planner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Return everything that this process could write."""
        return self._planner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return who writes what, so that copies on several processes are written once."""
        return self._planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy what this process writes to host memory."""
        plan = self._planner.finish_plan(new_plan)
        self._copies = {item.index: _copy(self._planner.resolve_data(item)) for item in plan.items}
        self._planner.state_dict = {}
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the copy of one item."""
        return self._copies[write_item.index]

    @property
    def num_bytes(self) -> int:
        """The bytes of all copies."""
        return sum(
            copy.nbytes if isinstance(copy, torch.Tensor) else copy.getbuffer().nbytes
            for copy in self._copies.values()
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A save that all agree on, and this process's part; only the first process has `whole`."""

    step: int
    plan: SavePlan
    copies: HostCopies
    writer: FileSystemWriter
    whole: "Whole | None"


@dataclass(frozen=True, slots=True)
class Whole:
    """What all processes save: torch's index, the plain values, and further names.

    `same` has keys whose values are saved under another key.
    """

    metadata: Metadata
    data: dict[str, Any]
    values: dict[str, Any]
    same: dict[str, str]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a process offers to save, for the first process."""

    step: int
    data: str
    plan: SavePlan
    values: dict[str, Any]
    aliases: dict[str, str]

    def to_values(self) -> dict[str, Any]:
        """Return the fields as plain values, by name."""
        settings = {key: setting_to_value(value) for key, value in self.values.items()}
        return {
            "step": self.step,
            "data": self.data,
            "plan": plan_to_values(self.plan),
            "values": settings,
            "aliases": self.aliases,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "_Offer":
        """Return the offer of plain values."""
        settings = {key: setting_from_value(value) for key, value in values["values"].items()}
        plan = plan_from_values(values["plan"])
        return cls(values["step"], values["data"], plan, settings, values["aliases"])


def draft_save(
    control: Control, folders: StepFolders, step: int, content: Content, data: Mapping[str, Any]
) -> Draft:
    """Agree with all processes on a save, and copy what this one will write."""
    copies = HostCopies()
    copies.set_up_planner(_nested(content.tensors))
    plan = copies.create_local_plan()
    offer = _Offer(step, json.dumps(data, sort_keys=True), plan, content.values, content.aliases)
    collected = control.collect(offer.to_values())
    whole: Whole | None = None
    # What each process writes: its own items by number, or why nothing can be saved.
    answers: list[list[int] | str] = []
    if control.rank == 0:
        try:
            offers = [_Offer.from_values(values) for values in collected]
            _check_agreement(offers)
            folders.begin(step)
            plan, answers, whole = _join(copies, content, offers)
        except Exception as error:
            message = f"step {step} cannot be saved: {describe_error(error)}"
            answers = [message] * control.size
    answer = control.scatter(answers)
    if isinstance(answer, str):
        raise CheckpointError(answer)
    own = replace(plan, items=[plan.items[number] for number in answer])
    writer = _writer(folders, step)
    final = writer.prepare_global_plan([own] * control.size)[control.rank]
    with control.together(refuse_save(control)):
        finished = copies.finish_plan(final)
    return Draft(step, finished, copies, writer, whole)


def refuse_save(control: Control) -> Refusal:
    """Return a refusal that raises the same `CheckpointError` on every process."""

    def refuse(failure: RankFailure) -> CheckpointError:
        prefix = f"rank {failure.rank}: " if control.size > 1 else ""
        return CheckpointError(f"{prefix}{failure.message}")

    return refuse


def _check_agreement(offers: Sequence[_Offer]) -> None:
    for rank, offer in enumerate(offers):
        for what, own, first in (
            ("step", offer.step, offers[0].step),
            ("data", offer.data, offers[0].data),
        ):
            if own != first:
                raise CheckpointError(
                    f"{what} must be the same on all ranks (rank 0: {first}, rank {rank}: {own}); "
                    "give all ranks the same"
                )


def _join(
    copies: HostCopies, content: Content, offers: Sequence[_Offer]
) -> tuple[SavePlan, list[list[int] | str], Whole]:
    """Return the first process's plan, which includes all plain values, and who writes what."""
    values = {key: value for offer in offers for key, value in offer.values.items()}
    firsts: dict[str, str] = {}
    same = {key: firsts.setdefault(repr(value), key) for key, value in values.items()}
    written = {key: values[key] for key in firsts.values()}
    copies.set_up_planner(_nested({**content.tensors, **written}), None, True)
    plans = [copies.create_local_plan(), *(offer.plan for offer in offers[1:])]
    final, metadata = copies.create_global_plan(plans)
    numbers = [_find_items(own, all_of_it) for own, all_of_it in zip(final, plans, strict=True)]
    aliases = {name: saved for offer in offers for name, saved in offer.aliases.items()}
    whole = Whole(metadata, json.loads(offers[0].data), values, same, aliases)
    return plans[0], [*numbers], whole


def _find_items(some: SavePlan, plan: SavePlan) -> list[int]:
    """Return the positions of some items in a plan."""
    numbers = {item.index: number for number, item in enumerate(plan.items)}
    return [numbers[item.index] for item in some.items]


def _nested(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return items in the sections that their first words name, as in torch's state."""
    nested: dict[str, Any] = {}
    for key, value in items.items():
        section, rest = section_of(key)
        nested.setdefault(section, {})[rest] = value
    return nested


def _writer(folders: StepFolders, step: int) -> FileSystemWriter:
    """Return torch's own writer: one file per process, complete when it is on the disk."""
    return FileSystemWriter(folders.partial(step), per_thread_copy_ahead=0)


def _copy(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    if isinstance(data, io.BytesIO):
        return data
    return data.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

"""Saves of one run, one after the other: what stays the same between them is kept.

draft    agree who writes what, copy it to the image of the file    the caller waits
write    write the file; the first process completes the step       in the background
"""

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.content import Content
from penstock.checkpoint.digests import Digest
from penstock.checkpoint.manifest import File
from penstock.checkpoint.parts import Part, choose_writers, list_parts
from penstock.checkpoint.refusing import refuse_save
from penstock.checkpoint.saving.completing import Completion, Whole
from penstock.checkpoint.saving.image import Image, Place
from penstock.checkpoint.saving.offers import Offer, check_agreement
from penstock.checkpoint.saving.torch_index import StoredPart, StoredValues, store_values
from penstock.checkpoint.storage.lease import Lease
from penstock.checkpoint.storage.steps import Steps
from penstock.errors import CheckpointError
from penstock.ranks.control import Control, describe_error

__all__ = ["Draft", "Saver"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """A save that all agree on, and this process's part; only the first process has `whole`."""

    step: int
    folder: str
    job: str
    image: Image
    whole: Whole | None


@dataclass(slots=True)
class _Known:
    """What the first process knows of another from the save before: all of it, or nothing."""

    parts: tuple[Part, ...] = ()
    numbers: tuple[int, ...] | None = None
    places: tuple[Place, ...] = ()


class Saver:
    """Saves steps, with the memory and the plans of the save before."""

    def __init__(self, control: Control, steps: Steps, lease: Lease, keep: int) -> None:
        self._control, self._steps, self._lease, self._keep = control, steps, lease, keep
        self._forget()

    def _forget(self) -> None:
        """Start again from nothing after a failure, on all processes."""
        self._sent: tuple[Part, ...] | None = None
        self._image: Image | None = None
        self._known = [_Known() for _ in range(self._control.size)]
        self._completion = Completion(self._steps, self._lease, self._keep)

    def draft(self, step: int, content: Content, data: Mapping[str, Any]) -> Draft:
        """Agree with all processes on a save, and copy what this one will write."""
        try:
            return self._draft(step, content, data)
        except BaseException:
            self._forget()
            raise

    def _draft(self, step: int, content: Content, data: Mapping[str, Any]) -> Draft:
        control = self._control
        parts = tuple(list_parts(content.tensors))
        text = json.dumps(data, sort_keys=True)
        offered = None if parts == self._sent else parts
        offer = Offer(step, text, content.optimizer, offered, content.values, content.aliases)
        # Only what travels has to be plain.
        collected = control.collect(offer if control.rank == 0 else offer.to_values())
        self._sent = parts
        whole: Whole | None = None
        # Where each process writes, as which job, and which of its parts (None: those of the save
        # before); or why nothing can be saved.
        answers: list[list[Any] | str] = []
        if control.rank == 0:
            try:
                offers = [collected[0], *map(Offer.from_values, collected[1:])]
                check_agreement(offers)
                answers, whole = self._answer(step, offers)
            except Exception as error:
                message = f"step {step} cannot be saved: {describe_error(error)}"
                answers = [message] * control.size
        answer = control.scatter(answers)
        if isinstance(answer, str):
            raise CheckpointError(answer)
        folder, job, numbers = answer
        with control.together(refuse_save(control)):
            image = self._fill(
                [parts[n] for n in numbers] if numbers is not None else None, content
            )
        return Draft(step, folder, job, image, whole)

    def _answer(self, step: int, offers: Sequence[Offer]) -> tuple[list[list[Any] | str], Whole]:
        """Return who writes what, and what all of it is."""
        for known, offer in zip(self._known, offers, strict=True):
            if offer.parts is not None:
                known.parts = offer.parts
        is_known = all(offer.parts is None for offer in offers)
        chosen: list[list[int] | None] = [None] * len(offers)
        if not is_known or any(known.numbers is None for known in self._known):
            for rank, numbers in enumerate(choose_writers([k.parts for k in self._known])):
                if self._known[rank].numbers != tuple(numbers) or offers[rank].parts is not None:
                    self._known[rank].numbers, chosen[rank] = tuple(numbers), numbers
        self._lease.hold()
        folder = self._steps.begin(step, self._lease.job)
        values = {key: value for offer in offers for key, value in offer.values.items()}
        aliases = {name: saved for offer in offers for name, saved in offer.aliases.items()}
        data = json.loads(offers[0].data)
        whole = Whole(step, folder, len(offers), offers[0].optimizer, data, values, aliases)
        return [[folder, self._lease.job, numbers] for numbers in chosen], whole

    def _fill(self, parts: list[Part] | None, content: Content) -> Image:
        """Copy this process's parts to the image of its file."""
        image = self._image
        is_pinned = any(tensor.is_cuda for tensor in content.tensors.values())
        if parts is not None or image is None or image.is_pinned != is_pinned:
            kept = parts if parts is not None else image.parts if image is not None else ()
            # Two images at once might not fit.
            self._image = image = None
            image = Image(kept, is_pinned=is_pinned)
        image.fill(content.tensors)
        self._image = image
        return image

    def write(self, draft: Draft) -> None:
        """Write a draft; the step is complete on return, or every process raises why not."""
        control = self._control
        name = self._steps.file_name(control.rank, draft.job)
        values = StoredValues(b"", {})
        if draft.whole is not None:
            values = store_values(draft.whole.values, draft.image.num_bytes)
        collected = control.collect(self._write_file(draft, name, values.blob))
        message: str | None = None
        if draft.whole is not None:
            try:
                files, parts = self._join(collected)
                message = self._completion.complete(draft.whole, files, parts, name, values.places)
            except Exception as error:
                message = f"step {draft.step} was not saved: {describe_error(error)}"
                # What it has written takes space, which may be what is missing.
                with suppress(CheckpointError):
                    self._steps.discard(draft.step, self._lease.job)
        message = control.broadcast(message)
        if message is not None:
            self._forget()
            complete = list(self._steps.complete())
            raise CheckpointError(f"{message}; complete steps: {complete or 'none'}")
        _logger.debug("step %d is complete", draft.step)

    def _write_file(self, draft: Draft, name: str, blob: bytes) -> list[Any]:
        """Write this process's file; an error is part of the result, so that all learn of it."""
        _logger.debug("writing %d bytes of step %d", draft.image.num_bytes, draft.step)
        places = [[p.start, p.length, p.position] for p in draft.image.places]
        try:
            if not places and not blob:
                return [None, places, None]
            pieces = [draft.image.view(), memoryview(blob)]
            digest, size = Digest(), sum(map(len, pieces))
            self._steps.storage.write(f"{draft.folder}/{name}", digest.passing(pieces))
            return [[name, size, digest.text()], places, None]
        except Exception as error:
            return [None, [], describe_error(error)]

    def _join(self, collected: Sequence[list[Any]]) -> tuple[dict[str, File], list[StoredPart]]:
        """Return all files, and every part with its place, or raise what a process reports."""
        for rank, (_, _, error) in enumerate(collected):
            if error is not None:
                raise CheckpointError(f"rank {rank}: {error}")
        files: dict[str, File] = {}
        parts: list[StoredPart] = []
        for rank, (file, places, _) in enumerate(collected):
            if file is not None:
                name, size, digest = file
                files[name] = File(size, digest)
            known = self._known[rank]
            assert known.numbers is not None, "all processes know what to write"
            for number, place in zip(known.numbers, places, strict=True):
                parts.append(StoredPart(known.parts[number], name, Place(*place)))
        return files, parts

"""Agreement of all ranks on a step's batch before any of it is sent."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import sha256
from typing import Any

from penstock.errors import BatchError, PipelineError
from penstock.ir.schedule import Schedule
from penstock.loss.labels import LABELS
from penstock.ranks.control import Control
from penstock.training.batch.batch import Accepted, BatchFacts, try_split
from penstock.training.batch.data_agreement import compare_data
from penstock.training.batch.rows import BatchRows, RowClaims, merge_claims, settle_rows

__all__ = ["Agreed", "BatchAgreement"]

# How many steps have their data compared at the start, when loaders are most often set up wrong.
_FIRST_STEPS = 3
# How many forms of a batch are remembered as fitting; the oldest go first.
_SIGNATURES = 1024


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of a step's batch.

    `keywords` are those that any rank was given, and `shared` those of them that stages of several
    ranks take. `lacks_labels` is true if a rank that computes
    the loss was given no `labels`, but another rank was.
    """

    rows: BatchRows
    keywords: frozenset[str]
    shared: frozenset[str]
    lacks_labels: bool


class BatchAgreement:
    """Compares what the ranks were given; a form that fitted once is not compared again."""

    def __init__(
        self,
        control: Control,
        schedule: Schedule,
        accepted: Iterable[Accepted],
        *,
        compares_data: bool = True,
    ) -> None:
        self._control = control
        self._schedule = schedule
        # The keywords that the stages of each rank take.
        self._taken = _gather_keywords(control, list(accepted))
        self._keywords = frozenset(name for names in self._taken for name in names)
        self._agreed: dict[bytes, Agreed] = {}
        # What this rank was given last, and what it was called.
        self._facts: BatchFacts | None = None
        self._mode: object = None
        self._digest = b""
        # How many steps from now on have their data compared, whatever their form.
        self._steps_to_compare = _FIRST_STEPS
        self._compares_data = compares_data

    def agree(
        self,
        facts: BatchFacts,
        values: Sequence[Any],
        named: Mapping[str, Any],
        *,
        mode: object,
        is_recorded: bool,
    ) -> tuple[Agreed, bytes]:
        """Return what all ranks know of the batch, and a name for it.

        `named` has the values by name, None for those that were left out. `mode` is whatever else
        the values between stages depend on.
        """
        # Most steps have the very facts of the step before.
        if facts is not self._facts or mode != self._mode:
            self._facts, self._mode = facts, mode
            self._digest = sha256(repr((facts, mode)).encode()).digest()
        mine = self._digest
        everyone = self._control.gather_bytes(mine + bytes([is_recorded]))
        _compare_recording([bool(data[-1]) for data in everyone])
        signature = sha256(b"".join(data[:-1] for data in everyone)).digest()
        agreed = self._agreed.get(signature)
        is_new = agreed is None
        if agreed is None:
            gathered = self._control.gather(astuple(try_split(facts, values)))
            agreed = self._compare([_from_plain(theirs) for theirs in gathered])
        if self._compares_data and len(everyone) > 1 and (is_new or self._steps_to_compare):
            compare_data(self._control, named)
            self._steps_to_compare = max(0, self._steps_to_compare - 1)
        if is_new:
            if len(self._agreed) == _SIGNATURES:
                del self._agreed[next(iter(self._agreed))]
            self._agreed[signature] = agreed
        return agreed, signature

    def _compare(self, everyone: Sequence[BatchFacts]) -> Agreed:
        """Refuse, on every rank alike, a batch that does not fit together."""
        for rank, facts in enumerate(everyone):
            if facts.is_training != everyone[0].is_training:
                calls = [("evaluate", "step")[f.is_training] for f in (everyone[0], facts)]
                raise BatchError(
                    f"all ranks must call the same method (rank 0 calls {calls[0]}, rank {rank} "
                    f"calls {calls[1]})"
                )
            if facts.no_graph is not None:
                raise PipelineError(
                    f"step must run where gradients are recorded (rank {rank} calls it under "
                    f"{facts.no_graph}); leave that context, or call evaluate"
                )
            if facts.error is not None:
                raise BatchError(f"rank {rank}: {facts.error}")
            unknown = sorted(set(facts.keywords) - self._keywords)
            if unknown and "**" not in self._keywords:
                raise BatchError(
                    f"keywords must be taken by some stage's forward (rank {rank} passes "
                    f"{unknown[0]!r}); leave it out"
                )
        self._require_inputs(everyone)
        _compare_ties(everyone)
        keywords = frozenset(name for facts in everyone for name in facts.keywords)
        shared = frozenset(
            name
            for name in keywords
            if sum(name in names or "**" in names for names in self._taken) > 1
        )
        return Agreed(_compare_rows(everyone), keywords, shared, self._lacks_labels(everyone))

    def _lacks_labels(self, everyone: Sequence[BatchFacts]) -> bool:
        """Return whether a rank with a last stage was given no labels, but another was."""
        flow, holder = self._schedule.dataflow, self._schedule.placement.rank_of_stage
        last = {rank for stage, rank in enumerate(holder) if not flow.consumers(stage)}
        has_labels = [LABELS in facts.keywords for facts in everyone]
        return any(has_labels) and not all(has_labels[r] for r in last if r < len(everyone))

    def _require_inputs(self, everyone: Sequence[BatchFacts]) -> None:
        """Refuse a step without a batch for a first stage, or a target to train a last one."""
        flow, holder = self._schedule.dataflow, self._schedule.placement.rank_of_stage
        for stage, rank in enumerate(holder):
            facts = everyone[rank if len(everyone) > 1 else 0]
            if not flow.producers(stage) and not facts.has_inputs:
                raise BatchError(
                    f"rank {rank} must be given a batch (it holds the first stage {stage})"
                )
            if facts.is_training and not flow.consumers(stage) and not facts.has_target:
                raise BatchError(
                    f"rank {rank} must be given a target (it holds the last stage {stage})"
                )


def _compare_ties(everyone: Sequence[BatchFacts]) -> None:
    """Refuse a shared parameter that is trained on some of its ranks only."""
    first: dict[str, tuple[int, bool]] = {}
    for rank, facts in enumerate(everyone):
        for tie, is_trained in facts.trained_ties.items():
            other, expected = first.setdefault(tie, (rank, is_trained))
            if is_trained != expected:
                frozen, trained = (other, rank) if is_trained else (rank, other)
                raise BatchError(
                    f"a parameter that ranks {tie} share must be trained on all of them or none "
                    f"(frozen on rank {frozen}, trained on rank {trained}); call requires_grad_ "
                    "alike on both"
                )


def _compare_rows(everyone: Sequence[BatchFacts]) -> BatchRows:
    rows = settle_rows(merge_claims([facts.claims for facts in everyone]))
    if rows is None:
        raise BatchError(
            "some rank must know the rows of the batch; pass a tensor, or Ready parts"
        )
    return rows


def _from_plain(sent: Sequence[Any]) -> BatchFacts:
    """Return the facts that a rank has sent as plain values."""
    facts = BatchFacts(*sent)
    return replace(facts, claims=RowClaims.of_plain(sent[1]))


def _compare_recording(is_recorded: list[bool]) -> None:
    """Refuse a step that only some ranks record."""
    if len(set(is_recorded)) > 1:
        raise PipelineError(
            f"all ranks must record a step, or none (rank {is_recorded.index(True)} does, rank "
            f"{is_recorded.index(False)} does not); give record alike"
        )


def _gather_keywords(control: Control, accepted: Sequence[Accepted]) -> list[frozenset[str]]:
    """Return the keywords that the stages of each rank take, and "**" if one takes all."""
    mine = {name for takes in accepted for name in takes.names}
    if any(takes.takes_all for takes in accepted):
        mine.add("**")
    return [frozenset(names) for names in control.gather(sorted(mine))]

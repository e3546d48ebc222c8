"""What Penstock refuses, by feature and in which words; any other error is a failure."""

import re
from dataclasses import dataclass

from penstock.errors import BatchError, ModelError, PipelineError, SizeError
from tests.differential.case import Case
from tests.differential.losses import LOSSES

__all__ = ["Refusal", "find_refusals"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a case must raise, or may if a feature is allowed to work as well."""

    error: type[Exception] | tuple[type[Exception], ...]
    words: str
    may_work: bool = False

    def covers(self, error: Exception) -> bool:
        """Whether this is the error; a failed step is of the class that all its ranks raise."""
        return isinstance(error, self.error) and re.search(self.words, str(error)) is not None


_LOSSES = {
    "unreduced": Refusal(PipelineError, r"the loss must be one real number .*loss\.mean\(\)"),
    "paired": Refusal(PipelineError, r"the loss must be one real number \(got a tuple of 2\)"),
    "cut_off": Refusal(PipelineError, r"the loss of a training step must have a graph"),
}
# What a loss of these forms is a mean over may be found out, or asked for.
_ASKED = Refusal((BatchError, PipelineError), r"Pipeline\(reduction=\.\.\.\)", may_work=True)
# Two directions may leave a rank fewer than two microbatches to compare, of which it then warns.
_UNSEEN = Refusal(
    PipelineError,
    r"fewer than two microbatches .* Pipeline\(reduction='mean'\)",
    may_work=True,
)
_UNCLEAR_LOSSES = frozenset(
    {"found_handmade", "found_mixed", "found_two_terms", "found_shifted", "found_smooth"}
    | {"found_masked", "found_weighted", "found_root", "found_contrast", "found_divided"}
    | {"found_focal", "found_late_root"}
)
_FORMS = {
    "sparse": Refusal(PipelineError, r"BoundaryError: .*sparse", may_work=True),
    "object": Refusal(PipelineError, r"BoundaryError: a value of type set cannot cross"),
}


# A layer that flattens a matrix, or moves a tensor to where it is, gets the same tensor back; this
# then seems to be of the layer's own making.
_MADE_INSIDE = Refusal(
    (ModelError, PipelineError),
    r"a value that was made in 'layers\.\d+', but not returned by it",
    may_work=True,
)
# In the plain model a gradient that is taken inside of a forward or loss calls hooks on what it is
# taken with respect to, which another stage may have registered.
_HOOKED_ELSEWHERE = Refusal(
    PipelineError,
    r"takes a gradient .* with respect to a tensor from an earlier stage, which has registered a",
    may_work=True,
)
# Saved values of such a forward are only there once it was recomputed.
_RECOMPUTED = Refusal(
    PipelineError,
    r"must not take gradients in a forward that saves only its inputs .* RECOMPUTE",
    may_work=True,
)
_WRITES_TO_BATCH = Refusal(PipelineError, r"writes in place to its piece", may_work=True)
_LAZY = Refusal(ModelError, r"call the model once", may_work=True)
# Both directions of DualPipe have every stage, and they agree on parameters when they are built.
_REPLACED = Refusal(
    BatchError,
    r"is shared with another rank and was replaced by another parameter .* build the pipeline",
    may_work=True,
)
_FLATTENING = frozenset({"counter", "bag"})


def find_refusals(case: Case, *, is_over_processes: bool = False) -> list[Refusal]:
    """What a case is refused for: whichever is met first."""
    found = [_FORMS[part.sends] for part in case.parts[:-1] if part.sends in _FORMS]
    if case.loss in _LOSSES:
        found.append(_LOSSES[case.loss])
    if case.loss in _UNCLEAR_LOSSES:
        found.append(_ASKED)
    if LOSSES[case.loss].reduction == "found" and case.order.family == "DualPipe":
        found.append(_UNSEEN)
        if is_over_processes:
            # No rank may have two microbatches to compare, and then uneven labels are in doubt.
            found.append(_ASKED)
    is_replaced = bool({"replace", "reweigh"} & case.edits)
    if is_over_processes and is_replaced and case.order.family == "DualPipe":
        found.append(_REPLACED)
    is_by_name = not case.skips and not case.order.has_additions
    if case.order.family == "DualPipe" and is_by_name and any(s.rows < 2 for s in case.steps):
        words = r"DualPipe feeds both ends \(microbatches: 1\); use 2 or more"
        found.append(Refusal(SizeError, words))
    is_flat = bool(_FLATTENING & case.kinds) and not case.steps[0].length
    if case.door == "layers" and (is_flat or "offloaded" in case.traits):
        found.append(_MADE_INSIDE)
    has_inner_gradients = "inner_gradient" in case.kinds
    takes_gradients = LOSSES[case.loss].takes_gradients or has_inner_gradients
    if case.order.recomputed and "writes" in case.parts[0].traits:
        found.append(_WRITES_TO_BATCH)
    if case.order.recomputed and has_inner_gradients:
        found.append(_RECOMPUTED)
    if "tensor_hook" in case.traits and takes_gradients:
        found.append(_HOOKED_ELSEWHERE)
    if "lazy" in case.kinds and (case.door == "layers" or case.order.family == "DualPipe"):
        found.append(_LAZY)
    return found

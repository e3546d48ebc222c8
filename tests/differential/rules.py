"""Which cases make sense: what the plain model allows, and what the comparison can check."""

from collections.abc import Callable, Iterator

from tests.differential.case import Block, Case, Edit
from tests.differential.losses import LOSSES
from tests.differential.model.blocks import (
    IN_ORDER,
    ONCE_DIFFERENTIABLE,
    OWN_LINEAR,
    REWEIGHINGS,
    UNWRAPPED,
    WITHIN_MICROBATCHES,
    WRITABLE,
)
from tests.differential.model.building import SPLIT_DOORS
from tests.differential.model.forms import ALIASING
from tests.differential.orders import build_schedule, forward_orders, num_parts
from tests.differential.ways import WAYS

__all__ = ["LATE_LOSSES", "TRACED", "has_square_layer", "is_by_rows", "is_valid"]

# Losses that change after some steps.
LATE_LOSSES = ("late_penalty", "late_decaying", "found_late_root")
_WEIGHT_EDITS = frozenset({"transpose", "renew", "write", "replace", "hook", "reweigh"})


def is_valid(case: Case) -> bool:
    """Whether a case makes sense, so that whatever differs is a mistake of the pipeline's.

    >>> is_valid(Case(0, ()))
    False
    """
    return all(rule(case) for rule in _RULES)


def is_by_rows(case: Case) -> bool:
    """Whether the plain model may take the whole batch at once."""
    if any(step.given == "mixed" for step in case.steps) and "keyword" in case.traits:
        return False
    within = WITHIN_MICROBATCHES & (case.kinds | case.traits)
    return LOSSES[case.loss].is_additive and not within


def has_square_layer(case: Case, part: int) -> bool:
    """Whether the first linear layer of a part is square, and its weight a parameter."""
    if part == 0 and case.inputs != "tokens":
        return True
    blocks = case.parts[part].blocks
    return bool(blocks) and _has_own_linear(blocks[0])


def _has_own_linear(block: Block) -> bool:
    return block.kind in OWN_LINEAR and not REWEIGHINGS.keys() & set(block.traits)


def _fits_order(case: Case) -> bool:
    return len(case.parts) > 0 and len(case.parts) == num_parts(case.order)


def _has_edges(case: Case) -> bool:
    return all(0 <= a < b - 1 < len(case.parts) - 1 for a, b in case.skips)


def _has_traits_that_fit(case: Case) -> bool:
    return all(_fits(block) for block in case.blocks)


def _fits(block: Block) -> bool:
    traits = set(block.traits)
    if REWEIGHINGS.keys() & traits and block.kind not in OWN_LINEAR:
        return False
    if len(REWEIGHINGS.keys() & traits) > 1 or len(traits & {"checkpoint", "reentrant"}) > 1:
        return False
    wrapped = traits & {"checkpoint", "reentrant", "compiled"}
    if wrapped and UNWRAPPED & {block.kind, *traits}:
        return False
    if "compiled" in traits and (block.kind in _EAGER or REWEIGHINGS.keys() & traits):
        return False
    if block.kind == "sparse_lookup" and traits & {"clamp_hook", "sink_hook"}:
        return False
    # A lazy layer has no parameters yet that something could be done to.
    if block.kind == "lazy" and traits & {"frozen", "scale_hook", "clamp_hook", "sink_hook"}:
        return False
    if "write" in traits:
        # Torch forgets the hooks of a view that is written to, and layers may return views.
        return block.kind in WRITABLE and not wrapped | (traits & {"module_hook", "tensor_hook"})
    return True


# What a compiler draws, counts or leaves out by itself.
_EAGER = frozenset({"dropout", "complex", "experts", "branches", "alternating", "table", "bag"})


def _writes_where_it_may(case: Case) -> bool:
    for number, part in enumerate(case.parts):
        if "writes" not in part.traits:
            continue
        senders = [case.parts[a].sends for a, b in case.edges if b == number]
        if set(senders) & ALIASING or (number == 0 and case.inputs == "trained"):
            return False
    return True


def _comes_in_order(case: Case) -> bool:
    """What depends on the order of microbatches is only comparable if that is theirs."""
    if not IN_ORDER & (case.kinds | case.traits):
        return True
    if case.order.family == "DualPipe":
        return False
    return forward_orders(build_schedule(case)) == {tuple(range(case.order.microbatches))}


def _has_enough_for_statistics(case: Case) -> bool:
    if not {"batch_norm", "moving_batch_norm"} & case.kinds:
        return True
    if any(step.given == "ready" for step in case.steps):
        return all(step.length > 1 for step in case.steps)
    count = case.order.microbatches
    return all(step.length > 1 or step.rows // min(count, step.rows) > 1 for step in case.steps)


def _can_take_gradients(case: Case) -> bool:
    if not LOSSES[case.loss].takes_gradients:
        return True
    # A backward through the whole model goes through all parts of the plain one.
    blocks = case.blocks if case.loss == "retained_whole" else case.parts[-1].blocks
    if any(ONCE_DIFFERENTIABLE & {block.kind, *block.traits} for block in blocks):
        return False
    # A backward to certain weights runs all that is between: the whole model if the last part has
    # a weight of an earlier one. Torch's reentrant checkpoints refuse such a backward.
    is_tied = any(later == len(case.parts) - 1 for _, later in case.ties)
    return not (case.loss == "retained" and is_tied and "reentrant" in case.traits)


def _keeps_what_it_looks_at(case: Case) -> bool:
    if case.loss not in ("retained", "retained_whole"):
        return True
    # What a whole backward leaves in earlier parts comes to them together with the rest.
    return not {"sink_hook", "clamp_hook"} & case.traits


def _has_one_whole(case: Case) -> bool:
    """What a pipeline finds out about its loss is checked on whole batches."""
    if case.loss == "found_shifted" and any(step.length < 2 for step in case.steps):
        return False
    return LOSSES[case.loss].reduction != "found" or is_by_rows(case)


def _clips_what_torch_clips(case: Case) -> bool:
    return "clip" not in case.edits or not {"complex", "sparse_lookup"} & case.kinds


def _fails_without_a_trace(case: Case) -> bool:
    """A step that fails may have changed buffers, which no plain model has done."""
    if not {"fail", "break"} & case.edits:
        return True
    return case.door not in SPLIT_DOORS and not _COUNTING & (case.kinds | case.traits)


def _counts_alike(case: Case) -> bool:
    """Blocks that count how often they run must do so as often as in the plain model.

    A microbatch without labels has no backward, and its checkpoints do not run again. A loss that
    takes a backward through the whole model runs the checkpoints of earlier parts once more in the
    plain model; in a pipeline it adds to their one backward.
    """
    if LOSSES[case.loss].target != "sparse_labels" and case.loss != "retained_whole":
        return True
    return not any(
        block.kind in ("counter", "batch_norm") and {"checkpoint", "reentrant"} & set(block.traits)
        for block in case.blocks
    )


_COUNTING = IN_ORDER | {"batch_norm", "counter", "sink_hook"}


def _can_be_cut(case: Case) -> bool:
    """A model that Penstock cuts itself has layers in every part, and nothing between them."""
    if case.door not in SPLIT_DOORS:
        return True
    if case.ties or "dropout" in case.kinds or LOSSES[case.loss].output == "loss":
        return False
    for number, part in enumerate(case.parts):
        allowed = set() if number else {"keyword"}
        if not part.blocks or part.sends != "tensor" or set(part.traits) - allowed:
            return False
    return case.door != "traced" or _can_be_traced(case)


def _can_be_traced(case: Case) -> bool:
    if case.kinds - TRACED or case.traits - {"skip", "keyword", "frozen"}:
        return False
    # Where a traced model is cut is not where its parts begin.
    if LOSSES[case.loss].output == "hidden":
        return False
    if case.edits - {"zero", "sgd", "clip", "scaled", "eval", "late", "outputs", *WAYS}:
        return False
    # A size of one would become a constant of the graph.
    return all(
        step.length > 1 and step.rows >= 2 * case.order.microbatches and step.given == "plain"
        for step in case.steps
    )


TRACED = frozenset(
    {"linear", "feedforward", "layer_norm", "root_norm", "attention", "matmul", "elementwise"}
    | {"product_and_penalty", "product_twice", "repeated", "einsum", "detached"}
)


def _routes_to_somebody(case: Case) -> bool:
    return "routes" not in case.parts[-1].traits


def _freezes_what_is_there(case: Case) -> bool:
    """A lazy layer has no parameters before it has run, which it does on one rank only."""
    lazy = {n for n, part in enumerate(case.parts) if any(b.kind == "lazy" for b in part.blocks)}
    frozen = {number for number, part in enumerate(case.parts) if "frozen" in part.traits}
    frozen |= {edit.part for edit in _edits(case) if edit.kind in ("freeze", "thaw")}
    return not lazy & frozen


def _trains_its_head(case: Case) -> bool:
    last = len(case.parts) - 1
    frozen = any(
        edit.kind == "freeze" and edit.part == last for step in case.steps for edit in step.edits
    )
    return not frozen and "frozen" not in case.parts[-1].traits


def _has_ties_between_layers(case: Case) -> bool:
    is_tied = bool(case.ties) or case.order.family == "DualPipe"
    if not all(a < b and has_square_layer(case, b) for a, b in case.ties):
        return False
    if not all(has_square_layer(case, a) for a, _ in case.ties):
        return False
    # A clamp is not the sum of the clamps of both places, and a sink leaves nothing to add up.
    return not is_tied or not {"clamp_hook", "sink_hook"} & case.traits


def _has_edits_that_fit(case: Case) -> bool:
    tied = {part for tie in case.ties for part in tie}
    changed: dict[int, list[str]] = {}
    for edit in _edits(case):
        if edit.part >= len(case.parts):
            return False
        if edit.kind == "late" and case.loss not in LATE_LOSSES:
            return False
        if edit.kind in ("replace", "reweigh") and edit.part in tied:
            return False
        if edit.kind in _WEIGHT_EDITS:
            if not has_square_layer(case, edit.part):
                return False
            changed.setdefault(edit.part, []).append(edit.kind)
    return all("reweigh" not in kinds or len(kinds) == 1 for kinds in changed.values())


def _edits(case: Case) -> Iterator[Edit]:
    for step in case.steps:
        yield from step.edits


def _has_comparable_random_numbers(case: Case) -> bool:
    return "dropout" not in case.kinds or "eval" not in case.edits


def _has_one_notion_of_time(case: Case) -> bool:
    return len({step.length > 0 for step in case.steps}) == 1


def _is_run_in_ways_that_fit(case: Case) -> bool:
    if "evaluated" in case.edits:
        # Other microbatches give the same only where each row is computed by itself.
        if not is_by_rows(case) or case.loss not in _MEANS_OVER_ROWS:
            return False
        if any(step.given in ("ready", "mixed") for step in case.steps):
            return False
    # A lazy layer has a shape by then on one rank only, and the others refuse the stage.
    if "rebuilt" in case.edits and "lazy" in case.kinds:
        return False
    return not {"rebuilt", "break"} & case.edits or case.door not in SPLIT_DOORS


_MEANS_OVER_ROWS = frozenset({"mse", "one_element", "one_by_one", "labels", "nested"})

_RULES: tuple[Callable[[Case], bool], ...] = (
    _fits_order,
    _has_edges,
    _has_traits_that_fit,
    _writes_where_it_may,
    _comes_in_order,
    _has_enough_for_statistics,
    _can_take_gradients,
    _keeps_what_it_looks_at,
    _has_one_whole,
    _clips_what_torch_clips,
    _fails_without_a_trace,
    _counts_alike,
    _can_be_cut,
    _routes_to_somebody,
    _freezes_what_is_there,
    _trains_its_head,
    _has_ties_between_layers,
    _has_edits_that_fit,
    _has_comparable_random_numbers,
    _has_one_notion_of_time,
    _is_run_in_ways_that_fit,
)

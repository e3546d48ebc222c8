"""Runs a case as a pipeline and as one model; what comes out of each, by name.

The plain model is the reference. Where every row is computed by itself and the loss adds up, it
runs on the whole batch at once, which is what users compare with. Otherwise (statistics of a
batch, losses that take gradients, gradients that are clamped: see `is_by_rows`) it runs on one
microbatch after the other with the same weights, and each loss enters its backward with the share
that the reduction gives it: the rows, one, or the labels that count. Losses that parts add enter
with the share of rows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

import penstock as ps
from penstock.loss.added import collect_losses
from penstock.step.layer_random import LayerRandom, StageRandom
from tests.differential.batches import Batch, make_batch
from tests.differential.case import Case, Edit
from tests.differential.edits import edit
from tests.differential.losses import LOSSES, LossFunction, count_targets, make_loss
from tests.differential.model.building import Model, make_model
from tests.differential.model.parts import KeywordPart, PlainPart
from tests.differential.observed import Numbers, as_tensor, look, name_by_step
from tests.differential.pipelines import SEED, held_modules, known_warnings, make_pipeline
from tests.differential.rules import is_by_rows
from tests.differential.ways import in_this_way

__all__ = ["Mover", "run_split", "run_unsplit"]

_LARGEST_NORM = 0.1
_GRADIENT_SCALE = 4.0


class Mover(Protocol):
    """Changes what the plain model computes with (`sensitivity.py`)."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor in place of an input."""

    def move_parameters(self, *modules: object) -> None:
        """Change the parameters of modules in place."""


def run_unsplit(case: Case, mover: Mover | None = None) -> Numbers:
    """What the plain model gives in every step, from other inputs and parameters if moved."""
    with known_warnings():
        model = make_model(case, LOSSES[case.loss].output)
        loss = make_loss(case, model)
        if mover is not None:
            mover.move_parameters(model.whole, loss)
        random = _draw_by_part(case, model)
        found: Numbers = {}
        for number, step in enumerate(case.steps):
            batch = make_batch(case, number)
            if mover is not None:
                batch = replace(batch, inputs=mover.move(batch.inputs))
            for change in step.edits:
                match change.kind:
                    case "eval":
                        evaluated = _evaluate(case, model, loss, batch, number)
                        found |= name_by_step(number, evaluated)
                    case "evaluated":
                        evaluated = _evaluate(case, model, loss, batch, number)
                        found |= name_by_step(number, _as_other(evaluated))
                    case "clip":
                        norm = clip_grad_norm_(model.whole.parameters(), _LARGEST_NORM)
                        found |= name_by_step(number, {"norm": norm.double()})
                    case _:
                        edit(change, model.parts, loss)
            if random is not None:
                random.begin_step(number)
            found |= name_by_step(number, _train(case, model, loss, batch, number))
            found |= name_by_step(number, look(model.named, loss))
    return found


def _scale(case: Case, number: int) -> float:
    is_scaled = any(change.kind == "scaled" for change in case.steps[number].edits)
    return _GRADIENT_SCALE if is_scaled else 1.0


def _draw_by_part(case: Case, model: Model) -> LayerRandom | None:
    """Let every part of the plain model draw what it draws in a pipeline with a seed."""
    if "dropout" not in case.kinds:
        return None
    random = LayerRandom(SEED, torch.device("cpu"))
    model.whole.randoms = [StageRandom(random, p, i) for i, p in enumerate(model.parts)]
    return random


def _train(case: Case, model: Model, loss: LossFunction, batch: Batch, step: int) -> Numbers:
    """One step of the plain model: gradients are added."""
    pieces = _pieces(case, batch, step)
    total, outputs = torch.zeros((), dtype=torch.float64), []
    for number, (piece, weight) in enumerate(zip(pieces, _weights(case, pieces), strict=True)):
        model.whole.microbatch = number
        with collect_losses() as added:
            output = model.whole(_fresh(piece.inputs), **piece.keywords())
        outputs.append(_scores(output).detach())
        share = len(piece.inputs) / len(batch.inputs)
        terms = [share * one.sum() for one in added]
        if weight:
            terms.append(weight * _apply(loss, output, piece).sum())
        if terms:
            value = torch.stack(terms).sum()
            torch.autograd.backward(value * _scale(case, step))
            total += value.detach()
    found: Numbers = {"loss": total, "input gradient": batch.inputs.grad}
    return found | ({"scores": torch.cat(outputs)} if outputs[0].dim() else {})


def _pieces(case: Case, batch: Batch, step: int) -> list[Batch]:
    return [batch] if is_by_rows(case) else batch.microbatches(case.steps[step].given)


def _apply(loss: LossFunction, output: object, piece: Batch) -> torch.Tensor:
    return loss(output) if piece.is_target_keyword else loss(output, piece.target)


def _evaluate(case: Case, model: Model, loss: LossFunction, batch: Batch, step: int) -> Numbers:
    pieces = _pieces(case, batch, step)
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for piece, weight in zip(pieces, _weights(case, pieces), strict=True):
            output = model.whole(_fresh(piece.inputs), **piece.keywords())
            outputs.append(_scores(output))
            if weight:
                total += weight * _apply(loss, output, piece).sum()
    found: Numbers = {"evaluated loss": total}
    # A model that makes its own loss gives a number, and as many as there are microbatches.
    return found | ({"evaluated scores": torch.cat(outputs)} if outputs[0].dim() else {})


def _scores(output: object) -> torch.Tensor:
    found = output["scores"] if isinstance(output, dict) else output
    assert isinstance(found, torch.Tensor), "scores are a tensor"
    return found


def _fresh(inputs: torch.Tensor) -> torch.Tensor:
    """The inputs in memory of their own, since a model may write to them."""
    return inputs if inputs.requires_grad else inputs.clone()


def _weights(case: Case, pieces: Sequence[Batch]) -> list[float]:
    """The share of each piece's loss in that of the batch."""
    match LOSSES[case.loss].reduction:
        case "sum":
            return [1.0] * len(pieces)
        case "found":
            assert len(pieces) == 1, "the plain model knows no weights but that of the whole batch"
            return [1.0]
        case "mean":
            counts = [float(len(piece.inputs)) for piece in pieces]
        case "count":
            counts = [count_targets(piece.target) for piece in pieces]
    return [count / sum(counts) for count in counts]


def run_split(case: Case, group: dist.ProcessGroup | None = None) -> Numbers:
    """What a pipeline gives in every step, in this process or in one of a group's."""
    with known_warnings():
        model = make_model(case, LOSSES[case.loss].output)
        loss = make_loss(case, model)
        pipeline = make_pipeline(case, model, loss, group)
        found: Numbers = {}
        for number, step in enumerate(case.steps):
            for change in step.edits:
                match change.kind:
                    case "eval":
                        evaluated = _evaluate_split(case, pipeline, number)
                        found |= name_by_step(number, evaluated)
                    case "clip":
                        norm = pipeline.clip_grad_norm_(_LARGEST_NORM)
                        found |= name_by_step(number, {"norm": as_tensor(norm)})
                    case "fail" | "break":
                        _fail_once(case, model, pipeline, number, change)
                        edit(change, model.parts, loss)
                    case "rebuilt":
                        pipeline.close()
                        pipeline = make_pipeline(case, model, loss, group)
                    case "evaluated":
                        count = 1 + (case.seed + number) % step.rows
                        evaluated = _evaluate_split(case, pipeline, number, microbatches=count)
                        found |= name_by_step(number, _as_other(evaluated))
                    case _:
                        edit(change, model.parts, loss)
            # Another pipeline, or a step that was to fail and did not, has another number.
            pipeline.random_step = number
            with ExitStack() as stack:
                for change in step.edits:
                    stack.enter_context(in_this_way(change.kind))
                found |= name_by_step(number, _train_split(case, pipeline, number))
            found |= name_by_step(number, look(*held_modules(case, model, pipeline, loss)))
    if group is not None and case.order.family == "DualPipe":
        return {name: value for name, value in found.items() if not _is_of_one_copy(name)}
    return found


def _as_other(evaluated: Numbers) -> Numbers:
    return {f"otherwise {name}": value for name, value in evaluated.items()}


def _fail_once(case: Case, model: Model, pipeline: ps.Pipeline, number: int, change: Edit) -> None:
    """Let a step fail in one part; every rank must raise that part's error."""
    failing = model.parts[change.part]
    assert isinstance(failing, PlainPart | KeywordPart), "steps fail in parts of our own"
    failing.core.fails = "fail" if change.kind == "fail" else "break"
    try:
        _train_split(case, pipeline, number)
    except ps.errors.PipelineError as error:
        if "ArithmeticError: planted in a part" not in str(error):
            raise
    else:
        # Nothing goes back through a part that is frozen, or whose labels do not count.
        if change.kind == "fail":
            raise AssertionError("a step went well although one of its parts failed")
    finally:
        failing.core.fails = ""


def _train_split(case: Case, pipeline: ps.Pipeline, number: int) -> Numbers:
    batch = make_batch(case, number)
    args, kwargs = batch.as_given(case.steps[number].given)
    edits = {change.kind for change in case.steps[number].edits}
    result = pipeline.step(
        *args,
        gradient_scale=_scale(case, number),
        return_outputs="outputs" in edits,
        record="recorded" in edits,
        **kwargs,
    )
    assert result.loss is not None, "a training step has a loss"
    found: Numbers = {"loss": as_tensor(result.loss)}
    if result.outputs is not None and LOSSES[case.loss].output != "loss":
        found["scores"] = _scores(result.outputs)
    if 0 in pipeline.modules:
        found["input gradient"] = batch.inputs.grad
    return found


def _evaluate_split(
    case: Case, pipeline: ps.Pipeline, number: int, microbatches: int | None = None
) -> Numbers:
    args, kwargs = make_batch(case, number).as_given(case.steps[number].given)
    result = pipeline.evaluate(*args, microbatches=microbatches, **kwargs)
    assert result.loss is not None, "there was a target"
    found: Numbers = {"evaluated loss": as_tensor(result.loss)}
    if result.outputs is not None and LOSSES[case.loss].output != "loss":
        found["evaluated scores"] = _scores(result.outputs)
    return found


def _is_of_one_copy(name: str) -> bool:
    """Whether each copy of a model that several ranks hold has only its microbatches' part."""
    partial = ("buffer", "input gradient", "gradient loss.", "scores")
    return any(words in name for words in partial)

"""Every name of torch's modules beside ours: there, and called in the same way.

The installed torch is the oracle. The tables below list what differs, with its reason; a name
or a difference that they lack fails the test, and so does an entry without a difference.
"""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.dropin.scripts import IS_OLD_TORCH, OURS, THEIRS

MODULES = (
    "",
    ".schedules",
    ".stage",
    ".microbatch",
    "._backward",
    "._utils",
    "._IR",
    "._debug",
    "._unflatten",
    "._schedule_visualizer",
)

# Names of torch's modules that are not ours, by what they are.
INFERENCE = "a step of torch's inference of shapes, which are learned from the first tensors here"
MISSING = {
    **dict.fromkeys(
        (
            "PipelineStage._recv_meta",
            "PipelineStage._send_meta",
            "PipelineStage._warmup_forward_vote",
            "PipelineStage._warmup_backward_result",
            "PipelineStage._compute_outputs",
            "PipelineStage._compute_input_grads",
            "PipelineStage._to_tensor",
            "PipelineStage._ones_from_metadata",
            "PipelineStage._forward_metadata_inference",
            "PipelineStage._backward_metadata_inference",
            "PipelineStage._post_metadata_inference_cleanup",
            "PipelineStage._validate_inferred_metadata",
            "PipelineStage._setup_forward_send_info",
            "_PipelineStageBase._validate_stage_tensors",
        ),
        INFERENCE,
    ),
}
# The visualizer needs no torch here, so that it has nothing of the modules that do.
WITHOUT_TORCH = "._schedule_visualizer"

MORE = "takes all that torch's takes, and more with defaults"
DIFFERENT = {
    "_RecvInfo": MORE,
    "Pipe.from_tracing": MORE,
    "ScheduleLoopedBFS": MORE,
    "_PipelineScheduleRuntime": "says by name what torch's takes as *args and **kwargs",
    **dict.fromkeys(
        (
            "ScheduleInterleaved1F1B",
            "ScheduleInterleavedZeroBubble",
            "ScheduleZBVZeroBubble",
            "ScheduleDualPipeV",
        ),
        "takes max_active_stages and unshard_lookahead on every torch",
    ),
    **dict.fromkeys(
        ("_PipelineSchedule.step", "PipelineScheduleSingle.step", "PipelineScheduleMulti.step"),
        "takes arg_mbs, kwarg_mbs and target_mbs on every torch",
    ),
    "_DTensorMeta": "an empty size stands for torch's factory of one",
    "DetachExecutor.run": "passes on what torch.fx's interpreter takes",
    "LossWrapper.forward": "names arguments that it does not use with an underscore",
    "_pipe_split": "may be called with what a traced graph calls it with",
    "_split_before_forward": "takes a module and its arguments without naming them",
    "_split_after_forward": "takes a module and its arguments without naming them",
}


# Constants of torch's modules that are not ours.
ABSENT = {
    "logger": "every module logs under its own name",
    "_debug_mask_minibatches": "turns on a check of torch's own way to split, which is not ours",
}


def load(package: str, name: str) -> ModuleType:
    return importlib.import_module(package + name)


def names_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield every name of torch's own in one of its modules, also if it is from another."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or ""
        is_own = home == module.__name__ or (
            home.startswith(THEIRS) and not module.__name__.endswith(WITHOUT_TORCH)
        )
        if is_own and not name.startswith("__") and not isinstance(value, ModuleType):
            yield name, value


def members_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, or a class with its methods."""
    yield name, value
    if inspect.isclass(value):
        for member in vars(value):
            if not member.startswith("__") and member != "_abc_impl":
                yield f"{name}.{member}", getattr(value, member)


def parameters(value: Any) -> list[tuple[str, str, str]] | None:
    """Return how something is called: names, kinds and defaults."""
    if not callable(value):
        return None
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:
        return None
    return [(p.name, p.kind.name, show(p.default)) for p in found]


def show(value: object) -> str:
    return str(getattr(value, "__qualname__", repr(value)))


def compare(name: str) -> tuple[set[str], set[str]]:
    """Names of a module of torch's that are missing here, and those that are called otherwise."""
    theirs, ours = load(THEIRS, name), load(OURS, name)
    missing, different = set(), set()
    for top, value in names_of(theirs):
        for path, member in members_of(top, value):
            mine: Any = ours
            for part in path.split("."):
                mine = getattr(mine, part, None)
            if mine is None and member is not None:
                missing.add(path)
            elif parameters(member) != parameters(mine):
                different.add(path)
    return missing, different


@pytest.mark.skipif(IS_OLD_TORCH, reason="the tables are those of torch 2.13")
@pytest.mark.parametrize("name", MODULES)
def test_every_name_of_torchs_modules_is_here_and_called_alike(name: str) -> None:
    missing, different = compare(name)
    assert sorted(missing - set(MISSING)) == []
    assert sorted(different - set(DIFFERENT)) == []


@pytest.mark.skipif(IS_OLD_TORCH, reason="the tables are those of torch 2.13")
def test_no_difference_is_listed_for_nothing() -> None:
    found = [compare(name) for name in MODULES]
    assert sorted(set(MISSING) - set().union(*(missing for missing, _ in found))) == []
    assert sorted(set(DIFFERENT) - set().union(*(other for _, other in found))) == []


def assigned_in(module: ModuleType) -> set[str]:
    """Return the names that a module's own code assigns at its top, constants and types too."""
    found: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


@pytest.mark.skipif(IS_OLD_TORCH, reason="the tables are those of torch 2.13")
@pytest.mark.parametrize("name", MODULES)
def test_constants_of_torchs_modules_are_here(name: str) -> None:
    theirs, ours = load(THEIRS, name), load(OURS, name)
    names = {name for name in assigned_in(theirs) if not name.startswith("__")}
    assert sorted(name for name in names - set(ABSENT) if not hasattr(ours, name)) == []


def test_torch_has_no_other_modules() -> None:
    theirs, ours = (pkgutil.iter_modules(load(package, "").__path__) for package in (THEIRS, OURS))
    assert {module.name for module in theirs} <= {module.name for module in ours}


# What public trainers import or replace, by module: all that torchtitan 0.3.0 and NeMo AutoModel
# 0.7.0 import, and what other public code does.
USED = {
    "": ("PipelineStage", "stage"),
    ".stage": (
        "PipelineStage",
        "_make_tensor_from_meta",
        "_normalize_model_output_as_tuple",
        "dist",
        "extract_tensor_metas",
        "stage_backward",
        "stage_backward_input",
    ),
    "._backward": (
        "_autograd_grad_for_inputs",
        "_get_grad_fn_or_grad_acc",
        "construct_reverse_graph",
        "get_param_groups",
        "reverse_closure",
        "stage_backward",
        "stage_backward_input",
        "stage_backward_weight",
    ),
    "._schedule_visualizer": ("get_schedule_ops", "visualize_schedule"),
    "._utils": (
        "InferenceMode",
        "PipeliningShapeError",
        "_StageBackwardMeta",
        "_StageForwardMeta",
    ),
    ".microbatch": (
        "BlockMask",
        "TensorChunkSpec",
        "_Replicate",
        "_shard_dict_of_args",
        "_split_block_mask",
    ),
    ".schedules": (
        "BACKWARD_INPUT",
        "BACKWARD_WEIGHT",
        "FORWARD",
        "FULL_BACKWARD",
        "OVERLAP_F_B",
        "PipelineScheduleMulti",
        "PipelineScheduleSingle",
        "PipelineStage",
        "REDUCE_GRAD",
        "RESHARD",
        "ScheduleDualPipeV",
        "ScheduleZBVZeroBubble",
        "UNSHARD",
        "WAIT_SEND_B",
        "WAIT_SEND_F",
        "_Action",
        "_PipelineContext",
        "_PipelineSchedule",
        "_PipelineScheduleRuntime",
        "_PipelineStageBase",
        "_action_regex",
        "_batch_p2p",
        "_wait_batch_p2p",
        "dist",
        "get_schedule_class",
        "merge_chunks",
        "split_args_kwargs_into_chunks",
    ),
}


@pytest.mark.parametrize("name", USED)
def test_names_that_public_programs_use_are_there_on_every_torch(name: str) -> None:
    module = load(OURS, name)
    assert [used for used in USED[name] if not hasattr(module, used)] == []


def test_the_text_of_actions_is_matched_as_in_torch() -> None:
    theirs, ours = load(THEIRS, ".schedules"), load(OURS, ".schedules")
    for text in ("2F0", "1UNSHARD", "3SEND_F1", "0REDUCE_GRAD", "7B12"):
        mine, other = (module._action_regex.match(text) for module in (ours, theirs))
        assert mine.groups() == other.groups()

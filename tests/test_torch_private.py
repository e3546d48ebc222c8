"""Each private name of torch exists in the torch that is installed, and does what we rely on."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import penstock.torch_private
from penstock import torch_private
from penstock.torch_attributes import ATTRIBUTES
from tests.dropin.scripts import IS_OLD_TORCH

SOURCE = Path(penstock.torch_private.__file__)
# Names of the compiler, which takes seconds to load. Tests of compiled stages rely on each.
OF_THE_COMPILER = (
    "CompileContext",
    "OptimizedModule",
    "TorchCompileInductorWrapper",
    "TorchCompileWrapper",
    "aot_autograd",
    "aot_eager",
    "boxed_nop",
    "compile_fx",
    "compile_fx_inner",
    "functorch_config",
    "min_cut_rematerialization_partition",
)


@contextmanager
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]  # missing in torch's stubs
        rank=0,
        world_size=1,
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Plain(torch.Tensor):
    """A tensor of a class that torch has to ask."""


class Empty(torch.Tensor):
    """A tensor that nothing can be computed with."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # typed as a plain method upstream
        cls, func: Any, _types: Any, _args: tuple[Any, ...] = (), _kwargs: Any = None
    ) -> Any:
        raise AssertionError(func)


class FunctionCalls(TorchFunctionMode):
    """Collects the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


class Operations(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Collects the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.called: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def trees_are_taken_apart_and_put_together() -> bool:
    tree = {"a": (1, torch.ones(2)), "b": [3]}
    leaves, spec = torch_private.tree_flatten(tree)
    named, _ = torch_private.tree_flatten_with_path(tree)
    again = torch_private.treespec_loads(torch_private.treespec_dumps(spec))
    return (
        type(again) is torch_private.TreeSpec
        and torch_private.tree_unflatten(leaves, again) == tree
        and torch_private.tree_leaves(tree) == leaves
        and torch_private.tree_map(type, tree)["b"] == [int]
        and torch_private.tree_map_only(int, str, tree)["b"] == ["3"]
        and torch_private.pytree.tree_structure(tree) == spec
        and [torch_private.keystr(path) for path, _ in named]
        == ["['a'][0]", "['a'][1]", "['b'][0]"]
    )


def backward_passes_have_numbers() -> bool:
    found: list[int] = []
    leaf = torch.ones((), requires_grad=True)
    leaf.register_hook(lambda _: found.append(torch_private.current_graph_task_id()))  # type: ignore[no-untyped-call]  # untyped upstream
    (2 * leaf).backward()  # type: ignore[no-untyped-call]  # untyped upstream
    return torch_private.current_graph_task_id() == -1 and found[0] >= 0


def storages_count_who_uses_them() -> bool:
    alone, shared = torch.zeros(3), torch.zeros(3)
    view = shared.view(3, 1)
    counts = [
        torch_private.storage_use_count(tensor.untyped_storage()._cdata)
        for tensor in (alone, shared, view)
    ]
    # The object that Python has of a storage counts too.
    return counts == [2, 3, 3]


def the_engine_runs_a_backward() -> bool:
    leaf = torch.ones((), requires_grad=True)
    loss = 3 * leaf
    torch_private.engine_run_backward(
        (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    return leaf.grad is not None and leaf.grad.item() == 3


def threads_of_backward_passes_are_switched_off_and_on() -> bool:
    was_enabled = torch_private.is_multithreading_enabled()
    found = []
    for wanted in (False, True):
        torch_private.set_multithreading_enabled(wanted)
        found.append(torch_private.is_multithreading_enabled())
    torch_private.set_multithreading_enabled(was_enabled)
    return found == [False, True]


def autocast_is_noticed() -> bool:
    with torch.autocast("cpu"):
        is_noticed = torch_private.is_any_autocast_enabled()
    return is_noticed and not torch_private.is_any_autocast_enabled()


def hooks_of_saved_tensors_are_noticed() -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        found = torch_private.top_saved_tensors_default_hooks(False)
    after = torch_private.top_saved_tensors_default_hooks(False)
    return (found is None, after is None) == (False, True)


def hooks_of_saved_tensors_are_put_in_place() -> bool:
    torch_private.push_saved_tensors_default_hooks(lambda x: x, lambda x: x)
    inside = torch_private.top_saved_tensors_default_hooks(False)
    torch_private.pop_saved_tensors_default_hooks()
    after = torch_private.top_saved_tensors_default_hooks(False)
    return (inside is None, after is None) == (False, True)


def modes_of_functions_are_put_in_place() -> bool:
    mode = FunctionCalls()
    private: Any = torch_private  # these have no types
    private.push_function_mode(mode)
    inside = private.function_modes()
    private.pop_function_mode()
    return mode in inside and mode not in private.function_modes()


def modes_of_operations_are_put_in_place() -> bool:
    mode = Operations()
    torch_private.push_dispatch_mode(mode)
    inside = torch_private.dispatch_modes()
    torch_private.pop_dispatch_mode()
    return mode in inside and mode not in torch_private.dispatch_modes()


def modes_are_switched_off_for_a_while() -> bool:
    with FunctionCalls() as seen, Operations():
        with torch_private.DisableTorchFunction(), torch_private.disable_current_modes():
            torch.ones(2).add(1)
            inside = torch_private.dispatch_modes()
        return not seen.called and not inside and len(torch_private.dispatch_modes()) == 1


def transforms_are_noticed() -> bool:
    found: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_private.peek_interpreter_stack() is not None)
        found.append(torch_private.is_functorch_wrapped_tensor(x))
        return x

    torch.vmap(look)(torch.ones(2))
    return found == [True, True] and torch_private.peek_interpreter_stack() is None


def a_profiler_is_noticed() -> bool:
    with torch.autograd.profiler.profile():
        is_noticed = torch_private.profiler_enabled()
    return is_noticed and not torch_private.profiler_enabled()


def switching_gradients_is_a_function_call() -> bool:
    with FunctionCalls() as seen, torch.no_grad():
        pass
    return torch_private.set_grad_enabled in seen.called


def subclasses_are_taken_as_plain() -> bool:
    tensor = torch.ones(2).as_subclass(Plain)
    with torch_private.DisableTorchFunctionSubclass():
        inside = type(tensor + 1)
    return inside is torch.Tensor and type(tensor + 1) is Plain


class Twice(torch.autograd.Function):
    """A function whose backward is Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # torch's form
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # torch's form
        return 2 * gradient


def python_backwards_are_known() -> bool:
    x = torch.ones((), requires_grad=True)
    node = Twice.apply(x).grad_fn  # type: ignore[no-untyped-call]  # untyped upstream
    return isinstance(node, torch_private.FunctionBase) and not isinstance(
        (2 * x).grad_fn, torch_private.FunctionBase
    )


def a_tensor_without_memory_has_a_shape() -> bool:
    made = torch_private.make_wrapper_subclass(Empty, (2, 3), dtype=torch.float16)
    return (type(made), made.shape, made.dtype) == (Empty, (2, 3), torch.float16)


def operations_have_types() -> bool:
    operations: list[Any] = [torch.ops.aten.add.Tensor, torch.ops.higher_order.cond]
    kinds = (torch_private.OpOverload, torch_private.HigherOrderOperator)
    return all(map(isinstance, operations, kinds))


def operations_are_seen() -> bool:
    with Operations() as seen:
        torch.ones(2).add(1)
    return torch.ops.aten.add.Tensor in seen.called


def lists_of_tensors_are_changed_at_once() -> bool:
    values = [torch.full((2,), 6.0)]
    torch_private.foreach_div_(values, 2)
    halves = values[0].tolist()
    torch_private.foreach_copy_(values, [torch.ones(2)])
    ones = values[0].tolist()
    torch_private.foreach_zero_(values)
    return (halves, ones, values[0].tolist()) == ([3.0, 3.0], [1.0, 1.0], [0.0, 0.0])


def hooks_of_all_modules_are_in_tables() -> bool:
    before = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    after = nn.modules.module.register_module_forward_hook(lambda *_: None, with_kwargs=True)
    found = (
        before.id in torch_private.global_forward_pre_hooks,
        after.id in torch_private.global_forward_hooks,
        after.id in torch_private.global_forward_hooks_with_kwargs,
    )
    before.remove()
    after.remove()
    # Torch leaves this entry behind, and then warns about global hooks in every compiled module.
    torch_private.global_forward_hooks_with_kwargs.pop(after.id, None)
    return all(found) and not torch_private.global_forward_hooks


def a_setting_of_sizes_is_changed_for_a_while() -> bool:
    config: Any = torch_private.symbolic_shape_config
    with config.patch(backed_size_oblivious=True):
        inside = config.backed_size_oblivious
    return inside is True and config.backed_size_oblivious is False


def an_export_leaves_notes_that_can_be_cleared() -> bool:
    torch.export.export(torch.nn.Linear(2, 2), (torch.randn(3, 2),))
    has_notes = bool(torch_private.notes_of_last_export)
    torch_private.notes_of_last_export.clear()
    torch.export.export(torch.nn.Linear(2, 2), (torch.randn(3, 2),))
    return has_notes and bool(torch_private.notes_of_last_export)


def sizes_are_written_as_python() -> bool:
    expression = sympy.Symbol("s0", integer=True) + 1
    return str(torch_private.PythonPrinter().doprint(expression)) in ("s0 + 1", "1 + s0")


def failures_of_tracing_are_errors() -> bool:
    kinds = (
        torch_private.DataDependentOutputException,
        torch_private.DynamicOutputShapeException,
        torch_private.UnsupportedOperatorException,
    )
    return all(issubclass(kind, RuntimeError) for kind in kinds)


def groups_have_a_default_and_a_store() -> bool:
    with group_of_one() as group:
        torch_private.get_default_store().set("key", "value")
        return (
            torch_private.get_default_group() is group
            and torch_private.get_default_store().get("key") == b"value"
        )


def stores_hold_values() -> bool:
    whole: Any = torch_private.TCPStore("127.0.0.1", 0, 1, True)
    part = torch_private.PrefixStore("part", whole)
    part.set("key", "value")
    return isinstance(whole, torch_private.Store) and whole.get("part/key") == b"value"


def replicated_modules_are_known() -> bool:
    with group_of_one():
        module = torch_private.replicate(nn.Linear(2, 2))
        module(torch.ones(1, 2))
        wrapper = torch_private.replicate.state(module)._ddp
        return isinstance(module, torch_private.ReplicatedModule) and isinstance(
            wrapper, DistributedDataParallel
        )


def a_place_in_a_file_has_three_parts() -> bool:
    found = torch_private.StorageInfo("file", 8, 16)
    return (found.relative_path, found.offset, found.length) == ("file", 8, 16)


def a_level_of_checks_is_known() -> bool:
    return torch_private.get_debug_level() in set(torch_private.DebugLevel.__members__.values())


def layouts_of_meshes_are_made_from_their_parts() -> bool:
    layouts: Any = torch_private.mesh_layouts
    with group_of_one():
        found: Any = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))._layout
    # Up to torch 2.12 a layout is one shape with its strides, then one of each per dimension.
    if not hasattr(found, "axes"):
        return bool(layouts._MeshLayout(found.shape, found.stride) == found)
    axes = [layouts._FlatLayout(axis.shape, axis.stride) for axis in found.axes]
    return bool(layouts._MeshLayout(axes) == found)


def pools_of_graphs_have_functions() -> bool:
    # What they do needs a failed capture; the tests of CUDA graphs make one.
    return hasattr(torch._C, "_cuda_endAllocateToPool") == hasattr(torch._C, "_cuda_releasePool")


CHECKS: dict[Callable[[], bool], tuple[str, ...]] = {
    trees_are_taken_apart_and_put_together: (
        "TreeSpec",
        "keystr",
        "pytree",
        "tree_flatten",
        "tree_flatten_with_path",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_unflatten",
        "treespec_dumps",
        "treespec_loads",
    ),
    backward_passes_have_numbers: ("current_graph_task_id",),
    storages_count_who_uses_them: ("storage_use_count",),
    the_engine_runs_a_backward: ("engine_run_backward",),
    threads_of_backward_passes_are_switched_off_and_on: (
        "is_multithreading_enabled",
        "set_multithreading_enabled",
    ),
    autocast_is_noticed: ("is_any_autocast_enabled",),
    hooks_of_saved_tensors_are_noticed: ("top_saved_tensors_default_hooks",),
    hooks_of_saved_tensors_are_put_in_place: (
        "pop_saved_tensors_default_hooks",
        "push_saved_tensors_default_hooks",
    ),
    modes_of_functions_are_put_in_place: (
        "function_modes",
        "pop_function_mode",
        "push_function_mode",
    ),
    modes_of_operations_are_put_in_place: (
        "dispatch_modes",
        "pop_dispatch_mode",
        "push_dispatch_mode",
    ),
    modes_are_switched_off_for_a_while: ("DisableTorchFunction", "disable_current_modes"),
    transforms_are_noticed: (
        "peek_interpreter_stack",
        "is_functorch_wrapped_tensor",
        "get_functorch_unwrapped",
    ),
    a_profiler_is_noticed: ("profiler_enabled",),
    switching_gradients_is_a_function_call: ("set_grad_enabled",),
    subclasses_are_taken_as_plain: ("DisableTorchFunctionSubclass",),
    python_backwards_are_known: ("FunctionBase",),
    a_tensor_without_memory_has_a_shape: ("make_wrapper_subclass",),
    operations_have_types: ("OpOverload", "HigherOrderOperator"),
    operations_are_seen: ("TorchDispatchMode",),
    lists_of_tensors_are_changed_at_once: ("foreach_copy_", "foreach_div_", "foreach_zero_"),
    hooks_of_all_modules_are_in_tables: (
        "global_forward_hooks",
        "global_forward_hooks_with_kwargs",
        "global_forward_pre_hooks",
    ),
    a_setting_of_sizes_is_changed_for_a_while: ("symbolic_shape_config",),
    an_export_leaves_notes_that_can_be_cleared: ("notes_of_last_export",),
    sizes_are_written_as_python: ("PythonPrinter",),
    failures_of_tracing_are_errors: (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedOperatorException",
    ),
    groups_have_a_default_and_a_store: ("get_default_group", "get_default_store"),
    replicated_modules_are_known: ("ReplicatedModule", "replicate"),
    stores_hold_values: ("PrefixStore", "Store", "TCPStore"),
    a_place_in_a_file_has_three_parts: ("StorageInfo",),
    a_level_of_checks_is_known: ("DebugLevel", "get_debug_level"),
    layouts_of_meshes_are_made_from_their_parts: ("mesh_layouts",),
    pools_of_graphs_have_functions: ("end_allocate_to_pool", "release_pool"),
}
# What is only compared or called with values that a test cannot make here.
SMALL_CHECKS: dict[str, Callable[[], bool]] = {
    "AsyncCollectiveTensor": lambda: hasattr(torch_private.AsyncCollectiveTensor, "trigger_wait"),
    "ReplicateModule": lambda: issubclass(torch_private.ReplicateModule, FSDPModule),
    "grouped_mm": lambda: callable(torch_private.grouped_mm),
    "is_traceable_wrapper_subclass": lambda: (
        not torch_private.is_traceable_wrapper_subclass(torch.ones(1))
    ),
}


def test_every_name_is_checked() -> None:
    checked = [name for names in CHECKS.values() for name in names]
    expected = {*checked, *SMALL_CHECKS, *OF_THE_COMPILER}
    assert set(torch_private.__all__) == expected


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_names_do_what_we_rely_on(check: Callable[[], bool]) -> None:
    assert check()


@pytest.mark.parametrize("name", SMALL_CHECKS)
def test_names_are_what_we_take_them_for(name: str) -> None:
    assert SMALL_CHECKS[name]()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", OF_THE_COMPILER)
def test_names_of_the_compiler_exist(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_unknown_names_raise_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'something_else'"):
        _ = torch_private.something_else


def test_importing_the_module_loads_neither_the_compiler_nor_fsdp() -> None:
    tree = ast.parse(SOURCE.read_text())
    imported = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
    ]
    heavy = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.distributed")
    assert [module for module in imported if module.startswith(heavy)] == []


def objects_with_attributes() -> dict[str, list[Any]]:
    """Return one or more objects of each class in the table, made without a process group."""
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    scores, labels = torch.ones(2, 3, requires_grad=True), torch.tensor([0, 1])
    difference = F.mse_loss(scores, torch.ones(2, 3))
    entropy = F.nll_loss(scores, labels)
    return {
        "Tensor": [torch.ones(2)],
        "UntypedStorage": [torch.ones(2).untyped_storage()],
        "Module": [nn.Linear(2, 2)],
        "OptimizedModule": [compiled],
        "CompileContext": [compiled.dynamo_ctx],
        "backend": [compiled.dynamo_ctx.callback],
        "Function": [Twice],
        "disabled function": [torch.compiler.disable(len)],  # type: ignore[no-untyped-call]  # untyped upstream
        "Node": [difference.grad_fn, entropy.grad_fn],
        "NllLossBackward0": [entropy.grad_fn],
        "MseLossBackward0": [difference.grad_fn],
        "torch.ops": [torch.ops],
        "torch.ops.aten": [torch.ops.aten],
        "OpOverload": [torch.ops.aten.add.Tensor],
        "GradScaler": [GradScaler("cpu")],
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_objects_have_the_attributes_that_we_use() -> None:
    for name, objects in objects_with_attributes().items():
        for one in objects:
            missing = [attribute for attribute in ATTRIBUTES[name] if not hasattr(one, attribute)]
            assert missing == [], name


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_objects_of_process_groups_have_the_attributes_that_we_use() -> None:
    with group_of_one() as group:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        replicated = torch_private.replicate(nn.Linear(2, 2))
        replicated(torch.ones(1, 2))
        sharded: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
        sharded(torch.ones(1, 2)).sum().backward()
        state = sharded._get_fsdp_state()
        stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        found = {
            "DeviceMesh": mesh,
            "DTensor": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
            "ProcessGroup": group,
            "Options": group._get_backend(torch.device("cpu")).options,
            "Backend": group._get_backend(torch.device("cpu")),
            "replicate.state": torch_private.replicate.state(replicated),
            "FSDPModule": sharded,
            "FSDPState": state,
            "FSDPParam": groups[0].fsdp_params[0],
            "pipelining stage": stage,
            "pipelining schedule": ScheduleGPipe(stage, 1),
        }
        missing = {
            (name, attribute)
            for name, one in found.items()
            for attribute in ATTRIBUTES[name]
            if not hasattr(one, attribute)
        }
    # FSDP renamed the group of its parameters in torch 2.12; stages of 2.13 have two more.
    renamed = {("FSDPState", "_fsdp_param_group"), ("FSDPState", "_fsdp_param_groups")}
    added = {("pipelining stage", "_resolve_peer_global_rank")}
    added |= {("pipelining stage", "_runtime_validate")}
    assert len(missing & renamed) <= 1
    assert missing - renamed <= (added if IS_OLD_TORCH else set())


def test_versions_count_writes_and_memory_is_known() -> None:
    tensor = torch.ones(4)
    before = tensor._version
    view = tensor[:2]
    view.add_(1)
    assert tensor._version == before + 1
    assert view._base is tensor
    assert view._is_view()
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert torch.ones(4).untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_hooks_of_a_module_and_of_a_parameter_are_in_tables() -> None:
    module = nn.Linear(2, 2)
    assert module.weight._backward_hooks is None
    assert getattr(module.weight, "_post_accumulate_grad_hooks", 0) is None
    module.weight.register_hook(partial(print, end=""))  # type: ignore[no-untyped-call]  # untyped upstream
    module.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]  # untyped upstream
    assert module.weight._backward_hooks
    assert module.weight._post_accumulate_grad_hooks
    before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    after = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    assert list(module._forward_pre_hooks) == list(module._forward_pre_hooks_with_kwargs)
    assert list(module._forward_pre_hooks) == [before.id]
    assert list(module._forward_hooks) == [after.id]
    assert list(module._forward_hooks_with_kwargs) == [after.id]
    assert list(module._forward_hooks_always_called) == [after.id]


def test_a_loss_keeps_its_reduction_and_what_it_counted() -> None:
    scores, labels = torch.ones(3, 3, requires_grad=True), torch.tensor([0, 1, -100])
    entropy: Any = F.nll_loss(scores, labels).grad_fn
    assert (entropy.name(), entropy._saved_reduction) == ("NllLossBackward0", 1)
    assert entropy._saved_total_weight.item() == 2
    difference: Any = F.mse_loss(scores, torch.ones(3, 3), reduction="sum").grad_fn
    assert (difference.name(), difference._saved_reduction) == ("MseLossBackward0", 2)
    assert difference._saved_target.numel() == 9


def test_a_quotient_keeps_its_divisor() -> None:
    quotient: Any = (torch.ones(3, requires_grad=True) / 8).grad_fn
    assert (quotient.name(), float(quotient._saved_other)) == ("DivBackward0", 8)


def test_a_product_keeps_its_factor_and_a_mean_its_size() -> None:
    given, factor = torch.ones(3, requires_grad=True), torch.tensor(8)
    first: Any = (given * 8).grad_fn
    second: Any = (factor * given).grad_fn
    assert first.name() == second.name() == "MulBackward0"
    assert (float(first._saved_other), float(second._saved_self)) == (8, 8)
    mean: Any = given.mean().grad_fn
    assert (mean.name(), mean._saved_self_sym_numel) == ("MeanBackward0", 3)


def test_nodes_are_numbered_in_the_order_of_the_forward() -> None:
    x = torch.ones((), requires_grad=True)
    first = 2 * x
    second = first + 1
    assert first.grad_fn is not None
    assert second.grad_fn is not None
    assert first.grad_fn._sequence_nr() < second.grad_fn._sequence_nr()


def test_a_function_calls_its_backward_through_the_class_of_its_nodes() -> None:
    class Thrice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # torch's form
            return 3 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  # torch's form
            raise AssertionError("replaced below")

    node: Any = getattr(Thrice, "_backward_cls")  # noqa: B009  # made by its metaclass
    node.apply = lambda _, gradient: 3 * gradient
    x = torch.ones((), requires_grad=True)
    Thrice.apply(x).backward()  # type: ignore[no-untyped-call]  # untyped upstream
    assert x.grad is not None
    assert x.grad.item() == 3


def test_the_schema_of_an_operation_says_what_it_writes_to() -> None:
    schema = torch.ops.aten.add_.Tensor._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"]
    assert torch.ops.aten.add_.Tensor._overloadname == "Tensor"

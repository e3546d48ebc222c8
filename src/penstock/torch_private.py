"""Private names of torch: every one that Penstock uses, under a public name, and what it is for.

Torch may change these in any version. No other module names them, so that this file and its test
are all that a new version has to be compared with. Torch 2.11 to 2.13 have all of them, except
where a comment says otherwise. Functions on hot paths are torch's own objects, bound when this
module is imported; what takes long to load is looked up when it is first imported from here.

Private attributes of torch's objects are in `torch_attributes`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

# Settings of symbolic sizes: lets a traced model take sizes of 0 and 1.
from torch.fx.experimental import _config as symbolic_shape_config

# Hooks of all modules, as `register_module_forward_hook` and its like register them.
from torch.nn.modules.module import (
    _global_forward_hooks as global_forward_hooks,
)
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs as global_forward_hooks_with_kwargs,
)
from torch.nn.modules.module import (
    _global_forward_pre_hooks as global_forward_pre_hooks,
)

# The modes of this thread that see functions of torch, outermost first, and how to add one to
# another thread's.
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode

# Trees of tuples, lists, dicts and what users register; `torch.utils` has no public form of it.
from torch.utils import _pytree as pytree

# A mode that sees every operation below autograd; and whether a subclass is made of tensors. A
# context without any; the modes of this thread, outermost first; how to add one to another's.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        DebugLevel,
        PrefixStore,
        Store,
        TCPStore,
        get_debug_level,
    )
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop
    from torch._dynamo.eval_frame import OptimizedModule
    from torch._dynamo.eval_frame import _TorchDynamoContext as CompileContext
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )
    from torch.distributed import _mesh_layout as mesh_layouts
    from torch.distributed._composable.replicate import DDP as ReplicatedModule  # noqa: N811  # a class
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.distributed_c10d import _get_default_group as get_default_group
    from torch.distributed.distributed_c10d import _get_default_store as get_default_store
    from torch.fx.experimental.proxy_tensor import (
        _FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT as notes_of_last_export,  # noqa: N811  # a dict
    )
    from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "AsyncCollectiveTensor",
    "CompileContext",
    "DataDependentOutputException",
    "DebugLevel",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FunctionBase",
    "HigherOrderOperator",
    "OpOverload",
    "OptimizedModule",
    "PrefixStore",
    "PythonPrinter",
    "ReplicateModule",
    "ReplicatedModule",
    "StorageInfo",
    "Store",
    "TCPStore",
    "TorchCompileInductorWrapper",
    "TorchCompileWrapper",
    "TorchDispatchMode",
    "TreeSpec",
    "UnsupportedOperatorException",
    "aot_autograd",
    "aot_eager",
    "boxed_nop",
    "compile_fx",
    "compile_fx_inner",
    "current_graph_task_id",
    "disable_current_modes",
    "dispatch_modes",
    "end_allocate_to_pool",
    "engine_run_backward",
    "foreach_copy_",
    "foreach_div_",
    "foreach_zero_",
    "function_modes",
    "functorch_config",
    "get_debug_level",
    "get_default_group",
    "get_default_store",
    "get_functorch_unwrapped",
    "global_forward_hooks",
    "global_forward_hooks_with_kwargs",
    "global_forward_pre_hooks",
    "grouped_mm",
    "is_any_autocast_enabled",
    "is_functorch_wrapped_tensor",
    "is_multithreading_enabled",
    "is_traceable_wrapper_subclass",
    "keystr",
    "make_wrapper_subclass",
    "mesh_layouts",
    "min_cut_rematerialization_partition",
    "notes_of_last_export",
    "peek_interpreter_stack",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_saved_tensors_default_hooks",
    "profiler_enabled",
    "push_dispatch_mode",
    "push_function_mode",
    "push_saved_tensors_default_hooks",
    "pytree",
    "release_pool",
    "replicate",
    "set_grad_enabled",
    "set_multithreading_enabled",
    "storage_use_count",
    "symbolic_shape_config",
    "top_saved_tensors_default_hooks",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
]

# How backward passes are started, with all their options.
engine_run_backward = torch.autograd.Variable._execution_engine.run_backward
# Whether backward passes on a device run in a thread of that device, and how to change that.
is_multithreading_enabled = torch._C._is_multithreading_enabled
set_multithreading_enabled = torch._C._set_multithreading_enabled
# The number of the backward pass that runs in this thread, or -1.
current_graph_task_id = torch._C._current_graph_task_id
# How many objects share a storage, by its `_cdata`.
storage_use_count = torch._C._storage_Use_Count
# Whether autocast is on for any kind of device.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# The hooks that `saved_tensors_hooks` has set last, or None.
top_saved_tensors_default_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# How `saved_tensors_hooks` sets and removes its hooks.
push_saved_tensors_default_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_default_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
# The innermost transform of `torch.func` that runs now, or None.
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
# Whether a tensor belongs to a transform of `torch.func`, and the tensor in it.
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
get_functorch_unwrapped = torch._C._functorch.get_unwrapped
# Whether a profiler is running.
profiler_enabled = torch._C._autograd._profiler_enabled
# What `no_grad` and its like call; a TorchFunctionMode sees the calls.
set_grad_enabled = torch._C._set_grad_enabled
# A context in which subclasses of Tensor are handled as plain tensors.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# A context in which neither subclasses of Tensor nor modes see functions of torch.
DisableTorchFunction = torch._C.DisableTorchFunction
# The class of backward nodes that come from a Python `autograd.Function`.
FunctionBase = torch._C._FunctionBase
# Makes a tensor of a subclass that has a shape and a device, but no memory.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
# The type of `torch.ops.aten.add.Tensor` and its like, and of operations that call graphs.
OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
# Products of many pairs of matrices in one call, as mixtures of experts use them.
grouped_mm = torch._grouped_mm
# One kernel for a list of tensors.
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_zero_ = torch._foreach_zero_
# What `torch.compile` makes of the name of a backend, and of its own.
TorchCompileWrapper = torch._TorchCompileWrapper
TorchCompileInductorWrapper = torch._TorchCompileInductorWrapper


def end_allocate_to_pool(device: int, pool: Any) -> None:
    """Stop allocating to a memory pool, which a failed capture of a CUDA graph leaves running."""
    torch._C._cuda_endAllocateToPool(device, pool)


def release_pool(device: int, pool: Any) -> None:
    """Give up one use of a memory pool of CUDA graphs."""
    torch._C._cuda_releasePool(device, pool)


# Names that take long to load, with the module and the name there.
_LATE = {
    # The result of a functional collective that may still be under way.
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives AsyncCollectiveTensor",
    # The process group of `init_process_group`, and the store that its ranks met in.
    "get_default_group": "torch.distributed.distributed_c10d _get_default_group",
    "get_default_store": "torch.distributed.distributed_c10d _get_default_store",
    # Stores that ranks meet in; public at run time, but not in torch's type stubs.
    "PrefixStore": "torch.distributed PrefixStore",
    "Store": "torch.distributed Store",
    "TCPStore": "torch.distributed TCPStore",
    # How much torch is to check, from TORCH_DISTRIBUTED_DEBUG; public at run time, as above.
    "DebugLevel": "torch.distributed DebugLevel",
    "get_debug_level": "torch.distributed get_debug_level",
    # The classes of a mesh's layout, to make the layout that another rank has described.
    "mesh_layouts": "torch.distributed _mesh_layout",
    # The composable form of DDP: the function, and the class that it gives a module.
    "replicate": "torch.distributed._composable.replicate replicate",
    "ReplicatedModule": "torch.distributed._composable.replicate DDP",
    # The form of FSDP2 that shards nothing.
    "ReplicateModule": "torch.distributed._composable.replicate_with_fsdp ReplicateModule",
    # Where in a file of a checkpoint a tensor is.
    "StorageInfo": "torch.distributed.checkpoint.filesystem _StorageInfo",
    # Why a model cannot be traced.
    "DataDependentOutputException": "torch._subclasses.fake_tensor DataDependentOutputException",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor DynamicOutputShapeException",
    "UnsupportedOperatorException": "torch._subclasses.fake_tensor UnsupportedOperatorException",
    # What torch notes of an export until the next one, which keeps the exported model alive.
    "notes_of_last_export": (
        "torch.fx.experimental.proxy_tensor _FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT"
    ),
    # Writes expressions of symbolic sizes as Python.
    "PythonPrinter": "torch.utils._sympy.printers PythonPrinter",
    # What `torch.compile` puts around a module, and how it calls the compiler.
    "OptimizedModule": "torch._dynamo.eval_frame OptimizedModule",
    "CompileContext": "torch._dynamo.eval_frame _TorchDynamoContext",
    # Backends, and the parts that backends are made of.
    "aot_autograd": "torch._dynamo.backends.common aot_autograd",
    "aot_eager": "torch._dynamo.backends.debugging aot_eager",
    "boxed_nop": "torch._dynamo.backends.debugging boxed_nop",
    "compile_fx": "torch._inductor.compile_fx compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx compile_fx_inner",
    # Divides a traced graph into forward and backward.
    "min_cut_rematerialization_partition": (
        "torch._functorch.partitioners min_cut_rematerialization_partition"
    ),
    "functorch_config": "torch._functorch config",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LATE[name].partition(" ")
    found = globals()[name] = _find(module, attribute)
    return found


def _find(module: str, attribute: str) -> Any:
    found = getattr(import_module(module), attribute, None)
    # A module inside of a package is an attribute of it only after it was imported.
    return import_module(f"{module}.{attribute}") if found is None else found

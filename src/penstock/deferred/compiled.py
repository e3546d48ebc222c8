"""Compiled code in a stage that splits its backward.

`torch.compile` passes the graph of a backward to a backend. This backend cuts it in two first
(`backward_graph.py`). The first half is compiled and runs as part of autograd. Instead of weight
gradients it keeps the operands of their products, and W computes the products.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

import penstock.torch_private as torch_private
from penstock.deferred.backward_graph import CutBackward, GraphProduct, cut_backward
from penstock.deferred.own_pass import deferred_work
from penstock.deferred.work import add_gradient, add_product, has_hooks
from penstock.torch_private import (
    CompileContext,
    OptimizedModule,
    TorchCompileInductorWrapper,
    TorchCompileWrapper,
    aot_autograd,
    aot_eager,
    boxed_nop,
    functorch_config,
    min_cut_rematerialization_partition,
)

__all__ = ["captures_graphs", "split_compiled"]

# A function that takes its inputs as a list, and empties it.
_Compiled: TypeAlias = Callable[[list[Any]], Sequence[Any]]


def split_compiled(modules: Iterable[nn.Module]) -> bool:
    """Make the backwards of compiled modules defer weight work; return whether any of them can.

    The modules are compiled again with the same settings when they run next, but without the CUDA
    graphs of `mode="reduce-overhead"`, whose values do not outlive the next microbatch.
    """
    can_wait = [_split_module(module) for module in modules]
    return any(can_wait)


def captures_graphs(compiled: Any) -> bool:
    """Return whether a compiled module or function runs as CUDA graphs, which reuse memory.

    By its own settings, by those of all compiled code, or because its backend does nothing else.
    """
    is_module = isinstance(compiled, nn.Module)
    context = _context_of_module(compiled) if is_module else _context_of(compiled)
    backend: Any = None if context is None else _innermost(context.callback)
    if isinstance(backend, TorchCompileInductorWrapper):
        # What holds for all compiled code, with its own settings in place of some of them.
        settings: Any = backend.get_compiler_config()  # type: ignore[no-untyped-call]  # untyped upstream
        return bool(settings["triton.cudagraphs"])
    return getattr(backend, "compiler_name", None) == "cudagraphs"


def _context_of_module(module: nn.Module) -> CompileContext | None:
    is_wrapper = isinstance(module, OptimizedModule)
    return _context_of(module if is_wrapper else module._compiled_call_impl)


def _split_module(module: nn.Module) -> bool:
    context = _context_of_module(module)
    backend = None if context is None else _in_halves(_innermost(context.callback))
    if context is None or backend is None:
        return False
    target = module._orig_mod if isinstance(module, OptimizedModule) else module._call_impl
    again: Any = torch.compile(
        target, backend=backend, dynamic=context._dynamic, fullgraph=context.fullgraph
    )
    if isinstance(module, OptimizedModule):
        module.dynamo_ctx = again.dynamo_ctx
        module._initialize()
    else:
        module._compiled_call_impl = again
    return True


def _context_of(compiled: Any) -> CompileContext | None:
    """Return the settings of `torch.compile`; a compiled function has them in its closure."""
    if isinstance(compiled, OptimizedModule):
        return compiled.dynamo_ctx
    held = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((item for item in held if isinstance(item, CompileContext)), None)


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend.compiler_fn if isinstance(backend, TorchCompileWrapper) else backend


def _in_halves(backend: Any) -> Callable[..., Any] | None:
    """Return the same backend with the backward cut, or None if the backend is not supported."""
    if isinstance(backend, TorchCompileInductorWrapper):
        return _Inductor(tuple(sorted(backend.config.items())))
    if backend is aot_eager:
        return _AotEager()
    return backend if isinstance(backend, _Inductor | _AotEager) else None


@dataclass(frozen=True)
class _Inductor:
    """Torch's default backend with the user's settings, but with backwards cut in two."""

    config: tuple[tuple[str, Any], ...]

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # A cached backward would not be cut, and donated buffers could not be kept.
        settings = {"enable_autograd_cache": False, "donated_buffer": False}
        with functorch_config.patch(settings):
            # Looked up here, since inductor takes seconds to load.
            return torch_private.compile_fx(
                graph,
                inputs,
                inner_compile=partial(_compile_cut, torch_private.compile_fx_inner),
                config_patches={**dict(self.config), "triton.cudagraphs": False},
            )


@dataclass(frozen=True)
class _AotEager:
    """Torch's `aot_eager`, which compiles nothing, but with backwards cut in two."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compile_graph = aot_autograd(
            fw_compiler=boxed_nop,
            bw_compiler=_run_cut,
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )
        settings = {"enable_autograd_cache": False, "donated_buffer": False}
        with functorch_config.patch(settings):
            return compile_graph(graph, inputs)


def _compile_cut(
    compile_graph: Callable[..., Any],
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    **options: Any,
) -> Any:
    """Compile a graph for inductor; of a backward, only the first half."""
    cut = cut_backward(graph) if options.get("is_backward") else None
    if cut is None:
        return compile_graph(graph, inputs, **options)
    return _FirstHalf(cut, compile_graph(cut.first_half, inputs, **options))


def _run_cut(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    cut = cut_backward(graph)
    if cut is None:
        return boxed_nop(graph, inputs)
    return _FirstHalf(cut, boxed_nop(cut.first_half, inputs))


class _FirstHalf:
    """The compiled first half of a backward, which defers the products where that is allowed."""

    def __init__(self, cut: CutBackward, run: _Compiled) -> None:
        # Torch's mark of functions that take one list and empty it.
        self._boxed_call = True
        self._cut, self._run = cut, run
        self._wanted = sorted(
            {n for product in cut.products for n in product.operands if n < cut.num_inputs}
        )

    def __call__(self, inputs: list[Any]) -> list[Any]:
        cut = self._cut
        weights = [inputs[product.weight] for product in cut.products]
        operands = {number: inputs[number] for number in self._wanted}
        outputs = self._run(inputs)
        gradients = list(outputs[: cut.num_outputs])
        operands.update(enumerate(outputs[cut.num_outputs :], start=cut.num_inputs))
        waiting = deferred_work()
        for product, weight in zip(cut.products, weights, strict=True):
            work = _ProductWork(weight, product, [operands[n] for n in product.operands])
            if waiting is not None and _can_wait(weight):
                waiting.append(work)
            else:
                gradients[product.output] = work.make()
        return gradients


def _can_wait(weight: torch.Tensor) -> bool:
    """Whether autograd would only add this gradient to that of the weight."""
    return type(weight) is nn.Parameter and weight.requires_grad and not has_hooks(weight)


@dataclass(slots=True)
class _ProductWork:
    """One deferred product, with its operands."""

    weight: torch.Tensor
    product: GraphProduct
    operands: list[torch.Tensor]

    def make(self) -> torch.Tensor:
        """Compute the gradient."""
        made = self.product.make(*self.operands)
        gradient: torch.Tensor = made[0] @ made[1] if self.product.gives_factors else made
        return gradient

    def finish(self) -> None:
        """Compute the product and add it to the weight's gradient."""
        if self.product.gives_factors:
            add_product(self.weight, *self.product.make(*self.operands))
        else:
            add_gradient(self.weight, self.make())

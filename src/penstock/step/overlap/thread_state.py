"""What torch keeps per thread, so that work runs in another thread as it would in this one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.torch_private import (
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_default_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_default_hooks,
    top_saved_tensors_default_hooks,
)

__all__ = ["ThreadState"]


@dataclass(frozen=True, slots=True, eq=False)
class ThreadState:
    """The settings of a thread: gradients, autocast, modes, hooks, and on CUDA the stream.

    The default device is one of the function modes.
    """

    is_grad_enabled: bool
    is_inference: bool
    casts: Sequence[tuple[str, torch.dtype]]
    caches_casts: bool
    function_modes: Sequence[Any]
    dispatch_modes: Sequence[Any]
    saved_tensor_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    stream: torch.cuda.Stream | None

    @classmethod
    def of_this_thread(cls) -> "ThreadState":
        """Return the settings of the thread that asks."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped upstream
        return cls(
            is_grad_enabled=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            casts=[(kind, torch.get_autocast_dtype(kind)) for kind in kinds],
            caches_casts=torch.is_autocast_cache_enabled(),
            function_modes=function_modes(),  # type: ignore[no-untyped-call]  # untyped upstream
            dispatch_modes=dispatch_modes(),
            saved_tensor_hooks=top_saved_tensors_default_hooks(True),
            stream=torch.cuda.current_stream() if has_device else None,
        )

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Give this thread, which has torch's defaults, the same settings meanwhile."""
        with ExitStack() as stack:
            if self.stream is not None:
                # All members use one stream: see `docs/design.md`.
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
                # A new thread has no context of the device until it asks something of it, and
                # torch warns if the first one to ask is cuBLAS. This is cheap, and allowed while
                # a graph is captured.
                torch.cuda.is_current_stream_capturing()
            if self.is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
            if self.saved_tensor_hooks is not None:
                push_saved_tensors_default_hooks(*self.saved_tensor_hooks)
                stack.callback(pop_saved_tensors_default_hooks)
            for kind, dtype in self.casts:
                cast = torch.autocast(kind, dtype, cache_enabled=self.caches_casts)
                stack.enter_context(cast)
            # Pushed, not entered: some modes change themselves when they are entered.
            for mode in self.function_modes:
                push_function_mode(mode)  # type: ignore[no-untyped-call]  # untyped upstream
                stack.callback(pop_function_mode)
            for mode in self.dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            yield

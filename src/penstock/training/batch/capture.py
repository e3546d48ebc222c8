"""The refusal of a CUDA graph that a user records around a step."""

import torch

__all__ = ["find_capture"]


def find_capture(device: torch.device, *, is_shared: bool) -> str | None:
    """Return an error if the current stream is being captured and several ranks take the step."""
    if not is_shared or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    return (
        "a step of several ranks must not be captured as a CUDA graph, because its ranks agree "
        "on every step; leave the capture, and give options=ps.RunOptions(cuda_graphs=True)"
    )

"""The state of the whole model, gathered from all ranks on some, a tensor at a time."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import finalize, ref

import torch
import torch.distributed as dist

from penstock.errors import ArgumentError, PipelineError
from penstock.parallel.dtensor import as_whole
from penstock.ranks.abortable_sockets import Connections
from penstock.ranks.control import Control, cannot
from penstock.ranks.faults import LinkLostError
from penstock.ranks.private_groups import PrivateGroup, open_gloo
from penstock.splitting.original import refuse_state
from penstock.splitting.pipe import Pipe

__all__ = ["copy_state", "gather_state", "guard_original", "to_host"]


def copy_state(state: Mapping[str, Any], shared_names: Mapping[str, str]) -> dict[str, Any]:
    """Copy the state of all stages to host memory; names of one parameter have one copy."""
    copies = {n: to_host(value) for n, value in state.items() if n not in shared_names}
    return {name: copies[shared_names.get(name, name)] for name in state}


def gather_state(
    state: Mapping[str, Any],
    shared_names: Mapping[str, str],
    control: Control,
    group: dist.ProcessGroup,
    connections: Connections,
    takers: Sequence[int] = (0,),
) -> dict[str, Any]:
    """Return every rank's state on the ranks that are its `takers`, and nothing on the others.

    All ranks call this. `shared_names` has the first name of every parameter with several: it
    is sent once. Other ranks hold one more tensor than before, the takers hold them all.
    """
    with control.together(cannot("give its part of the model")):
        table = _describe(state, shared_names)
        table["takers"] = _check_takers(takers, control.size)
    everyone = control.gather(table)
    if any(other["takers"] != table["takers"] for other in everyone):
        raise PipelineError("every rank must name the same ranks to gather on")
    gloo = open_gloo(group, connections)
    mine = control.rank
    gathered: dict[str, Any] = {}
    try:
        for rank, name, (shape, dtype) in _once_each(everyone):
            if rank == mine:
                value = to_host(state[name])
                gathered |= {name: value} if mine in takers else {}
                for taker in takers:
                    if taker != mine:
                        _exchange(gloo, taker, value, is_sent=True)
            elif mine in takers:
                gathered[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                _exchange(gloo, rank, gathered[name], is_sent=False)
    except Exception:
        # The others wait for messages from here.
        connections.abort()
        raise
    # Connections stay open until everything has arrived.
    control.gather_bytes(b"-")
    return _complete(gathered, everyone, shared_names) if mine in takers else {}


def _check_takers(takers: Sequence[int], ranks: int) -> list[int]:
    found = sorted(set(takers))
    if not found or not all(0 <= taker < ranks for taker in found):
        raise ArgumentError(
            f"ranks must name some of the ranks 0 to {ranks - 1} (got {list(takers)}); the whole "
            "model is gathered on them"
        )
    return found


def _describe(state: Mapping[str, Any], shared_names: Mapping[str, str]) -> dict[str, Any]:
    """Describe what this rank has: names, shapes and types of tensors, and other values."""
    tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in state.items() if name not in tensors}
    for name, value in plain.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise PipelineError(
                f"{name!r} must be a tensor or a JSON value to be gathered (got "
                f"{type(value).__name__}); let get_extra_state return one of these"
            ) from error
    return {
        "names": list(state),
        "plain": plain,
        "tensors": {
            name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
            for name, value in tensors.items()
            if name not in shared_names
        },
    }


def _once_each(everyone: list[Any]) -> Iterator[tuple[int, str, tuple[list[int], str]]]:
    """Yield every tensor with the first rank that has it, in an order that all ranks know."""
    seen: set[str] = set()
    for rank, table in enumerate(everyone):
        for name, form in table["tensors"].items():
            if name not in seen:
                seen.add(name)
                yield rank, name, form


def _complete(
    gathered: dict[str, Any], everyone: list[Any], shared_names: Mapping[str, str]
) -> dict[str, Any]:
    """Add values that are not tensors, and further names of parameters that have several."""
    whole: dict[str, Any] = {}
    for table in everyone:
        for name in table["names"]:
            if name in table["plain"]:
                whole.setdefault(name, table["plain"][name])
            else:
                whole[name] = gathered[shared_names.get(name, name)]
    return whole


def to_host(value: Any, *, always_copy: bool = True) -> Any:
    """Copy a tensor to host memory, a sharded one as a whole; its ranks do this together."""
    if not isinstance(value, torch.Tensor):
        return value
    return (
        as_whole(value).detach().to("cpu", copy=always_copy, memory_format=torch.contiguous_format)
    )


def _exchange(gloo: PrivateGroup, peer: int, tensor: torch.Tensor, *, is_sent: bool) -> None:
    """Send a tensor of host memory as bytes, or receive it in place."""
    if tensor.numel() == 0:
        return
    data = tensor.reshape(-1).view(torch.uint8)
    start = gloo.send if is_sent else gloo.recv
    try:
        start([data], peer, 0).wait()
    except RuntimeError as error:
        raise LinkLostError(
            f"rank {peer} was lost while the model was gathered: {error}"
        ) from error


class _Trained(Protocol):
    """The part of a pipeline that matters here."""

    @property
    def random_step(self) -> int:
        """How many training steps it has done."""


def guard_original(pipe: Pipe, owner: _Trained, held: Collection[int]) -> None:
    """Refuse the state of the model that was split, once its pipeline has trained a part of it.

    `owner` is the pipeline, `held` the parts that it has here. The refusal ends with the pipeline.
    """
    model = None if pipe.original is None else pipe.original()
    if model is None or len(held) == pipe.num_stages:
        return
    pipeline, stages, count = ref(owner), sorted(held), pipe.num_stages

    def explain() -> str | None:
        trained = pipeline()
        if trained is None or trained.random_step == 0:
            return None
        return (
            f"this process has trained the stages {stages} of {count}, so that the model's "
            "own state is that of a half-trained model; call pipeline.full_state_dict() on every "
            "rank and save what the first gets, as by model.save_pretrained(folder, "
            "state_dict=state) or torch.save(state, file), or save with penstock.Checkpoints"
        )

    finalize(owner, refuse_state(model, explain).remove).atexit = False

"""Tensors over a mesh, described, split, merged and sent, on the only rank of a mesh."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from penstock.dropin._utils import (
    InferenceMode,
    PipeliningMetadataError,
    _derive_grad_metas,
    _DTensorMeta,
    _MeshCache,
    _StageMeta,
    _TensorMeta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_metadata,
    validate_static_arg_grad_correspondence,
)
from penstock.dropin.microbatch import TensorChunkSpec, _split_tensor, merge_chunks
from penstock.dropin.stage import PipelineStage

CPU = torch.device("cpu")
BY_ROWS = TensorChunkSpec(0)
PLACEMENTS = [Shard(0), Replicate()]


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    request.getfixturevalue("alone")
    return init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))


def spread(mesh: DeviceMesh, placement: Any, rows: int = 8, *, trained: bool = False) -> DTensor:
    values = torch.arange(4.0 * rows).view(rows, 4).requires_grad_(trained)
    return distribute_tensor(values, mesh, [placement])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_tensor_made_from_a_description_lies_as_described(
    mesh: DeviceMesh, placement: Any
) -> None:
    meta = _DTensorMeta.from_dtensor(spread(mesh, placement))
    assert (meta.global_shape, meta.placements) == (torch.Size([8, 4]), (placement,))
    assert meta.mesh_cache_key == (("tp",), mesh._layout)
    made = meta.to_dtensor(CPU, mesh)
    assert _DTensorMeta.from_dtensor(made).get_diff(meta) == []


def test_descriptions_over_a_mesh_differ_from_plain_ones_and_by_placement(
    mesh: DeviceMesh,
) -> None:
    rows, whole = (_DTensorMeta.from_dtensor(spread(mesh, one)) for one in PLACEMENTS)
    assert rows.get_diff(whole) == ["placements mismatch: (Shard(dim=0),) vs (Replicate(),)"]
    plain = torch.zeros(8, 4)
    mixed = ["type mismatch: _DTensorMeta vs _TensorMeta"]
    assert validate_metadata("x", rows, plain) == mixed
    assert rows.get_diff(_TensorMeta.from_tensor(plain)) == mixed
    kinds = [type(meta) for meta in extract_tensor_metas((spread(mesh, Shard(0)), plain))]
    assert kinds == [_DTensorMeta, _TensorMeta]
    with pytest.raises(PipeliningMetadataError, match="DTensor"):
        _TensorMeta.from_tensor(spread(mesh, Shard(0)))


def test_integers_over_a_mesh_never_ask_for_gradients(mesh: DeviceMesh) -> None:
    form = (torch.Size([8, 4]), (4, 1), torch.int32, True)
    whole: Any = (torch.Size([8, 4]), (4, 1), (Shard(0),), ("tp",), mesh._layout)
    assert not _DTensorMeta(*form, *whole).to_dtensor(CPU, mesh).requires_grad


def test_meshes_are_remembered_from_tensors(mesh: DeviceMesh) -> None:
    cache, key = _MeshCache(), (("tp",), mesh._layout)
    cache.update_from_tensors((spread(mesh, Shard(0)), torch.zeros(2), None))
    assert (list(cache), cache.get_mesh(key)) == ([key], mesh)


def test_local_parts_are_taken_with_or_without_their_graph(mesh: DeviceMesh) -> None:
    value = spread(mesh, Shard(0), trained=True)
    parts = [to_local_if_dtensor(value), to_local_if_dtensor(value, detach=True)]
    assert [(type(part), part.requires_grad) for part in parts] == [
        (torch.Tensor, True),
        (torch.Tensor, False),
    ]


def test_gradients_over_a_mesh_are_found_out_unless_given(mesh: DeviceMesh) -> None:
    value = _DTensorMeta.from_dtensor(spread(mesh, Shard(0), trained=True))
    assert _derive_grad_metas((value,)) == (None,)
    ends = ((value,), (value,))
    cases = [(ends, True), ((*ends, (value,)), True), ((*ends, (value,), (value,)), True)]
    found = [InferenceMode.needs_dynamic(_StageMeta(*metas), back) for metas, back in cases]
    assert [*found, InferenceMode.needs_dynamic(_StageMeta(*ends), False)] == [
        True,
        True,
        False,
        False,
    ]


def test_example_gradients_lie_over_a_mesh_as_their_tensors_do(mesh: DeviceMesh) -> None:
    value, gradient = spread(mesh, Shard(0), trained=True), spread(mesh, Replicate())
    validate_static_arg_grad_correspondence(0, (value,), (gradient,), is_input=True)
    with pytest.raises(PipeliningMetadataError, match="must be a DTensor"):
        validate_static_arg_grad_correspondence(0, (value,), (torch.zeros(8, 4),), is_input=True)


def test_a_gradient_over_a_mesh_is_sent_only_where_it_is_counted_on(mesh: DeviceMesh) -> None:
    # It was sent whatever the stage before had made room for.
    gradient = spread(mesh, Replicate())
    stage: Any = PipelineStage(nn.Identity(), 1, 2, CPU)
    stage.has_backward, stage.chunks, stage.grad_send_info = True, 1, [0]
    stage._stage_meta = _StageMeta(input_grads=(None,))
    stage.bwd_cache[0] = (gradient,)
    with pytest.raises(PipeliningMetadataError, match="DTensor grad metadata cannot be derived"):
        stage.get_bwd_send_ops(0)
    stage._stage_meta = _StageMeta(input_grads=(_DTensorMeta.from_dtensor(gradient),))
    stage.bwd_cache[0] = (None,)
    (sent,) = stage.get_bwd_send_ops(0)
    assert torch.equal(sent.tensor, torch.zeros(8, 4))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("rows", "chunks"), [(8, 2), (7, 3)])
def test_chunks_over_a_mesh_lie_as_the_whole_and_merge_to_it(
    mesh: DeviceMesh, placement: Any, rows: int, chunks: int
) -> None:
    whole = spread(mesh, placement, rows)
    parts: Any = _split_tensor(whole, BY_ROWS, chunks)
    assert [(part.placements, part.device_mesh) for part in parts] == [
        ((placement,), mesh)
    ] * chunks
    assert sum(part.shape[0] for part in parts) == rows
    (merged,) = merge_chunks([(part,) for part in parts], (BY_ROWS,))
    assert (merged.placements, merged.shape) == ((placement,), whole.shape)
    assert torch.equal(merged.to_local(), whole.to_local())


def test_chunks_that_lie_differently_are_not_merged(mesh: DeviceMesh) -> None:
    rows, whole = (spread(mesh, placement) for placement in PLACEMENTS)
    with pytest.raises(AssertionError, match="placement mismatch"):
        merge_chunks([(rows,), (whole,)], (BY_ROWS,))
    with pytest.raises(AssertionError, match="mix"):
        merge_chunks([(rows,), (torch.zeros(8, 4),)], (BY_ROWS,))

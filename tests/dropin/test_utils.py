import pytest
import torch
from torch.fx import Graph

from penstock.dropin._debug import friendly_debug_info, map_debug_info
from penstock.dropin._utils import (
    InferenceMode,
    PipeInfo,
    PipeliningMetadataError,
    PipeliningShapeError,
    _derive_grad_metas,
    _DTensorMeta,
    _MeshCache,
    _StageMeta,
    _TensorMeta,
    extract_tensor_metas,
    flatten_args,
    flatten_args_detach,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
    validate_metadata,
    validate_static_arg_grad_correspondence,
    validate_tensors_metadata,
)

META = _TensorMeta(torch.Size([4, 8]), (8, 1), torch.float32, requires_grad=True)
SPREAD = _DTensorMeta(
    shape=torch.Size([4, 8]),
    stride=(8, 1),
    dtype=torch.float32,
    requires_grad=True,
    global_shape=torch.Size([8, 8]),
    global_stride=(8, 1),
    mesh_dim_names=("tp",),
)


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 4), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_a_tensor_made_from_a_description_has_that_description(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    meta = _TensorMeta.from_tensor(tensor.requires_grad_(dtype.is_floating_point))
    assert _TensorMeta.from_tensor(meta.to_tensor("cpu")) == meta


def test_integers_never_ask_for_gradients() -> None:
    meta = _TensorMeta(torch.Size([2]), (1,), torch.int64, requires_grad=True)
    assert not meta.to_tensor("cpu").requires_grad


def test_differences_are_listed_field_by_field() -> None:
    other = _TensorMeta(torch.Size([4, 9]), (9, 1), torch.float16, requires_grad=False)
    assert META.get_diff(other) == [
        "shape mismatch: torch.Size([4, 8]) vs torch.Size([4, 9])",
        "stride mismatch: (8, 1) vs (9, 1)",
        "dtype mismatch: torch.float32 vs torch.float16",
    ]
    assert META.get_diff(META) == SPREAD.get_diff(SPREAD) == []
    assert SPREAD.get_diff(META) == ["type mismatch: _DTensorMeta vs _TensorMeta"]


def test_gradients_of_plain_tensors_are_like_the_tensors() -> None:
    frozen = _TensorMeta(torch.Size([2]), (1,), torch.float32, requires_grad=False)
    expected = _TensorMeta(META.shape, META.stride, META.dtype, requires_grad=False)
    assert _derive_grad_metas((META, frozen, SPREAD)) == (expected, None, None)


@pytest.mark.parametrize(
    ("meta", "has_backward", "expected"),
    [
        (_StageMeta(), True, True),
        (_StageMeta(inputs=(META,)), True, True),
        (_StageMeta((META,), (META,)), True, False),
        (_StageMeta((SPREAD,), (SPREAD,)), False, False),
        (_StageMeta((SPREAD,), (SPREAD,)), True, True),
        (_StageMeta((SPREAD,), (SPREAD,), input_grads=(SPREAD,)), True, True),
        (_StageMeta((SPREAD,), (SPREAD,), output_grads=(SPREAD,)), True, True),
        (_StageMeta((SPREAD,), (SPREAD,), (SPREAD,), (SPREAD,)), True, False),
    ],
)
def test_a_stage_finds_out_only_what_the_user_left_open(
    meta: _StageMeta, has_backward: bool, expected: bool
) -> None:
    assert InferenceMode.needs_dynamic(meta, has_backward) is expected
    assert meta.has_any() == (meta != _StageMeta())


def test_an_unknown_mesh_is_asked_for_once() -> None:
    key, asked = (("tp",), None), []

    def get_mesh(names: tuple[str, ...], layout: object) -> object:
        asked.append((names, layout))
        return "mesh"

    cache = _MeshCache(get_mesh_cb=get_mesh)  # type: ignore[arg-type]  # any object will do
    assert (key in cache, len(cache)) == (False, 0)
    assert [cache.get_mesh(key), cache.get_mesh(key)] == ["mesh", "mesh"]
    assert (asked, key in cache, len(cache)) == ([key], True, 1)
    with pytest.raises(PipeliningMetadataError, match="no get_mesh was given"):
        _MeshCache().get_mesh(key)
    with pytest.raises(PipeliningMetadataError, match="get_mesh gave None"):
        _MeshCache(lambda *_: None).get_mesh(key)  # type: ignore[arg-type]  # wrong


def test_tensors_are_described_and_normalized() -> None:
    x = torch.zeros(2)
    meta = _TensorMeta.from_tensor(x)
    assert extract_tensor_metas(None) is None
    assert extract_tensor_metas((x, None), allow_none=True) == (meta, None)
    with pytest.raises(PipeliningMetadataError):
        extract_tensor_metas((x, None))
    assert validate_and_normalize_to_tuple(None) is None
    assert validate_and_normalize_to_tuple(x) == (x,)
    assert validate_and_normalize_to_tuple([x, x]) == (x, x)
    assert validate_and_normalize_to_tuple((x, None), allow_none=True) == (x, None)
    for wrong in ((x, "text"), (x, None), 42):
        with pytest.raises(PipeliningMetadataError):
            validate_and_normalize_to_tuple(wrong)


def test_local_parts_of_plain_tensors_are_the_tensors() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert to_local_if_dtensor(x) is x
    assert not to_local_if_dtensor(x, detach=True).requires_grad


def test_differences_are_returned_warned_of_or_raised() -> None:
    x = torch.zeros(4, 9)
    found = validate_metadata("here", META, x)
    assert [text.split(":")[0] for text in found] == ["shape mismatch", "stride mismatch"]
    assert validate_metadata("here", META, torch.zeros(4, 8)) == []
    assert validate_metadata("here", SPREAD, x) == ["type mismatch: _DTensorMeta vs _TensorMeta"]
    with pytest.raises(PipeliningMetadataError, match="here: shape mismatch"):
        validate_metadata("here", META, x, raise_on_mismatch=True)
    with pytest.warns(UserWarning, match="here: Metadata mismatch: shape mismatch"):
        validate_metadata("here", META, x, warn_on_mismatch=True)


def test_several_tensors_are_compared_one_by_one() -> None:
    good, bad = torch.zeros(4, 8), torch.zeros(4, 9)
    assert validate_tensors_metadata("here", (META, None), (good, None)) == []
    for actual, text in (
        ((good,), "1 tensors where 2 were expected"),
        ((None, None), r"\[0\]: nothing where a tensor was expected"),
        ((good, good), r"\[1\]: a tensor where nothing was expected"),
        ((bad, None), r"\[0\]: shape mismatch"),
    ):
        with pytest.raises(PipeliningMetadataError, match=text):
            validate_tensors_metadata("here", (META, None), actual)
    with pytest.warns(UserWarning, match="1 tensors where 2 were expected"):
        validate_tensors_metadata(
            "here", (META, META), (good,), raise_on_mismatch=False, warn_on_mismatch=True
        )


def test_example_gradients_fit_their_tensors() -> None:
    x, trained = torch.zeros(2), torch.zeros(2, requires_grad=True)
    validate_static_arg_grad_correspondence(0, (x, trained), (None, x), is_input=True)
    with pytest.warns(UserWarning, match=r"input_grads\[0\] is None"):
        validate_static_arg_grad_correspondence(0, (trained,), (None,), is_input=True)
    with pytest.raises(PipeliningMetadataError, match="output_grads has 2 entries for 1"):
        validate_static_arg_grad_correspondence(0, (x,), (None, None), is_input=False)
    with pytest.raises(PipeliningMetadataError, match="requires no gradient"):
        validate_static_arg_grad_correspondence(0, (x,), (x,), is_input=True)


def test_stages_go_round_or_there_and_back() -> None:
    assert list(generate_stage_to_rank_mapping(2, 5).values()) == [0, 1, 0, 1, 0]
    forth_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    v = generate_stage_to_rank_mapping(4, 16, style="v")
    assert (list(v), list(v.values())) == (list(range(16)), forth_and_back * 2)
    assert generate_rank_to_stage_mapping(2, 6, style="v") == {0: [0, 3, 4], 1: [1, 2, 5]}
    with pytest.raises(ValueError, match="multiple of 4"):
        generate_stage_to_rank_mapping(4, 6, style="v")
    with pytest.raises(ValueError, match="'zigzag'"):
        generate_stage_to_rank_mapping(4, 8, style="zigzag")


def test_trees_are_flattened_and_cut_off() -> None:
    x = torch.zeros(2, requires_grad=True)
    y = x * 2
    assert flatten_args({"a": (y, 3)}) == [y, 3]
    tree, leaves = flatten_args_detach({"a": (y, 3)})
    assert tree == {"a": (leaves[0], 3)}
    assert (leaves[0].grad_fn, leaves[0].requires_grad) == (None, True)


def test_messages_describe_tensors_without_their_content() -> None:
    x = torch.zeros(2)
    text = "Tensor(torch.Size([2]), grad=False, dtype=torch.float32)"
    assert friendly_debug_info(x) == text
    assert map_debug_info(({"a": x}, 3)) == ({"a": text}, "3")


def test_names_of_older_versions_are_there() -> None:
    assert PipeliningShapeError is PipeliningMetadataError
    assert PipeInfo(Graph(), 2, has_loss_and_backward=False).num_stages == 2

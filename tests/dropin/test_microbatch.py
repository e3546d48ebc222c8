import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_flatten

from penstock.dropin.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _Replicate,
    _shard_dict_of_args,
    _split_block_mask,
    _split_tensor,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)


def test_the_values_of_a_dict_are_split_as_the_spec_of_each_says() -> None:
    given, specs = {"x": torch.arange(4), "n": 3}, {"n": _Replicate(), "x": TensorChunkSpec(0)}
    parts = _shard_dict_of_args(given, specs, 2)
    assert [(part["x"].tolist(), part["n"]) for part in parts] == [([0, 1], 3), ([2, 3], 3)]


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("chunks", range(1, 6))
def test_splitting_and_merging_is_the_identity(rows: int, chunks: int) -> None:
    args = (torch.arange(rows), {"a": torch.randn(rows, 2)})
    kwargs = {"b": [torch.randn(rows, 3)]}
    split_args, split_kwargs = split_args_kwargs_into_chunks(args, kwargs, chunks)
    assert len(split_args) == len(split_kwargs) == min(rows, chunks)
    sizes = [len(chunk[0]) for chunk in split_args]
    assert sizes == [len(part) for part in torch.tensor_split(args[0], min(rows, chunks))]
    torch.testing.assert_close(merge_chunks(split_args, None), args)
    torch.testing.assert_close(merge_chunks(split_kwargs, None), kwargs)


def test_what_is_not_a_tensor_is_given_to_every_microbatch() -> None:
    one = torch.tensor(3.0)
    split_args, split_kwargs = split_args_kwargs_into_chunks(
        (torch.arange(4), None, "text"), {"n": 3, "zero_dimensions": one}, 2
    )
    assert [tree_flatten(chunk)[0][1:] for chunk in split_args] == [[None, "text"]] * 2
    assert split_kwargs == [{"n": 3, "zero_dimensions": one}] * 2


def test_nothing_is_split_into_as_many_nothings() -> None:
    assert split_args_kwargs_into_chunks((), None, 3) == ([()] * 3, [{}] * 3)


def test_specs_say_along_which_dimension() -> None:
    x, y = torch.arange(6).view(2, 3), torch.arange(6).view(3, 2)
    (first, second), kwargs = split_args_kwargs_into_chunks(
        (x,),
        {"y": y, "whole": y},
        chunks=2,
        args_chunk_spec=TensorChunkSpec.from_tuple((1,)),
        kwargs_chunk_spec={"whole": _Replicate(), **TensorChunkSpec.from_dict({"y": 1})},
    )
    torch.testing.assert_close((first[0], second[0]), (x[:, :2], x[:, 2:]))
    torch.testing.assert_close(kwargs[1], {"y": y[:, 1:], "whole": y})


def test_specs_that_do_not_fit_are_refused() -> None:
    x = torch.arange(4)
    with pytest.raises(AssertionError, match=r"\['y'\] and their chunk specs \['z'\] differ"):
        split_args_kwargs_into_chunks((), {"y": x}, 2, None, {"z": TensorChunkSpec(0)})
    with pytest.raises(AssertionError, match="2 values have 1 chunk specs"):
        split_args_kwargs_into_chunks((x, x), None, 2, (TensorChunkSpec(0),))
    with pytest.raises(ValueError, match="a value of type int has the chunk spec"):
        split_args_kwargs_into_chunks((3,), None, 2, (TensorChunkSpec(0),))
    with pytest.raises(AssertionError, match=r"shape \(4,\) has 4 rows for 5 microbatches"):
        _split_tensor(x, TensorChunkSpec(0), 5)


def test_chunks_of_a_leaf_keep_their_gradients_and_pass_them_on() -> None:
    x = torch.arange(4.0).requires_grad_()
    chunks = _split_tensor(x, TensorChunkSpec(0), 2)
    torch.autograd.backward(chunks[0].sum() + 2 * chunks[1].sum())
    torch.testing.assert_close([c.grad for c in chunks], [torch.ones(2), torch.full((2,), 2.0)])
    torch.testing.assert_close(x.grad, torch.tensor([1.0, 1.0, 2.0, 2.0]))
    with torch.no_grad():
        assert len(_split_tensor(x, TensorChunkSpec(0), 2)) == 2


def test_block_masks_are_split_by_rows_and_masked_as_before() -> None:
    limits = torch.tensor([1, 2, 3])

    def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        del h
        return (q >= k) & (k < 32 * limits[b])

    whole = create_block_mask(mask, 3, 1, 128, 128, device="cpu", BLOCK_SIZE=32)
    ((first,), (second,)), _ = split_args_kwargs_into_chunks((whole,), None, 2)
    dense = whole.to_dense()
    torch.testing.assert_close(torch.cat([first.to_dense(), second.to_dense()]), dense)
    zero = torch.tensor(0)
    seen = [int(second.mask_mod(zero, zero, torch.tensor(127), torch.tensor(k))) for k in (95, 96)]
    assert seen == [1, 0]
    with pytest.raises(AssertionError, match="3 rows for 4 microbatches"):
        _split_block_mask(whole, 4)
    with pytest.raises(AssertionError, match="split along dimension 0"):
        split_args_kwargs_into_chunks((whole,), None, 2, (TensorChunkSpec(1),))
    shared = create_block_mask(mask, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=32)
    (chunk, same), _ = split_args_kwargs_into_chunks((shared,), None, 2)
    assert chunk[0] is same[0] is shared


def test_outputs_are_merged_as_their_specs_say() -> None:
    outputs = [(torch.ones(2, 1), 3.0, "same"), (torch.zeros(2, 2), 4.0, "same")]
    spec = (TensorChunkSpec(1), _CustomReducer(0.0, max), None)
    merged = merge_chunks(outputs, spec)
    torch.testing.assert_close(merged[0], torch.tensor([[1.0, 0.0, 0.0]] * 2))
    assert merged[1:] == (4.0, "same")
    losses = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    assert merge_chunks(losses, {"loss": sum_reducer}) == {"loss": torch.tensor(3.0)}


def test_outputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError, match="the values 1 and 2"):
        merge_chunks([1, 2], _Replicate())
    with pytest.raises(ValueError, match="microbatch 1 has 2 values for 1 chunk specs"):
        merge_chunks([(torch.ones(1),), (torch.ones(1), 2)], (TensorChunkSpec(0),))


def test_specs_show_their_dimension() -> None:
    assert repr(TensorChunkSpec.from_dict({"y": 1})) == "{'y': TensorChunkSpec(1)}"

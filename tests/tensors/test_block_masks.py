"""Block masks of flex attention, alone and in a step."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import penstock as ps
from penstock.errors import BatchError
from penstock.step.microbatches import count_rows, split_batch
from penstock.tensors.block_masks import BlockMask, has_rows, split_mask

ROWS, LENGTH = 4, 32


def mask_of(lengths: torch.Tensor) -> BlockMask:
    """Return a mask in which each row sees as many positions as its length says."""

    def sees(b: torch.Tensor, _h: torch.Tensor, _q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k < lengths[b]

    return create_block_mask(sees, len(lengths), 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


def test_parts_see_what_their_rows_saw() -> None:
    whole = mask_of(torch.tensor([3, 20, 32, 9, 17]))
    parts = split_mask(whole, [3, 2])
    assert [part.shape[0] for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), whole.to_dense())
    one = torch.tensor(1)
    assert parts[1].mask_mod(one, one, one, torch.tensor(16))
    assert not parts[1].mask_mod(one, one, one, torch.tensor(17))


def test_a_mask_for_all_rows_is_given_to_every_microbatch() -> None:
    mask = mask_of(torch.tensor([7]))
    assert not has_rows(mask)
    assert split_batch(mask, 3) == [mask] * 3
    assert count_rows(mask) is None


def test_a_mask_has_as_many_rows_as_the_batch() -> None:
    mask = mask_of(torch.tensor([3, 20, 32, 9]))
    assert count_rows(mask) == ROWS
    with pytest.raises(BatchError, match="have 5 and 4 rows"):
        split_batch((torch.ones(5, 2), mask), 2)
    with pytest.raises(BatchError, match="use at most 4 microbatches"):
        split_batch(mask, 5)
    assert split_batch(ps.Shared(mask), 2) == [mask, mask]


class Attention(nn.Module):
    """Attention over a batch whose rows see different positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        heads = self.inside(x).unsqueeze(1)
        found = flex_attention(heads, heads, heads, block_mask=mask)
        assert isinstance(found, torch.Tensor)
        return x + found.squeeze(1)


# Every microbatch got the mask of the whole batch. Attention reads a mask by the row's place in
# its microbatch, so that all but the first were masked like the first, without an error.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_microbatch_is_masked_like_its_rows() -> None:
    torch.manual_seed(0)
    stages = [Attention(), Attention()]
    x = torch.randn(ROWS, LENGTH, 16, dtype=torch.float64)
    mask, target = mask_of(torch.tensor([3, 20, 32, 9])), torch.zeros_like(x)
    # Torch has no backward of it on a processor.
    with torch.no_grad():
        expected = nn.functional.mse_loss(stages[1](stages[0](x, mask), mask), target)
    with ps.Pipeline(stages, "1F1B", microbatches=4, loss=nn.functional.mse_loss) as pipeline:
        found = pipeline.evaluate(x, mask=mask, target=target)
    assert found.loss == pytest.approx(expected.item(), rel=1e-12)

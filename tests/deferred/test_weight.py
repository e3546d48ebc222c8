"""Products with weights of all kinds: equal to plain autograd, and which weights are deferred."""

import copy
import gc
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.deferred.call_nodes import FunctionCall
from penstock.errors import PipelineError
from tests.deferred.halves import (
    MICROBATCHES,
    Apply,
    Split,
    assert_same,
    check,
    prepared,
    random_values,
    run_plain,
    run_split,
    waiting_weights,
)

# Warnings about kernels of even length, about gradients with other strides than their weights, and
# of torch.compile, which reads `.grad` of all inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]

ROWS, WIDTH, WORDS = 6, 4, 7
ROWS_OF_NUMBERS = (ROWS, WIDTH)


@dataclass(frozen=True)
class Kind:
    """A module, the shape of its input (None for words), and the weights that are deferred."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] | None
    waiting: frozenset[str]

    def values(self) -> list[torch.Tensor]:
        if self.shape is not None:
            return random_values(*self.shape)
        return [torch.randint(WORDS, (3, ROWS)) for _ in range(MICROBATCHES)]


def _kind(build: Callable[[], nn.Module], shape: tuple[int, ...] | None, *waiting: str) -> Kind:
    return Kind(build, shape, frozenset(waiting))


class Weights(nn.Module):
    """Weights by name, and a function of them and the input."""

    def __init__(
        self, function: Callable[[Any, torch.Tensor], Any], **shapes: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _square(function: Callable[[Any, torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Weights(function, w=(WIDTH, WIDTH))


def _stack(function: Callable[[Any, torch.Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Weights(function, up=(3, WIDTH, 5), down=(3, WIDTH, 5))


def _routed_experts(m: Any, x: torch.Tensor) -> Any:
    """Send each row to one expert, all rows of an expert at once; an expert may get none."""
    chosen = x.sum(dim=-1).abs().mul(2).long() % 3
    output = torch.zeros_like(x)
    for expert in range(3):
        rows = torch.where(chosen == expert)[0]
        if len(rows):
            hidden = (x[rows] @ m.up[expert]).tanh()
            output = output.index_add(0, rows, F.linear(hidden, m.down[expert]))
    return output


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def _attention(*inputs: Callable[[torch.Tensor], torch.Tensor], **settings: Any) -> nn.Module:
    """Return attention whose query, key and value are functions of one input."""

    def attend(m: Any, x: torch.Tensor) -> Any:
        changed = {change: change(x) for change in inputs}
        return m.a(*(changed[change] for change in inputs))[0]

    return Apply(attend, a=nn.MultiheadAttention(WIDTH, 2, **settings))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _half(x: torch.Tensor) -> torch.Tensor:
    return x[..., : WIDTH // 2]


def _tied_to_layer() -> nn.Module:
    module = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS, bias=False)
    )
    module[2].weight = module[0].weight
    return module


def _embed(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH, **settings), nn.Tanh())


def _with_hook() -> nn.Module:
    module = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1))
    module.get_parameter("0.weight").register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]  # upstream
    return module


def _half_frozen() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 2, 1).requires_grad_(False), nn.Conv1d(2, 2, 1))


KINDS = {
    "conv1d": _kind(lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2), (2, 2, 8), "weight"),
    "conv1d_with_uneven_padding": _kind(lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 2, 8)),
    "conv1d_of_one": _kind(lambda: nn.Conv1d(2, 3, 3, padding="valid"), (2, 8), "weight"),
    "conv2d": _kind(
        lambda: nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=1, groups=2), (2, 2, 6, 6), "weight"
    ),
    "conv2d_around": _kind(
        lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", bias=False),
        (2, 2, 6, 6),
        "weight",
    ),
    "conv2d_mirrored": _kind(
        lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 2, 6, 6), "weight"
    ),
    "depthwise_conv2d": _kind(lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6), "weight"),
    "conv3d": _kind(lambda: nn.Conv3d(1, 2, 2, stride=2), (1, 1, 4, 4, 4), "weight"),
    "convs": _kind(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1)),
        (2, 2, 8),
        "0.weight",
        "2.weight",
    ),
    "transposed_conv1d": _kind(
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 2, 5), "weight"
    ),
    "transposed_conv2d": _kind(
        lambda: nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, dilation=2, groups=2),
        (2, 2, 3, 3),
        "weight",
    ),
    "transposed_conv3d": _kind(
        lambda: nn.ConvTranspose3d(1, 2, 2, bias=False), (1, 1, 3, 3, 3), "weight"
    ),
    "embedding": _kind(_embed, None, "0.weight"),
    "embedding_with_padding": _kind(lambda: _embed(padding_idx=2), None, "0.weight"),
    "embedding_with_padding_from_the_end": _kind(lambda: _embed(padding_idx=-1), None, "0.weight"),
    "embedding_by_frequency": _kind(lambda: _embed(scale_grad_by_freq=True), None, "0.weight"),
    "embedding_of_limited_norm": _kind(lambda: _embed(max_norm=1.0), None),
    "sparse_embedding": _kind(lambda: _embed(sparse=True), None),
    "embedding_bag": _kind(
        lambda: nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH), nn.Linear(WIDTH, 2)), None, "1.weight"
    ),
    "tied_to_a_layer": _kind(_tied_to_layer, None, "0.weight"),
    "tied_by_a_function": _kind(
        lambda: Apply(
            lambda m, x: F.linear(m.words(x).tanh(), m.words.weight),
            words=nn.Embedding(WORDS, WIDTH),
        ),
        None,
        "words.weight",
    ),
    "tied_and_penalised": _kind(
        lambda: Apply(
            lambda m, x: (m.words(x), m.words.weight.square().sum()),
            words=nn.Embedding(WORDS, WIDTH),
        ),
        None, "words.weight",
    ),
    "group_norm": _kind(lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "instance_norm": _kind(lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "layer_norm_of_matrices": _kind(lambda: nn.LayerNorm((5, WIDTH)), (2, 5, WIDTH)),
    "batch_norm": _kind(lambda: nn.BatchNorm2d(2), (3, 2, 4, 4)),
    "bilinear": _kind(
        lambda: Apply(lambda m, x: m.f(x, x.tanh()), f=nn.Bilinear(WIDTH, WIDTH, 3)),
        ROWS_OF_NUMBERS,
    ),
    "attention": _kind(
        lambda: _attention(_same, _same, _same),
        (5, 2, WIDTH),
        "a.in_proj_weight",
        "a.out_proj.weight",
    ),
    "attention_to_others": _kind(
        lambda: _attention(_same, torch.tanh, torch.tanh, add_bias_kv=True, dropout=0.5),
        (5, 2, WIDTH),
        "a.in_proj_weight",
        "a.out_proj.weight",
    ),
    "attention_to_three": _kind(
        lambda: _attention(_same, torch.tanh, torch.sin, batch_first=True),
        (2, 5, WIDTH),
        "a.in_proj_weight",
        "a.out_proj.weight",
    ),
    "attention_of_other_widths": _kind(
        lambda: _attention(_same, _half, _half, kdim=WIDTH // 2, vdim=WIDTH // 2),
        (5, 2, WIDTH),
        "a.q_proj_weight",
        "a.k_proj_weight",
        "a.v_proj_weight",
        "a.out_proj.weight",
    ),
    "encoder_layer": _kind(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, batch_first=True),
        (2, 5, WIDTH),
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    ),
    "decoder_layer": _kind(
        lambda: Apply(
            lambda m, x: m.f(x, x.tanh()),
            f=nn.TransformerDecoderLayer(WIDTH, 2, 8, dropout=0, norm_first=True),
        ),
        (5, 2, WIDTH),
        *(
            f"f.{attention}.{weight}"
            for attention in ("self_attn", "multihead_attn")
            for weight in ("in_proj_weight", "out_proj.weight")
        ),
        "f.linear1.weight",
        "f.linear2.weight",
    ),
    "lstm": _kind(lambda: Apply(lambda m, x: m.f(x)[0], f=nn.LSTM(WIDTH, 3)), (5, 2, WIDTH)),
    "gru": _kind(
        lambda: Apply(lambda m, x: m.f(x)[0], f=nn.GRU(WIDTH, 3, bidirectional=True)),
        (5, 2, WIDTH),
    ),
    "lstm_cell": _kind(
        lambda: Apply(lambda m, x: m.f(x)[0], f=nn.LSTMCell(WIDTH, 3)), ROWS_OF_NUMBERS
    ),
    "own_linear": _kind(_square(lambda m, x: F.linear(x, m.w)), ROWS_OF_NUMBERS, "w"),
    "own_linear_by_keywords": _kind(
        _square(lambda m, x: F.linear(input=x, weight=m.w)), ROWS_OF_NUMBERS, "w"
    ),
    "subclass_of_linear": _kind(
        lambda: type("Own", (nn.Linear,), {})(WIDTH, WIDTH), ROWS_OF_NUMBERS, "weight"
    ),
    "matmul": _kind(_square(lambda m, x: x @ m.w), (2, 3, WIDTH), "w"),
    "matmul_of_a_row": _kind(_square(lambda m, x: x.matmul(m.w)), (WIDTH,), "w"),
    "matmul_from_the_left": _kind(_square(lambda m, x: m.w @ x), (WIDTH, ROWS), "w"),
    "matmul_with_many": _kind(_square(lambda m, x: m.w @ x), (2, WIDTH, ROWS)),
    "transposed": _kind(
        lambda: Weights(lambda m, x: x @ m.w.t() + x.mm(m.v.T) + torch.mm(x, m.u.mT),
                        w=(5, WIDTH), v=(5, WIDTH), u=(5, WIDTH)),
        ROWS_OF_NUMBERS, "w", "v", "u",
    ),
    "added": _kind(_square(lambda m, x: torch.addmm(x, x, m.w)), ROWS_OF_NUMBERS, "w"),
    "added_bias": _kind(
        lambda: Weights(lambda m, x: torch.addmm(m.bias, x, m.w), w=(WIDTH, 3), bias=(3,)),
        ROWS_OF_NUMBERS, "w",
    ),
    "function_with_bias": _kind(
        lambda: Weights(
            lambda m, x: F.linear(F.linear(x, m.w, m.bias).unsqueeze(0), m.w),
            w=(WIDTH, WIDTH), bias=(WIDTH,),
        ),
        ROWS_OF_NUMBERS, "w",
    ),
    "row_by_row": _kind(
        _square(lambda m, x: torch.stack([row @ m.w for row in x])), ROWS_OF_NUMBERS, "w"
    ),
    "added_with_a_factor": _kind(
        _square(lambda m, x: torch.addmm(x, x, m.w, alpha=2)), ROWS_OF_NUMBERS
    ),
    "added_to_itself": _kind(_square(lambda m, x: torch.addmm(m.w, x, m.w)), (WIDTH, WIDTH)),
    "times_itself": _kind(_square(lambda m, x: x @ (m.w @ m.w)), ROWS_OF_NUMBERS),
    "parts": _kind(
        _square(lambda m, x: torch.cat([F.linear(x, part) for part in m.w.chunk(2)], dim=-1)),
        ROWS_OF_NUMBERS, "w",
    ),
    "parts_of_parts": _kind(
        _square(lambda m, x: x[:, :2] @ m.w.t()[:2, 1:3]), ROWS_OF_NUMBERS, "w"
    ),
    "part_and_penalty": _kind(
        _square(lambda m, x: (x @ m.w[:, :2], m.w[0].sum())), ROWS_OF_NUMBERS, "w"
    ),
    "view_used_twice": _kind(
        _square(lambda m, x: (lambda w: (x @ w).tanh() @ w)(m.w.t())), ROWS_OF_NUMBERS, "w"
    ),
    "expanded": _kind(_square(lambda m, x: x @ m.w.expand(3, WIDTH, WIDTH)), (3, ROWS, WIDTH)),
    "chosen_rows": _kind(
        _square(lambda m, x: x @ m.w[torch.tensor([0, 0, 1, 2])]), ROWS_OF_NUMBERS
    ),
    "in_half_precision": _kind(
        _square(lambda m, x: x @ m.w.float().double()), ROWS_OF_NUMBERS
    ),
    "experts_in_stacks": _kind(
        _stack(lambda m, x: torch.bmm(torch.bmm(x, m.up).tanh(), m.down.transpose(1, 2))),
        (3, ROWS, WIDTH), "up", "down",
    ),
    "experts_from_the_left": _kind(
        _stack(lambda m, x: torch.baddbmm(x.mT, m.down, (m.up.mT @ x.mT).tanh())),
        (3, ROWS, WIDTH), "up", "down",
    ),
    "experts_as_sums": _kind(
        _stack(lambda m, x: torch.einsum(
            "eno, eio -> eni", torch.einsum("eni,eio->eno", x, m.up).tanh(), m.down
        )),
        (3, ROWS, WIDTH), "up", "down",
    ),
    "experts_as_sums_in_another_order": _kind(
        _stack(
            lambda m, x: [torch.einsum(f"eni,eio{end}", x, m.up) for end in ("->noe", "")]
        ),
        (3, ROWS, WIDTH), "up",
    ),
    "einsum_that_sums_its_input": _kind(
        lambda: Weights(lambda m, x: torch.einsum("eni,io->no", x, m.w), w=(WIDTH, 3)),
        (3, ROWS, WIDTH), "w",
    ),
    "einsum_with_a_spread_weight": _kind(
        # The weight's dimension of size one is broadcast, so its gradient is a sum.
        lambda: Weights(lambda m, x: torch.einsum("ni,nio->no", x, m.w), w=(1, WIDTH, 3)),
        ROWS_OF_NUMBERS,
    ),
    "experts_one_by_one": _kind(_stack(_routed_experts), ROWS_OF_NUMBERS, "up", "down"),
    "weight_norm": _kind(lambda: weight_norm(nn.Conv1d(2, 3, 2)), (2, 2, 5)),
    "orthogonal": _kind(lambda: orthogonal(nn.Linear(WIDTH, WIDTH)), ROWS_OF_NUMBERS),
    "custom_function": _kind(
        _square(lambda m, x: Scaled.apply(x, m.w)),  # type: ignore[no-untyped-call]  # upstream
        ROWS_OF_NUMBERS,
    ),
    "checkpoint": _kind(
        lambda: Apply(
            lambda m, x: m.g(checkpoint(m.f, x, use_reentrant=False)),
            f=nn.Conv1d(2, 3, 2), g=nn.Conv1d(3, 3, 2),
        ),
        (2, 2, 6), "g.weight",
    ),
    "offloaded": _kind(_square(lambda m, x: _offloaded(m, x)), ROWS_OF_NUMBERS),
    "mapped": _kind(_square(lambda m, x: torch.vmap(lambda row: row @ m.w)(x)), ROWS_OF_NUMBERS),
    "without_grad": _kind(
        lambda: Weights(lambda m, x: (x @ m.w.detach()) @ m.v, w=(WIDTH, WIDTH), v=(WIDTH, 2)),
        ROWS_OF_NUMBERS, "v",
    ),
    "hooked": _kind(_with_hook, (2, 2, 3), "1.weight"),
    "half_frozen": _kind(_half_frozen, (2, 2, 3), "1.weight"),
    "second_derivative": _kind(
        lambda: Weights(lambda m, x: _force(m, x) @ m.v, w=(WIDTH, WIDTH), v=(WIDTH, 2)),
        ROWS_OF_NUMBERS, "v", "w",
    ),
    "written_to": _kind(
        lambda: Apply(
            lambda m, x: m.g(m.f(x).relu_()).add_(1), f=nn.Conv1d(2, 3, 2), g=nn.Conv1d(3, 2, 1)
        ),
        (2, 2, 5), "f.weight", "g.weight",
    ),
}  # fmt: skip


def _offloaded(m: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return x @ m.w


def _force(m: Any, x: torch.Tensor) -> torch.Tensor:
    energy = (x @ m.w).tanh().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("name", KINDS)
def test_two_halves_equal_the_whole(name: str) -> None:
    torch.manual_seed(1)
    check(KINDS[name].build, KINDS[name].values())


@pytest.mark.parametrize("name", KINDS)
def test_every_product_with_a_weight_is_deferred(name: str) -> None:
    torch.manual_seed(1)
    kind = KINDS[name]
    assert waiting_weights(kind.build().double(), kind.values()[0]) == kind.waiting


@pytest.mark.parametrize("name", ["experts_one_by_one", "transposed", "conv2d", "embedding"])
def test_existing_gradients_are_added_to_whatever_their_strides(name: str) -> None:
    torch.manual_seed(1)
    kind = KINDS[name]
    module = kind.build().double()
    held = {}
    for parameter_name, parameter in module.named_parameters():
        shape = parameter.shape
        held[parameter_name] = torch.randn(shape[::-1], dtype=torch.float64).permute(
            *reversed(range(len(shape)))
        )
        parameter.grad = held[parameter_name].clone()
    reference = copy.deepcopy(module)
    reference.zero_grad()
    values = kind.values()
    expected, found = run_plain(reference, values), run_split(module, values)
    for parameter_name, gradient in expected.parameters.items():
        assert gradient is not None
        torch.testing.assert_close(
            found.parameters[parameter_name],
            held[parameter_name] + gradient,
            rtol=1e-12,
            atol=1e-12,
        )


def test_under_autocast_deferred_inputs_have_the_dtype_of_the_product() -> None:
    def autocast(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.conv(x).mT
            return m.embed(torch.arange(3)), F.linear(y, m.embed.weight)

    module = Apply(autocast, conv=nn.Conv1d(2, WIDTH, 3), embed=nn.Embedding(WORDS, WIDTH))
    reference = copy.deepcopy(module)
    values = [torch.randn(2, 2, 8) for _ in range(MICROBATCHES)]
    # One of them sums in bfloat16, the other in float32.
    assert_same(run_split(module, values), run_plain(reference, values), rtol=2e-2, atol=2e-2)
    assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
    split = Split(module)
    for number in range(2):
        split.forward(number, values[number])
        split.backward_input(number)
    calls = [call for call in split.waiting[1] if isinstance(call, FunctionCall)]
    kept = [value.dtype for call in calls for value, _ in call.kept]
    assert kept == [torch.bfloat16, torch.int64, torch.bfloat16]


# ---------------------------------------------------------------- grouped products


def _grouped_experts(m: Any, x: torch.Tensor) -> Any:
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    hidden = F.grouped_mm(x, m.up, offs=ends).tanh()
    return torch._grouped_mm(hidden, m.down.transpose(-2, -1), offs=ends)


def test_grouped_products_are_deferred_and_exact() -> None:
    torch.manual_seed(0)
    module = Weights(_grouped_experts, up=(3, 8, 16), down=(3, 8, 16))
    reference = copy.deepcopy(module)
    values = [torch.randn(9, 8) for _ in range(MICROBATCHES)]
    expected = run_plain(reference, values)
    assert_same(run_split(module, values), expected, rtol=1e-5, atol=1e-5)
    assert waiting_weights(module, values[0]) == {"up", "down"}


# ---------------------------------------------------------------- memory


def _live_sizes() -> Counter[tuple[int, ...]]:
    """Count the tensors of each shape that are alive."""
    gc.collect()
    return Counter(tuple(o.shape) for o in gc.get_objects() if type(o) is torch.Tensor)


def test_after_the_first_half_only_inputs_and_output_gradients_of_calls_are_alive() -> None:
    module = Apply(
        lambda m, x: m.g(torch.tanh(m.f(torch.sin(x)))),
        f=nn.Conv1d(3, 5, 2),
        g=nn.ConvTranspose1d(5, 7, 3),
    )
    split = prepared(module, 2, 3, 11)
    split.inputs.clear()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = _live_sizes()
    split.forward(0, torch.randn(2, 3, 11, dtype=torch.float64))
    split.backward_input(0)
    split.inputs.clear()
    # For each call its input and the gradient of its output.
    expected = Counter({(2, 3, 11): 1, (2, 5, 10): 2, (2, 7, 12): 1})
    assert _live_sizes() - before == expected
    split.backward_weight(0)
    assert _live_sizes() == before


def test_after_the_first_half_of_an_embedding_its_words_and_gradient_are_alive() -> None:
    module = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Tanh()).double()
    split = Split(module)
    words = [torch.randint(WORDS, (3, 11)) for _ in range(2)]
    split.forward(0, words[0])
    split.backward_input(0)
    split.backward_weight(0)
    split.inputs.clear()
    module.get_parameter("0.weight").grad = torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    before = _live_sizes()
    split.forward(0, words[1])
    split.backward_input(0)
    split.inputs.clear()
    expected = Counter({(3, 11): 1, (3, 11, WIDTH): 1})
    assert _live_sizes() - before == expected
    split.backward_weight(0)
    assert _live_sizes() == before


# ---------------------------------------------------------------- errors, later uses


def test_an_input_that_is_changed_in_place_is_refused_as_in_plain_autograd() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = x @ m.w
        x.mul_(2)
        return y

    split = Split(Weights(forward, w=(WIDTH, WIDTH)).double())
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    with pytest.raises(PipelineError, match=r"input of a layer \(shape \(6, 4\)\) was changed"):
        split.backward_input(0)


def test_a_weight_that_is_changed_in_place_is_refused_as_in_plain_autograd() -> None:
    module = Weights(lambda m, x: x @ m.w, w=(WIDTH, WIDTH)).double()
    split = Split(module)
    split.forward(0, torch.randn(ROWS, WIDTH, dtype=torch.float64))
    with torch.no_grad():
        module.get_parameter("w").mul_(2)
    with pytest.raises(PipelineError, match=r"weight of a layer \(shape \(4, 4\)\) was changed"):
        split.backward_input(0)


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.Conv1d(2, 2, 1)], ids=["linear", "conv"])
def test_another_pass_refuses_a_weight_that_was_changed_in_place(layer: nn.Module) -> None:
    # In another pass the call is run again, which would take the weight as it is by then.
    split = Split(layer)
    x = torch.randn(2, 2, 2, requires_grad=True)
    with split.recorder.record():
        output = layer(x)
    with torch.no_grad():
        layer.get_parameter("weight").mul_(2)
    with pytest.raises(PipelineError, match=r"weight of a layer .* was changed in place"):
        torch.autograd.grad(output.sum(), x)


@pytest.mark.parametrize(
    "later",
    [
        lambda m, x: x @ m.w + (x * m.w[0]).sum(),
        lambda m, x: x @ m.w @ m.w.exp(),
        lambda m, x: torch.addmm(m.w.sum(dim=0), x, m.w),
        lambda m, x: checkpoint(lambda y: y @ m.w, x, use_reentrant=False),
        lambda m, x: torch.einsum("ni,io->on", x, m.w),
        lambda m, x: (m.w @ x.mT).mT,
        lambda m, x: _force(m, x),
    ],
    ids=["row", "function", "bias", "checkpoint", "turned_output", "other_side", "force"],
)
def test_a_use_that_first_appears_in_a_later_microbatch_is_not_lost(
    later: Callable[[Any, torch.Tensor], Any],
) -> None:
    def build() -> nn.Module:
        calls = []

        def forward(m: Any, x: torch.Tensor) -> Any:
            calls.append(x)
            return x @ m.w if len(calls) == 1 else later(m, x)

        return Weights(forward, w=(WIDTH, WIDTH))

    torch.manual_seed(0)
    module, reference = build().double(), build().double()
    reference.load_state_dict(module.state_dict())
    values = random_values(ROWS, WIDTH)
    assert_same(run_split(module, values), run_plain(reference, values))


# ---------------------------------------------------------------- the user's modules


def test_weights_have_their_own_type_only_during_a_forward() -> None:
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Conv1d(3, 3, 2))
    split = Split(module)
    seen = []
    module[0].register_forward_hook(lambda m, *_: seen.append(isinstance(m.weight, nn.Parameter)))
    split.forward(0, torch.randn(2, 2, 5))
    assert seen == [True]
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    with pytest.raises(RuntimeError, match="expected input"):
        split.forward(1, torch.randn(2, 3, 5))
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


def test_a_deferred_module_can_be_copied_and_saved() -> None:
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh())
    split = Split(module)
    split.forward(0, torch.randn(2, 2, 5))
    split.backward_input(0)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(2, 2, 5)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(module)):
        torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
        assert other[0].weight is not module[0].weight
        assert type(other[0]) is nn.Conv1d


def test_replaced_weights_are_deferred_too() -> None:
    split = prepared(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Conv1d(3, 3, 2)), 2, 2, 5)
    split.module[0].weight = nn.Parameter(torch.randn(3, 2, 2, dtype=torch.float64))  # type: ignore[index]  # a sequence of modules
    counts = []
    for number in range(3):
        split.forward(number, torch.randn(2, 2, 5, dtype=torch.float64))
        split.backward_input(number)
        counts.append(len(split.waiting[number]))
        split.backward_weight(number)
    # The new weight is found after its first forward.
    assert counts == [1, 2, 2]


def test_a_module_may_be_compiled_after_its_weights_were_deferred() -> None:
    torch._dynamo.reset()
    module = Apply(
        lambda m, x: m.g(m.f(x).tanh()), f=nn.Conv1d(2, 3, 2), g=nn.Conv1d(3, 3, 2)
    ).double()
    reference = copy.deepcopy(module)
    split = Split(module)
    module.compile(backend="aot_eager", fullgraph=True)
    values = random_values(2, 2, 5)
    for number, value in enumerate(values):
        split.forward(number, value)
        split.backward_input(number)
        split.backward_weight(number)
    assert_same(split.gradients(), run_plain(reference, values))


def test_a_weight_shared_with_compiled_code_is_left_to_it() -> None:
    torch._dynamo.reset()
    head = Apply(lambda m, x: m.f(x).tanh(), f=nn.Linear(WIDTH, WORDS, bias=False))
    module = nn.Sequential(nn.Embedding(WORDS, WIDTH), head)
    head.get_submodule("f").weight = module[0].weight
    head.compile(backend="eager", fullgraph=True)
    words = torch.randint(WORDS, (3, ROWS))
    assert waiting_weights(module, words) == set()

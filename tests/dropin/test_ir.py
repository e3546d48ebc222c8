"""Pipes of traced models: cut as torch cuts them, and equal to the model."""

import copy
import gc
import operator
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import fx, nn

import penstock
from penstock.dropin import _IR
from penstock.splitting import marks
from tests.covering import all_but_slow
from tests.dropin.cut_models import CASES, SIZE, Case, Layers, Skipping, mark, torch_ir
from tests.dropin.scripts import IS_OLD_TORCH


def flatten(output: Any) -> tuple[Any, ...]:
    return tuple(torch.utils._pytree.tree_leaves(output))


def names_by_stage(pipe: Any) -> list[list[str]]:
    stages = range(pipe.num_stages)
    return [sorted(pipe.get_stage_module(index).state_dict()) for index in stages]


def sources_by_stage(pipe: Any) -> list[set[str]]:
    """Return what each call of a stage takes: outputs of stages, and arguments of the model."""
    found = []
    for call in pipe.split_gm.graph.find_nodes(op="call_module"):
        values = call.all_input_nodes
        while any(value.target is operator.getitem for value in values):
            values = [v.args[0] if v.target is operator.getitem else v for v in values]
        found.append({str(value.target) for value in values})
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stages_hold_and_take_what_they_do_in_torch(case: Case) -> None:
    ours = case.cut(_IR, case.make())
    theirs = case.cut(torch_ir, case.make(), torch_ir.SplitPoint)
    assert ours.num_stages == theirs.num_stages
    assert names_by_stage(ours) == names_by_stage(theirs)
    assert sources_by_stage(ours) == sources_by_stage(theirs)
    assert ours.replicated_params == theirs.replicated_params


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pipe_returns_the_leaves_of_what_the_model_returns(case: Case) -> None:
    model = case.make()
    expected = copy.deepcopy(model)
    pipe = case.cut(_IR, copy.deepcopy(model))
    theirs = case.cut(torch_ir, copy.deepcopy(model), torch_ir.SplitPoint)
    args, kwargs = case.example()
    leaves = flatten(expected(*args, **kwargs))
    torch.testing.assert_close(pipe(*args, **kwargs), leaves)
    torch.testing.assert_close(theirs(*args, *kwargs.values()), leaves)
    torch.testing.assert_close(pipe(*args, *kwargs.values())[0].shape, leaves[0].shape)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("rows", all_but_slow([2, 5], [5]))
def test_a_pipe_takes_batches_of_other_sizes_than_it_was_traced_with(
    case: Case, rows: int
) -> None:
    model = case.make()
    pipe = case.cut(_IR, copy.deepcopy(model))
    args, kwargs = case.example(rows)
    torch.testing.assert_close(pipe(*args, **kwargs), flatten(model(*args, **kwargs)))


def test_the_graph_of_a_pipe_calls_its_stages() -> None:
    pipe = CASES["skip"].cut(_IR, CASES["skip"].make())
    assert pipe.split_gm.code.strip().splitlines() == [
        "def forward(self, x, y):",
        "    submod_pp_0 = self.submod_pp_0(x, y);  x = y = None",
        "    getitem = submod_pp_0[0]",
        "    getitem_1 = submod_pp_0[1]",
        "    getitem_2 = submod_pp_0[2];  submod_pp_0 = None",
        "    submod_pp_1 = self.submod_pp_1(getitem_1);  getitem_1 = None",
        "    submod_pp_2 = self.submod_pp_2(getitem, getitem_2, submod_pp_1);  "
        "getitem = getitem_2 = submod_pp_1 = None",
        "    submod_pp_3 = self.submod_pp_3(submod_pp_2);  submod_pp_2 = None",
        "    return (submod_pp_3,)",
    ]


def test_an_argument_enters_the_stage_that_uses_it_by_its_name() -> None:
    case = CASES["late argument"]
    model = case.make()
    pipe = case.cut(_IR, model)
    (x, scale), _ = case.example()
    hidden = pipe.get_stage_module(0)(x)
    torch.testing.assert_close(
        pipe.get_stage_module(1)(hidden, scale=scale), model(x, scale), rtol=0, atol=0
    )


def test_the_first_stage_is_called_as_the_model_is() -> None:
    case = CASES["keywords"]
    model = case.make()
    pipe = case.cut(_IR, model)
    (x,), kwargs = case.example()
    torch.testing.assert_close(
        pipe.get_stage_module(0)(x, **kwargs), model.get_submodule("first")(x) + kwargs["bias"]
    )


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, batch: dict[str, torch.Tensor], scale: float = 1.0) -> torch.Tensor:
        x = self.layer(batch["left"]) * scale
        mark()
        return torch.relu(x) + 1


def test_arguments_may_be_trees() -> None:
    model = Nested()
    batch = {"left": torch.randn(3, SIZE)}
    pipe = _IR.pipeline(model, (batch,), {"scale": 2.0})
    torch.testing.assert_close(pipe(batch, scale=2.0), (model(batch, scale=2.0),))


class Returning(nn.Module):
    """Returns an argument, something of the first stage, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        hidden = self.layer(x)
        mark()
        return hidden.tanh(), hidden, x, None


def test_outputs_may_come_from_anywhere() -> None:
    model, x = Returning(), torch.randn(3, SIZE)
    pipe = _IR.pipeline(model, (x,))
    torch.testing.assert_close(pipe(x), flatten(model(x)))
    hidden = pipe.get_stage_module(0)(x)
    # The last stage returns all that is computed, wherever that was, and takes no argument.
    torch.testing.assert_close(pipe.get_stage_module(1)(hidden), (hidden.tanh(), hidden))


class Writing(nn.Module):
    """Writes into what another stage has made, and which a third one reads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        mark()
        y = self.second(x.add_(1.0))
        mark()
        output: torch.Tensor = y * x
        return output


def test_a_stage_may_write_into_what_it_receives() -> None:
    # Received tensors are leaves, which autograd does not let anybody write to.
    model, x = Writing(), torch.randn(3, SIZE)
    pipe = _IR.pipeline(model, (x,))
    torch.testing.assert_close(pipe(x), (model(x),))


class Flattening(nn.Module):
    """The last stage cannot see the batch's size in what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[0] * 1, x.shape[1]
        flat = self.layer(x).flatten()
        mark()
        output: torch.Tensor = flat.reshape(rows, width) * rows
        return output


def test_nothing_but_tensors_crosses_between_stages() -> None:
    model, x = Flattening(), torch.randn(3, SIZE)
    pipe = _IR.pipeline(model, (x,))
    torch.testing.assert_close(pipe(x), (model(x),))
    assert isinstance(pipe.get_stage_module(0)(x), torch.Tensor)


def test_what_cannot_be_traced_is_a_runtime_error() -> None:
    class Choosing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError):
        _IR.pipeline(Choosing(), (torch.ones(2),))
    with pytest.raises(RuntimeError):
        torch_ir.pipeline(Choosing(), (torch.ones(2),))


def test_places_to_cut_are_checked() -> None:
    model, x = Layers(), torch.randn(3, SIZE)
    begin = _IR.SplitPoint.BEGINNING
    wrong_side: Any = {"layers.1": "beginning"}
    with pytest.raises(ValueError, match="give only one"):
        _IR.pipeline(model, (x,), split_spec={}, split_policy=lambda traced: traced)
    with pytest.raises(AttributeError, match=r"'layer.1'.*did you mean 'layers.1'"):
        _IR.pipeline(model, (x,), split_spec={"layer.1": begin})
    with pytest.raises(ValueError, match="use SplitPoint"):
        _IR.pipeline(model, (x,), split_spec=wrong_side)
    with pytest.raises(ValueError, match="nothing to do"):
        _IR.pipeline(model, (x,), split_spec={"layers.0": begin})


def test_a_split_spec_leaves_no_marks_behind_and_an_annotation_does() -> None:
    model, x = Layers(), torch.randn(3, SIZE)
    for path in ("layers.1", "layers.2"):
        spec = {path: _IR.SplitPoint.BEGINNING}
        assert _IR.pipeline(model, (x,), split_spec=spec).num_stages == 2
    _IR.annotate_split_points(model, {"layers.1": _IR.SplitPoint.END})
    _IR.annotate_split_points(model, {"layers.1": _IR.SplitPoint.BEGINNING})
    assert _IR.pipeline(model, (x,)).num_stages == 3


def test_a_policy_may_use_the_mark_itself_or_its_operation() -> None:
    def put(traced: fx.GraphModule) -> fx.GraphModule:
        relus = [n for n in traced.graph.nodes if n.target is torch.ops.aten.relu.default]
        targets: list[Any] = [_IR.pipe_split, _IR.aten_pipe_split_alias, _IR._pipe_split]
        for node, target in zip(relus, targets, strict=False):
            with traced.graph.inserting_after(node):
                traced.graph.call_function(target)
        return traced

    pipe = _IR.pipeline(Layers(), (torch.randn(3, SIZE),), split_policy=put)
    assert pipe.num_stages == 4


def test_each_module_of_a_sequence_is_a_stage() -> None:
    sequence = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    x = torch.randn(3, SIZE)
    pipe = _IR.pipeline(_IR.PipeSequential.from_sequential(sequence), (x,))
    assert names_by_stage(pipe) == [
        ["0.bias", "0.weight"],
        ["1.bias", "1.weight"],
        ["2.bias", "2.weight"],
    ]
    torch.testing.assert_close(pipe(x), (sequence(x),))


def test_names_are_the_same_everywhere() -> None:
    assert _IR.SplitPoint is marks.SplitPoint is penstock.dropin.SplitPoint
    assert _IR.SplitPoint is _IR.PipeSplitWrapper.SplitPoint
    assert _IR.pipe_split is marks.pipe_split is penstock.dropin.pipe_split
    assert penstock.dropin.pipeline is _IR.pipeline
    assert _IR.get_submod_name(3) == torch_ir.get_submod_name(3)
    missing = set(vars(torch_ir)) - set(vars(_IR))
    public = {
        name
        for name in missing
        if getattr(vars(torch_ir)[name], "__module__", "") == torch_ir.__name__
    }
    assert public == set()


# Losses and backwards.


class WithParts(_IR.LossWrapper):
    def forward(self, x: torch.Tensor, y: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        output = self.module(x, y)
        return {"output": output, "loss": self.loss_fn(output, target)}


def run_plain(wrapper: nn.Module, *args: torch.Tensor) -> dict[str, torch.Tensor | None]:
    plain = copy.deepcopy(wrapper)
    output = plain(*args)
    torch.autograd.backward(output["loss"] if isinstance(output, dict) else output)
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def gradients(pipe: Any) -> dict[str, torch.Tensor]:
    """Return the sum over stages of the gradients of each name."""
    found: dict[str, torch.Tensor] = {}
    for index in range(pipe.num_stages):
        for name, parameter in pipe.get_stage_module(index).named_parameters():
            found[name] = found.get(name, 0) + parameter.grad
    return found


@pytest.mark.parametrize("config", [None, *_IR.MultiUseParameterConfig])
def test_a_pipe_with_a_loss_runs_its_backward(config: Any) -> None:
    torch.manual_seed(0)
    wrapper = WithParts(Skipping(), nn.MSELoss()).double()
    given = tuple(torch.randn(3, SIZE).double() for _ in range(3))
    expected = run_plain(wrapper, *given)
    pipe = _IR.Pipe.from_tracing(
        wrapper,
        given,
        output_loss_value_spec={"output": False, "loss": True},
        multi_use_param_spec=config,
    )
    assert pipe.has_loss_and_backward
    assert pipe.loss_spec == {"output": False, "loss": True}
    torch.testing.assert_close(pipe(*given), flatten(wrapper(*given)))
    torch.testing.assert_close(gradients(pipe), expected)
    holders = [i for i, names in enumerate(names_by_stage(pipe)) if "module.shared" in names]
    assert holders == ([0] if config is _IR.MultiUseParameterConfig.TRANSMIT else [0, 1])


def test_a_model_of_one_input_with_its_loss_runs_its_backward() -> None:
    wrapper = _IR.TrivialLossWrapper(CASES["marks"].make(), nn.MSELoss())
    given = tuple(torch.randn(3, SIZE).double() for _ in range(2))
    expected = run_plain(wrapper, *given)
    pipe = _IR.Pipe.from_tracing(wrapper, given, output_loss_value_spec=wrapper.loss_spec)
    pipe(*given)
    torch.testing.assert_close(gradients(pipe), expected)


def test_without_a_loss_gradients_stop_at_the_last_stage() -> None:
    pipe = CASES["marks"].cut(_IR, CASES["marks"].make())
    (x,), _ = CASES["marks"].example()
    torch.autograd.backward(pipe(x)[0].sum())
    reached = [
        all(p.grad is not None for p in pipe.get_stage_module(index).parameters())
        for index in range(3)
    ]
    assert reached == [False, False, True]
    assert not pipe.has_loss_and_backward


def test_multiple_wishes_for_shared_parameters_are_refused() -> None:
    replicate, transmit = (
        _IR.MultiUseParameterConfig.REPLICATE,
        _IR.MultiUseParameterConfig.TRANSMIT,
    )
    case = CASES["skip"]
    with pytest.raises(ValueError, match="all replicated, or all transmitted"):
        _IR.Pipe.from_tracing(
            case.make(), *case.example(), multi_use_param_spec={"a": replicate, "b": transmit}
        )


NODES = [fx.Graph().placeholder(name) for name in "ab"]
A, B = NODES


@pytest.mark.parametrize(
    ("output", "spec", "expected"),
    [
        (A, True, A),
        (A, False, None),
        ((A, B), (False, True), B),
        ([A, [B]], (False, [True]), B),
        ({"loss": A, "x": (B,)}, {"x": False, "loss": True}, A),
        ((A, 1), (False, True), RuntimeError),
        ((A, B), (False, False), RuntimeError),
        ((A, B), (True,), RuntimeError),
        ({"loss": A}, {"los": True}, RuntimeError),
        ((A,), {"loss": True}, RuntimeError),
        (A, "loss", RuntimeError),
    ],
)
def test_the_loss_is_where_the_spec_says_as_in_torch(
    output: Any, spec: Any, expected: Any
) -> None:
    for module in (_IR, torch_ir):
        if expected is RuntimeError:
            with pytest.raises(RuntimeError):
                module._find_loss_from_output_and_spec(output, spec)
        else:
            assert module._find_loss_from_output_and_spec(output, spec) is expected


def test_a_loss_is_found_by_its_name() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.output({"loss": x, "other": None})
    found = _IR._find_loss_output(nn.Module(), graph, None)
    assert found == (x, output, {"loss": True, "other": False})
    assert found == torch_ir._find_loss_output(nn.Module(), graph, None)


def test_a_loss_wrapper_wants_a_forward() -> None:
    with pytest.raises(NotImplementedError, match="define forward"):
        _IR.LossWrapper(nn.ReLU(), nn.MSELoss())(torch.ones(1))


def test_missing_gradients_count_as_nothing() -> None:
    one = torch.ones(2)
    add = _IR._null_coalesce_accumulate
    assert add(None, None) is None
    assert add(one, None) is one
    assert add(None, one) is one
    torch.testing.assert_close(add(one, one), 2 * one)


# Saving, moving and looking at.


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stages_and_pipes_can_be_copied_and_pickled(case: Case) -> None:
    pipe = case.cut(_IR, case.make()).eval()
    args, kwargs = case.example()
    expected = pipe(*args, **kwargs)
    copied = copy.deepcopy(pipe)
    loaded = pickle.loads(pickle.dumps(pipe))
    for other in (copied, loaded):
        torch.testing.assert_close(other(*args, **kwargs), expected)
        assert names_by_stage(other) == names_by_stage(pipe)
    first = pickle.loads(pickle.dumps(pipe.get_stage_module(0)))
    assert first.state_dict().keys() == pipe.get_stage_module(0).state_dict().keys()


def test_a_graph_module_can_be_made_into_data_and_back() -> None:
    model, x = Layers(), torch.randn(3, SIZE)
    module = torch.export.export(model, (x,)).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    nodes = _IR._LinearNodeList(module.graph.nodes)
    assert [str(node) for node in nodes.to_graph().nodes] == [str(n) for n in module.graph.nodes]
    assert nodes.serialize_node_list == [_IR._NodeReference(n.name) for n in module.graph.nodes]
    traced = fx.symbolic_trace(model)
    rebuild, parts = _IR._direct_serialization_reduce(traced)
    again = rebuild(*pickle.loads(pickle.dumps(parts)))
    torch.testing.assert_close(again(x), model(x))
    with pytest.raises(ValueError, match="whole graph"):
        _IR._LinearNodeList(list(module.graph.nodes)[1:])


class Making(nn.Module):
    """Makes tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) + torch.ones(SIZE, device=x.device)
        mark()
        output: torch.Tensor = x + torch.arange(SIZE, device=x.device)
        return output


def test_what_a_stage_makes_follows_it_to_another_device() -> None:
    pipe = _IR.pipeline(Making(), (torch.randn(3, SIZE),)).to("meta")
    x = torch.empty(5, SIZE, device="meta")
    assert pipe(x)[0].device.type == "meta"
    assert pipe.get_stage_module(1)(x).device.type == "meta"


def test_operations_of_nested_graphs_make_tensors_on_another_device() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(2, device="cpu")

    class Outer(fx.Tracer):
        def is_leaf_module(self, _module: nn.Module, _name: str) -> bool:
            return True

    model = nn.Sequential(fx.symbolic_trace(Inner()))
    module = fx.GraphModule(model, Outer().trace(model))
    # A tensor that is made while tracing is a constant; so the call is put there by hand.
    inner: Any = module.get_submodule("0")
    add = next(n for n in inner.graph.nodes if n.target is operator.add)
    with inner.graph.inserting_before(add):
        ones = inner.graph.call_function(torch.ones, (2,), {"device": torch.device("cpu")})
    add.args = (add.args[0], ones)
    inner.recompile()
    _IR._modify_graph_op_device(module, torch.device("meta"))
    assert module(torch.ones(2, device="meta")).device.type == "meta"


def test_a_pipe_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = CASES["marks"].cut(_IR, CASES["marks"].make())
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    assert str(info.graph) == str(pipe.split_gm.graph)
    assert (str(pipe), repr(pipe)) == (str(pipe.split_gm), repr(pipe.split_gm))
    numbers = [n.meta["stage_idx"] for n in info.graph.find_nodes(op="call_module")]
    assert numbers == [0, 1, 2]
    assert _IR.Pipe._number_and_count_forward_stages(pipe.split_gm) == 3
    pipe.print_readable()
    printed = capsys.readouterr().out
    # Before torch 2.13, the modules that a stage calls are printed below it too.
    assert printed.count("def forward") == (7 if IS_OLD_TORCH else 4)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="out of range for 3"):
            pipe.get_stage_module(wrong)


def test_a_stage_with_its_info_keeps_no_other_stage_alive() -> None:
    # A graph holds its module, and that holds all stages: memory for the whole model on each rank.
    pipe = CASES["marks"].cut(_IR, CASES["marks"].make())
    kept = (pipe.get_stage_module(0), pipe.info())
    others = [weakref.ref(pipe.get_stage_module(index)) for index in (1, 2)]
    del pipe
    gc.collect()
    assert [other() for other in others] == [None, None]
    assert kept[1].num_stages == 3


def test_an_exported_program_can_be_cut() -> None:
    case = CASES["skip"]
    model = case.make()
    args, kwargs = case.example()
    program = _IR.Pipe._trace_with_export(model, args, kwargs)
    pipe = _IR.Pipe._from_traced(model, program, _IR.MultiUseParameterConfig.REPLICATE)
    assert names_by_stage(pipe) == names_by_stage(case.cut(_IR, case.make()))
    torch.testing.assert_close(pipe(*args), (model(*args),))


# Small helpers.


@pytest.mark.skipif(
    not hasattr(torch_ir, "_move_placeholders_to_front"), reason="new in torch 2.13"
)
@pytest.mark.parametrize("order", ["apbqc", "pqabc", "abcpq", "apqbc", "pabcq", "abc"])
def test_inputs_are_moved_to_the_front(order: str) -> None:
    graphs = []
    for module in (_IR, torch_ir):
        graph = fx.Graph()
        for letter in order:
            if letter in "pq":
                graph.placeholder(letter)
            else:
                graph.create_node("get_attr", letter, name=letter)
        graph.output(None)
        module._move_placeholders_to_front(graph)
        graphs.append([node.name for node in graph.nodes])
    assert graphs[0] == graphs[1]


def test_a_dotted_name_leads_to_an_attribute_and_its_owner() -> None:
    model = Layers()
    up: Any = model.layers.get_submodule("1.up")
    find = _IR._recursive_getattr_with_parent
    assert find(model, "layers.1.up.weight") == (up, up.weight)
    assert find(model, "layers.1.up.nothing") == (up, None)
    assert find(model, "layers.7.up.weight") == (None, None)

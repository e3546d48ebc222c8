"""Cases are drawn from seeds alone, cover what they are to cover, print themselves and shrink."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.differential.case import Block, Case, Edit, Order, Part, Step, literal
from tests.differential.checking import check_case
from tests.differential.comparing import differences
from tests.differential.drawing import draw_case
from tests.differential.edits import EDITS
from tests.differential.losses import LOSSES
from tests.differential.model.blocks import HOOKS, KINDS, REWEIGHINGS
from tests.differential.model.forms import FORMS
from tests.differential.orders import TRAINING_FAMILIES
from tests.differential.rules import is_valid
from tests.differential.running import run_split, run_unsplit
from tests.differential.shrinking import shrink
from tests.differential.ways import WAYS

SMALL = Case(
    5,
    (Part((Block("linear"),)), Part((Block("matmul"),))),
    Order("ZB-H1", 2, 1, 2),
    steps=(Step(4, 2), Step(4, 2, edits=(Edit("sgd"),))),
)


def test_a_seed_gives_the_same_case_every_time() -> None:
    assert [draw_case(seed) for seed in range(20)] == [draw_case(seed) for seed in range(20)]
    assert draw_case(3, ranks=4).order.ranks == 4


def test_text_of_a_case_makes_the_case() -> None:
    names = {kind.__name__: kind for kind in (Case, Part, Block, Order, Step, Edit)}
    for seed in range(50):
        case = draw_case(seed)
        assert eval(literal(case), names) == case


def test_seeds_cover_every_feature() -> None:
    cases = [draw_case(seed) for seed in range(1500)]
    assert {case.order.family for case in cases} == {*TRAINING_FAMILIES, "random"}
    assert {case.loss for case in cases} == set(LOSSES)
    assert {kind for case in cases for kind in case.kinds} == set(KINDS)
    assert {part.sends for case in cases for part in case.parts} == set(FORMS)
    assert {case.door for case in cases} == {"list", "pipe", "mapping", "layers", "traced"}
    assert {trait for case in cases for trait in case.traits} == {
        *HOOKS,
        *REWEIGHINGS,
        *("skip", "frozen", "checkpoint", "reentrant", "compiled", "write", "offloaded"),
        "exchange",
        *("writes", "keyword", "adds_loss", "routes"),
    }
    assert {edit for case in cases for edit in case.edits} == {
        *EDITS,
        *("zero", "sgd", "eval", "clip", "scaled", "fail", "late", "outputs"),
        *WAYS,
    }


def test_wrong_numbers_are_noticed_and_rounding_is_not() -> None:
    found, expected = run_split(SMALL), run_unsplit(SMALL)
    assert differences(found, expected) == {}
    name = "step 1: gradient 0.core.entry.weight"
    gradient = found[name]
    assert gradient is not None
    assert differences({name: gradient * (1 + 1e-12)}, expected) == {}
    assert list(differences({name: gradient * (1 + 1e-6)}, expected)) == [name]
    assert list(differences({name: None}, expected)) == [name]
    assert list(differences({name: gradient * torch.nan}, expected)) == [name]


def test_another_model_is_noticed() -> None:
    wrong = differences(run_split(SMALL), run_unsplit(replace(SMALL, seed=6)))
    assert "step 0: loss" in wrong
    assert "step 1: gradient 1.core.blocks.0.inner.weight" in wrong


def test_shrinking_leaves_what_the_failure_needs() -> None:
    case = Case(
        7,
        (
            Part((Block("linear", ("skip",)), Block("attention")), "dict"),
            Part((Block("einsum", ("skip", "frozen")),), traits=("adds_loss",)),
            Part((Block("recurrent"),)),
        ),
        Order("ZB-H1", 3, 1, 4),
        "sum",
        (Step(8, 3), Step(5, 2, "nested", (Edit("zero"), Edit("freeze", 1))), Step(4, 3)),
        skips=((0, 2),),
        inputs="tokens",
    )
    assert is_valid(case)

    def still_fails(candidate: Case) -> bool:
        return "einsum" in candidate.kinds and "freeze" in candidate.edits

    assert literal(shrink(case, still_fails)) == (
        "Case(seed=7, parts=(Part(blocks=(Block(kind='einsum'),)), Part()), "
        "order=Order(family='GPipe', ranks=2), "
        "steps=(Step(rows=1, length=0, edits=(Edit(kind='freeze'),)),))"
    )


def test_a_pipeline_that_must_refuse_a_case_does_not_pass_by_working() -> None:
    refused = replace(SMALL, parts=(replace(SMALL.parts[0], sends="object"), SMALL.parts[1]))
    assert check_case(refused) is None
    assert check_case(SMALL) is None


def test_a_case_that_torch_itself_refuses_is_not_valid() -> None:
    # Tied weights put a reentrant checkpoint behind a backward with inputs, which it cannot do.
    tied = Case(
        0,
        (Part((Block("linear", ("reentrant",)),)), Part((Block("linear"),))),
        Order("GPipe", 2),
        "retained",
        ties=((0, 1),),
    )
    assert not is_valid(tied)
    assert is_valid(replace(tied, ties=()))
    assert is_valid(replace(tied, loss="mse"))


@pytest.mark.slow
def test_compiled_code_is_forgotten_where_warnings_are_errors() -> None:
    # Torch 2.11 imports inductor on the first reset of a process, and inductor uses the deprecated
    # torch.jit.script_method: the warning ended the case as an error.
    code = (
        "import warnings; from tests.differential.checking import forget_compiled; "
        "warnings.simplefilter('error'); forget_compiled()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")

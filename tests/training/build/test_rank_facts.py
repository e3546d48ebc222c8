"""What ranks compare, and how a difference is put into words."""

import torch
from torch import nn

import penstock as ps
from penstock.splitting.signature import sign
from penstock.training.build.rank_facts import model_fact, schedule_fact, version_facts


def read(picture: str, dataflow: ps.Dataflow | None = None) -> ps.Schedule:
    return ps.Schedule.from_orders(
        [line.split() for line in picture.split("\n")], dataflow=dataflow
    )


def explain_schedules(*schedules: ps.Schedule) -> str:
    facts = [schedule_fact(schedule) for schedule in schedules]
    details = [fact.detail() for fact in facts if fact.detail is not None]
    return facts[0].explain(dict(enumerate(details)))


def explain_models(*modules: nn.Module) -> str:
    return model_fact(1, None).explain({r: sign(module) for r, module in enumerate(modules)})


PICTURES = [
    "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1",
    "0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1",
    "1F0 1F1 1B0 1B1\n0F0 0F1 0B0 0B1",
    "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 1B0 1B1",
]
SKIP = ps.Dataflow(3, [(0, 1), (1, 2), (0, 2)])


def test_digest_differs_with_order_placement_dataflow_and_microbatches() -> None:
    given = [*map(read, PICTURES), read(PICTURES[-1], SKIP)]
    digests = [schedule_fact(schedule).digest for schedule in given]
    assert len(set(digests)) == len(given)
    assert schedule_fact(read(PICTURES[0])).digest == digests[0]


def test_different_schedules_are_described_by_what_differs_first() -> None:
    plain, order, placement, _, long = map(read, PICTURES)
    assert explain_schedules(plain, plain, order) == (
        "at position 2 of rank 0 in the schedule, rank 2 has 0B1, ranks 0, 1 have 0B0"
    )
    assert explain_schedules(plain, placement, plain) == (
        "rank 1 has placement [1, 0], ranks 0, 2 have [0, 1]"
    )
    assert explain_schedules(long, read(PICTURES[-1], SKIP)) == (
        "rank 0 has dataflow [[(0, 1), (1, 2)], [0, 1, 2]], "
        "rank 1 has [[(0, 1), (0, 2), (1, 2)], [0, 1, 2]]"
    )
    assert explain_schedules(
        *(ps.build(n, ranks=2, microbatches=4) for n in ("ZBV", "GPipe"))
    ) == (
        "rank 0 has schedule ZBV for 4 stages on 2 ranks, 4 microbatches, "
        "rank 1 has GPipe for 2 stages on 2 ranks, 4 microbatches"
    )


def test_a_shorter_order_lacks_an_action() -> None:
    longer = ps.Schedule.from_orders([["0F0", "0B0", "0REDUCE_GRAD"]])
    shorter = ps.Schedule.from_orders([["0F0", "0B0"]])
    assert explain_schedules(longer, shorter) == (
        "at position 2 of rank 0 in the schedule, rank 0 has 0REDUCE_GRAD, rank 1 has nothing"
    )


def test_different_models_are_described_by_their_first_parameters_that_differ() -> None:
    narrow, wide = nn.Linear(2, 2), nn.Linear(2, 3)
    assert explain_models(narrow, wide, narrow) == (
        "in stage 1, of 'weight' rank 1 has float32 [3, 2], ranks 0, 2 have float32 [2, 2]; "
        "of 'bias' rank 1 has float32 [3], ranks 0, 2 have float32 [2]"
    )
    assert explain_models(narrow, nn.Linear(2, 2).double().requires_grad_(False)) == (
        "in stage 1, of 'weight' rank 0 has float32 [2, 2], rank 1 has float64 [2, 2], frozen; "
        "of 'bias' rank 0 has float32 [2], rank 1 has float64 [2], frozen"
    )
    norm = nn.BatchNorm1d(2)
    assert explain_models(norm, nn.Identity()) == (
        "in stage 1, of 'weight' rank 0 has float32 [2], rank 1 has nothing of that name; "
        "of 'bias' rank 0 has float32 [2], rank 1 has nothing of that name; "
        "of 'running_mean' rank 0 has float32 [2], buffer, rank 1 has nothing of that name; "
        "and 2 more differ"
    )


def test_models_with_the_same_parameters_in_another_order_differ() -> None:
    first = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    second = nn.ModuleDict({name: first[name] for name in ("b", "a")})
    digests = {model_fact(1, sign(model)).digest for model in (first, second)}
    assert len(digests) == 2
    assert explain_models(first, second) == "stage 1 has its parameters in different orders"


def test_signatures_know_neither_values_nor_devices() -> None:
    assert sign(nn.Linear(3, 2)) == sign(nn.Linear(3, 2, device="meta"))
    assert sign(nn.LazyLinear(2, bias=False)) == (("weight", "float32 without a shape"),)


def test_versions_are_those_of_what_runs_here() -> None:
    names = [fact.name for fact in version_facts()]
    found = version_facts()[1].detail
    assert names == ["penstock", "torch", "Python"]
    assert found is not None
    assert found() == torch.__version__

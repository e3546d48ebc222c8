"""Findings stand side by side, the best first, and say why the others lost."""

from penstock.assembly import build
from penstock.costs import Costs
from penstock.ir.placement import Placement
from penstock.planner.bound.lower_bound import lower_bound
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.search.choices import Choices
from penstock.planner.search.findings import Finding, Findings, describe_refusal
from penstock.planner.search.space import Candidate

__all__ = ["make_findings"]


def make_finding(family: str, costs: Costs, choices: Choices) -> Finding:
    schedule = build(family, ranks=2, microbatches=6)
    problem = SchedulingProblem.of(costs, schedule.placement, 6)
    return Finding(Plan(problem, schedule, float(problem.work.max()), choices))


def make_findings() -> Findings:
    """Two plans, one that cannot fit and three that were not solved."""
    best = make_finding("ZBV", Costs(activation_bytes=4000), Choices((2, 3, 3, 2), (), 4))
    slow = Costs(backward_input=[2, 1], activation_bytes=[400, 4000], transfer=0.25)
    other = make_finding("1F1B", slow, Choices((5, 5), (0,), 4))
    too_large = SchedulingProblem(
        Costs(activation_bytes=3000), Placement.loop(2), 3, (2000.0, 1000.0)
    )
    refused = Candidate(too_large, Choices((5, 5), (), 8))
    return Findings((best, other), (refused,), num_slower=3)


def test_findings_are_a_table_with_reasons() -> None:
    assert str(make_findings()).splitlines() == [
        "end time s  bubble  gap     peak      microbatches  placement  layers   "
        "checkpointed  order  comparison",
        "18.5        2.7 %   2.8 %   7.81 KiB  6 x 4         v          2 2x3 2  "
        "none          ZBV    fastest",
        "27          22.2 %  12.5 %  3.91 KiB  6 x 4         loop       2x5      "
        "0             1F1B   slower by 45.9 %: recompute +16.2 %, imbalance +16.2 %, "
        "bubble +8.1 %, transfer +5.4 %",
        "proven to be slower, and not solved: 3",
        "over the limit, whatever the order: 1, such as",
        "  loop, microbatches of 8, checkpointed none: over the limit by 2,000 bytes on rank 1",
    ]


def test_best_plan_is_the_first_with_its_choices() -> None:
    findings = make_findings()
    assert findings.best == findings.found[0].plan
    assert findings.best.choices == Choices((2, 3, 3, 2), (), 4)


def test_finding_knows_where_its_seconds_go() -> None:
    for finding in make_findings().found:
        assert finding.causes.seconds == finding.seconds == finding.plan.timeline.end_time


def test_neighbouring_stages_are_joined_to_ranges() -> None:
    problem = SchedulingProblem(Costs(activation_bytes=6), Placement.loop(2, 3), 3, (1.0, 4.0))
    candidate = Candidate(problem, Choices((1,) * 6, (0, 1, 2, 5)))
    assert describe_refusal(candidate) == (
        "interleaved x3, microbatches of 1, checkpointed 0-2 5: "
        "over the limit by 5 bytes on rank 0"
    )


def test_bound_of_a_finding_is_below_its_step() -> None:
    for finding in make_findings().found:
        assert lower_bound(finding.plan.problem) <= finding.seconds


def test_repr_of_findings_is_one_line() -> None:
    assert repr(make_findings()) == (
        "<Findings: 2 plans, the best takes 18.5 s; slower: 3, over the limit: 1>"
    )

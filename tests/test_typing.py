"""What a user's type checker infers; mypy runs over this file, and so do the tests."""

from pathlib import Path
from typing import assert_type

import penstock as ps


def test_schedules_are_typed() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    assert_type(schedule, ps.Schedule)
    assert_type(schedule.placement, ps.Placement)
    assert_type(schedule.dataflow, ps.Dataflow)
    assert_type(schedule.num_ranks, int)
    assert_type(schedule.microbatches, int)
    assert_type(schedule.order(0), tuple[ps.Action | ps.Overlap, ...])
    assert_type(schedule.orders, tuple[tuple[ps.Action | ps.Overlap, ...], ...])
    assert_type(ps.lower(schedule), ps.Schedule)
    assert_type(ps.lower(schedule, receives="late", whole_stages=1), ps.Schedule)
    assert_type(ps.lower(schedule, receives=ps.Costs(transfer=1)), ps.Schedule)


def test_schedules_are_made_from_values_text_and_files(tmp_path: Path) -> None:
    action = ps.Action(ps.Kind.FORWARD, 0, 0)
    assert_type(action.microbatch, int | None)
    schedule = ps.Schedule.from_orders([[action, "0B0"]])
    schedule.to_csv(tmp_path / "schedule.csv")
    assert_type(ps.Schedule.from_csv(str(tmp_path / "schedule.csv")), ps.Schedule)


def test_passes_take_and_give_schedules() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    assert_type(ps.passes.merge_backward(schedule), ps.Schedule)
    assert_type(ps.passes.split_backward(schedule), ps.Schedule)
    assert_type(ps.passes.overlap_forward_backward(schedule), ps.Schedule)
    assert_type(ps.passes.add_reduce_grad(schedule), ps.Schedule)
    assert_type(ps.passes.add_unshard_reshard(schedule, whole_stages=2), ps.Schedule)
    assert_type(ps.passes.add_send_recv(schedule), ps.Schedule)
    assert_type(ps.passes.delay_receives(ps.passes.add_send_recv(schedule)), ps.Schedule)
    assert_type(ps.passes.add_send_recv_by_cost(schedule, ps.Costs()), ps.Schedule)


def test_checks_are_typed() -> None:
    schedule = ps.build("1F1B", ranks=2, microbatches=2)
    problems = ps.checks.find_problems(schedule, channels="shared", limit=3)
    assert_type(problems, tuple[ps.checks.Problem, ...])
    problem = ps.checks.Problem("once", 0, "0F0", "is missing")
    assert_type(problem.position, int | None)
    assert_type(problem.rule, str)
    ps.check(schedule)


def test_timelines_are_typed() -> None:
    costs = ps.Costs(forward=[1, 2], transfer=[[0, 1], [1, 0]])
    timeline = ps.simulate(ps.build("1F1B", ranks=2, microbatches=2), costs)
    assert_type(timeline, ps.Timeline)
    assert_type(timeline.end_time, float)
    assert_type(timeline.longest_span, float)
    assert_type(timeline.period("nothing"), float)
    assert_type(timeline.bubble_rate, float)
    assert_type(timeline.peak_activations, int)
    assert_type(timeline.rank_spans, tuple[float, ...])
    assert_type(timeline.rank_peak_activations, tuple[int, ...])
    for span in timeline.spans(0):
        assert_type(span, ps.sim.Span)
        assert_type(span.action, ps.Action)
        assert_type(span.start, float)


def test_explanations_are_typed() -> None:
    found = ps.explain(ps.build("1F1B", ranks=2, microbatches=2))
    assert_type(found, ps.sim.Explanation)
    assert_type(found.critical_path, tuple[ps.sim.Span, ...])
    assert_type(found.gaps, tuple[ps.sim.Gap, ...])
    assert_type(found.savings, tuple[ps.sim.Saving, ...])
    assert_type(found.idle_seconds, dict[str, float])
    assert_type(found.gaps[0].waited_for, ps.Action)


def test_plans_are_typed(tmp_path: Path) -> None:
    found = ps.plan(ps.Costs(), ranks=2, microbatches=2, memory=[9, 9], placement="v", seconds=0)
    assert_type(found, ps.Plan)
    assert_type(found.timeline, ps.Timeline)
    assert_type(found.gap, float)
    found.to_file(tmp_path / "plan.json")
    assert_type(ps.Plan.from_file(tmp_path / "plan.json").schedule, ps.Schedule)


def test_findings_are_typed() -> None:
    layers = [ps.Piece.of_weight(name, 1) for name in "abcd"]
    findings = ps.search({1: layers, 2: layers}, ranks=2, batch=4, seconds=0)
    assert_type(findings, ps.planner.Findings)
    assert_type(findings.best, ps.Plan)
    assert_type(findings.found, tuple[ps.planner.Finding, ...])
    assert_type(findings.found[0].choices, ps.planner.Choices)
    assert_type(findings.comparisons, tuple[str, ...])


def test_family_of_ones_own_is_a_function() -> None:
    def alone(ranks: int, microbatches: int, stages_per_rank: int) -> ps.Schedule:
        assert (ranks, stages_per_rank) == (1, 1)
        return ps.Schedule.from_orders([[f"0F{number}" for number in range(microbatches)]])

    assert_type(ps.build(alone, ranks=1, microbatches=3), ps.Schedule)


def test_package_says_that_it_is_typed() -> None:
    assert (Path(ps.__file__).parent / "py.typed").is_file()

"""Reports of plans in Markdown."""

import re

from penstock.assembly import build
from penstock.costs import Costs
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.view.plan_report import findings_report, plan_report
from tests.planner.search.test_findings import make_findings


def make_plan() -> Plan:
    schedule = build("1F1B", ranks=2, microbatches=2)
    costs = Costs(activation_bytes=2**20, transfer=0.5)
    return Plan(
        SchedulingProblem.of(costs, schedule.placement, 2, (3 * 2**20, float("inf"))),
        schedule,
        8.0,
    )


def test_report_of_a_plan() -> None:
    assert plan_report(make_plan()) == (
        "# Plan: 1F1B\n"
        "\n"
        "|  |  |\n"
        "| --- | --- |\n"
        "| sizes | 2 ranks, 2 stages (loop), 2 microbatches |\n"
        "| step (end time) | 10 s from the first start to the end of the last rank |\n"
        "| bubble | 40.0 % of the step, over all ranks |\n"
        "| longest span of a rank | 10 s |\n"
        "| proven bound | 8 s: no order is faster, and this order is at most 25.0 % slower |\n"
        "\n"
        "## Ranks\n"
        "\n"
        "| rank | stages | busy s | idle s | bubble | peak | limit |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| 0 | 0 | 6 | 4 | 40.0 % | 2 MiB | 3 MiB |\n"
        "| 1 | 1 | 6 | 4 | 40.0 % | 1 MiB | none |\n"
        "\n"
        "## Timeline\n"
        "\n"
        "```text\n"
        "rank 0  F0--------F1--------..............................B0------------------"
        "..........B1------------------\n"
        "rank 1  ...............F0--------B0------------------F1--------B1---------------"
        "---.........................\n"
        "        |0 s      |1        |2        |3        |4        |5        |6        |7"
        "        |8        |9\n"
        "        F Forward   B Full backward   . Idle\n"
        "```\n"
        "\n"
        "## Where the time goes\n"
        "\n"
        "| cause | seconds | of the step |\n"
        "| --- | --- | --- |\n"
        "| work | 6 | 60.0 % |\n"
        "| transfer | 1 | 10.0 % |\n"
        "| bubble | 3 | 30.0 % |\n"
        "\n"
        "## Run it\n"
        "\n"
        "```py\n"
        'plan = ps.Plan.from_file("plan.json")\n'
        "pipe = ps.split(model, layers=..., stages=2)\n"
        "pipeline = ps.Pipeline(pipe, plan, loss=loss)\n"
        "```\n"
    )


def test_report_of_a_search_lists_all_plans_with_cuts_and_checkpointing() -> None:
    findings = make_findings()
    report = findings_report(findings)
    assert "stages=[2, 3, 3, 2])" in report
    for row in (findings.headings, *findings.rows):
        assert f"| {' | '.join(row)} |\n" in report
    for remark in findings.remarks:
        assert f"- {remark.strip()}\n" in report
    second = plan_report(findings.found[1].plan)
    assert "Run the forward of stages 0 with activation checkpointing." in second


def test_every_line_of_a_table_has_the_same_number_of_cells() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", findings_report(make_findings()), re.MULTILINE):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1

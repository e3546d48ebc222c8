"""Reports of plans in Markdown: time, memory, picture, and how to run the plan."""

from collections.abc import Iterable, Sequence
from html import escape
from math import isinf

from penstock.planner.plans import Plan
from penstock.planner.search.breakdown import break_down
from penstock.planner.search.findings import Findings
from penstock.planner.search.layouts import describe_placement
from penstock.sim.period import describe_seconds, name_seconds
from penstock.units import format_bytes, format_number, format_share
from penstock.view.text.timeline import plain_timeline

__all__ = ["findings_report", "plan_report"]

_PICTURE_WIDTH = 120


def plan_report(plan: Plan) -> str:
    """Return the report of one plan."""
    return "\n".join(
        [
            f"# Plan: {escape(plan.schedule.name)}",
            "",
            _markdown_table(("", ""), _headline(plan)),
            "## Ranks",
            "",
            _rank_table(plan),
            "## Timeline",
            "",
            "```text",
            plain_timeline(plan.timeline, width=_PICTURE_WIDTH).plain,
            "```",
            "",
            "## Where the time goes",
            "",
            _cause_table(plan),
            "## Run it",
            "",
            _recipe(plan),
        ]
    )


def findings_report(findings: Findings) -> str:
    """Return the report of a search: the best plan, and a table of the others."""
    remarks = "".join(f"- {remark.strip()}\n" for remark in findings.remarks)
    table = _markdown_table(findings.headings, findings.rows)
    return f"{plan_report(findings.best)}\n## Other plans\n\n{table}\n{remarks}"


def _headline(plan: Plan) -> Iterable[Sequence[str]]:
    problem, timeline = plan.problem, plan.timeline
    yield (
        "sizes",
        f"{problem.ranks} ranks, {problem.stages} stages "
        f"({describe_placement(problem.placement)}), {problem.microbatches} microbatches",
    )
    boundary = problem.boundary
    seconds = f"{format_number(plan.seconds)} s {describe_seconds(boundary)}"
    yield f"step ({name_seconds(boundary)})", seconds
    yield "bubble", f"{format_share(plan.step.bubble_rate)} of the step, over all ranks"
    yield "longest span of a rank", f"{format_number(timeline.longest_span)} s"
    yield (
        "proven bound",
        f"{format_number(plan.lower_bound)} s: no order is faster, and this order is at most "
        f"{format_share(plan.gap)} slower",
    )
    if plan.choices is not None:
        yield "chosen", str(plan.choices)


def _rank_table(plan: Plan) -> str:
    timeline, problem = plan.timeline, plan.problem
    rows = []
    for rank in range(problem.ranks):
        limit = problem.memory[rank]
        rows.append(
            (
                str(rank),
                " ".join(map(str, problem.placement.stages(rank))),
                format_number(timeline.busy_seconds[rank]),
                format_number(plan.step.idle_seconds[rank]),
                format_share(plan.step.rank_bubble_rates[rank]),
                format_bytes(timeline.rank_peak_bytes[rank]),
                "none" if isinf(limit) else format_bytes(limit),
            )
        )
    return _markdown_table(("rank", "stages", "busy s", "idle s", "bubble", "peak", "limit"), rows)


def _cause_table(plan: Plan) -> str:
    found = break_down(plan)
    rows = [
        (cause, format_number(seconds), format_share(seconds / found.seconds))
        for cause, seconds in found.by_cause.items()
        if seconds and found.seconds
    ]
    return _markdown_table(("cause", "seconds", "of the step"), rows)


def _recipe(plan: Plan) -> str:
    choices = plan.choices
    stages = plan.problem.stages if choices is None else list(choices.sizes)
    lines = [
        "```py",
        'plan = ps.Plan.from_file("plan.json")',
        f"pipe = ps.split(model, layers=..., stages={stages})",
        "pipeline = ps.Pipeline(pipe, plan, loss=loss)",
        "```",
        "",
    ]
    if choices is not None and choices.checkpointed:
        listed = ", ".join(map(str, choices.checkpointed))
        lines += [f"Run the forward of stages {listed} with activation checkpointing.", ""]
    return "\n".join(lines)


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

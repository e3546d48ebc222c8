"""The reference page: every public name of `penstock`, grouped by what it is for."""

from collections.abc import Mapping
from dataclasses import dataclass

from click import Command, Context, Group

import penstock as ps
from penstock.cli import main
from penstock.errors import ArgumentError

__all__ = ["GROUPS", "NameGroup", "commands_page", "reference_page"]


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Names that belong together, with a space between them, and what they are for."""

    title: str
    purpose: str
    names: str


GROUPS = (
    NameGroup(
        "Schedules",
        "Build an order, read one, write one, and say what it is made of. "
        "See [Schedules: yours](schedules.md).",
        "build Schedule Action Kind Overlap Placement Dataflow Routed parse_work register",
    ),
    NameGroup(
        "Passes",
        "From schedule to schedule: `lower` runs those that a real run needs.",
        "lower add_send_recv add_send_recv_by_cost delay_receives add_unshard_reshard "
        "add_reduce_grad merge_backward split_backward overlap_forward_backward thin_out "
        "reroute",
    ),
    NameGroup(
        "Checks",
        "Prove that a schedule is complete and will finish.",
        "check find_problems Problem",
    ),
    NameGroup(
        "Prices",
        "What a schedule costs, and why.",
        "Costs simulate Timeline Span explain Explanation Gap Saving",
    ),
    NameGroup(
        "Plans",
        "Have an order found, for real costs and a memory limit. See [Planning](planning.md).",
        "plan search Plan Choices Finding Findings partition Partition Piece count_in_flight "
        "review revise",
    ),
    NameGroup(
        "Models",
        "Cut a model into stages, and measure them. See [Split a model](splitting.md).",
        "split Pipe SplitPoint pipe_split find_loss here_only balance measure measure_closely "
        "measure_layers measure_links",
    ),
    NameGroup(
        "Training",
        "Run the stages in the order of a schedule. See [Train a pipeline](running.md).",
        "Pipeline StepResult Along Ready Shared add_loss",
    ),
    NameGroup(
        "Long runs",
        "Save, resume, and see what becomes of a run in which something goes wrong.",
        "Checkpoints Restored Watch train_elastically Job ElasticStep Disturbance Drop",
    ),
    NameGroup(
        "Files",
        "Recorded steps and traces.",
        "read_timeline write_timeline read_trace write_trace",
    ),
    NameGroup(
        "Names of torch.distributed.pipelining",
        "With the same meaning; all of them, and how to use them, are in "
        "[Coming from torch](coming-from-torch.md).",
        "pipeline PipelineStage build_stage get_schedule_class ScheduleGPipe Schedule1F1B "
        "ScheduleInterleaved1F1B ScheduleLoopedBFS ScheduleInterleavedZeroBubble "
        "ScheduleZBVZeroBubble ScheduleDualPipeV",
    ),
    NameGroup(
        "Errors",
        "Everything that is raised on purpose; each is also the built-in error that one would "
        "expect.",
        " ".join(sorted(name for name in ps.__all__ if name.endswith("Error"))),
    ),
)


def reference_page() -> str:
    """The page as Markdown; the docstrings are put in when it is rendered."""
    named = [name for group in GROUPS for name in group.names.split()]
    if wrong := sorted(set(named) ^ set(ps.__all__)):
        raise ArgumentError(
            f"the groups of docs_build/reference.py and penstock.__all__ differ in "
            f"{', '.join(wrong)}; a public name stands in one group"
        )
    parts = [
        "# Reference: Python\n",
        "Every name that `import penstock as ps` gives; the command line has "
        "[a page of its own](commands.md).\n",
    ]
    for group in GROUPS:
        parts.append(f"## {group.title}\n\n{group.purpose}\n")
        parts.extend(f"::: penstock.{name}\n" for name in group.names.split())
    return "\n".join(parts)


def commands_page() -> str:
    """The help of every command, as it is printed."""
    parts = [
        "# Reference: command line\n",
        "Also as `python -m penstock`. Everything that plans answers without torch.\n",
    ]
    with Context(main, info_name="penstock") as context:
        for name, command in _commands(main, context).items():
            with Context(command, info_name=name, parent=context) as inner:
                parts.append(f"## penstock {name}\n\n```console\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def _commands(group: Group, context: Context) -> Mapping[str, Command]:
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}

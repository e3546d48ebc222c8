"""The reference pages: every public name of `penstock` by purpose, and every command."""

from collections.abc import Mapping
from dataclasses import dataclass

from click import Command, Context, Group

import penstock as ps
from penstock.cli import main
from penstock.errors import ArgumentError

__all__ = ["REFERENCE", "NameGroup", "commands_page", "reference_pages"]


@dataclass(frozen=True, slots=True)
class NameGroup:
    """Public names with a common purpose, separated by spaces."""

    title: str
    purpose: str
    names: str


def _names_of(package: str) -> str:
    """Return the names of a package that `penstock` itself lacks, with the name of the package."""
    module = getattr(ps, package)
    names = [n for n in getattr(module, "__all__", ()) if not n.startswith("_")]
    at_the_top = {id(getattr(ps, name)) for name in ps.__all__}
    return " ".join(f"{package}.{n}" for n in names if id(getattr(module, n)) not in at_the_top)


_PLANNING = (
    NameGroup(
        "Schedules",
        "Build an order, read one, write one, and say what it is made of. "
        "See [Schedules: yours](schedules.md).",
        "build Schedule Action Kind Overlap Placement Dataflow Routed register",
    ),
    NameGroup(
        "Passes",
        "From schedule to schedule: `lower` runs those that a real run needs.",
        f"lower {_names_of('passes')}",
    ),
    NameGroup(
        "Checks",
        "Prove that a schedule is complete and will finish.",
        f"check {_names_of('checks')}",
    ),
    NameGroup(
        "Prices",
        "What a schedule costs, and why.",
        f"Costs simulate Timeline explain review {_names_of('sim')}",
    ),
    NameGroup(
        "Plans",
        "Let the planner find an order for real costs and a memory limit. "
        "See [Planning](planning.md).",
        f"plan search revise Plan partition Piece {_names_of('planner')}",
    ),
    NameGroup(
        "See",
        "Pictures for the terminal, for papers and for the browser, and traces.",
        _names_of("view"),
    ),
    NameGroup(
        "Files",
        "Recorded steps and traces.",
        f"read_timeline write_timeline read_trace {_names_of('files')}",
    ),
    NameGroup(
        "Errors",
        "Everything that is raised on purpose; each is also the built-in error that one would "
        "expect.",
        f"PenstockError {_names_of('errors')}",
    ),
)
_TRAINING = (
    NameGroup(
        "Models",
        "Cut a model into stages, and measure them. See [Split a model](splitting.md).",
        "split Pipe find_loss here_only balance measure measure_layers measure_links "
        + _names_of("measuring"),
    ),
    NameGroup(
        "Training",
        "Run the stages in the order of a schedule. See [Train a pipeline](running.md).",
        "Pipeline StepResult RunOptions Along Ready Shared add_loss communicate turning_point",
    ),
    NameGroup(
        "Long runs",
        "Save, resume, and see what becomes of a run in which something goes wrong.",
        f"Checkpoints {_names_of('checkpoint')} Timeouts watching train_elastically Job "
        + _names_of("elastic"),
    ),
    NameGroup(
        "Tests",
        "Faults on purpose, and a step against the unsplit model. See [Soak](soak.md).",
        _names_of("testing"),
    ),
    NameGroup(
        "Names of torch.distributed.pipelining",
        "With the same meaning; all of them, and how to use them, are in "
        "[Coming from torch](coming-from-torch.md).",
        _names_of("dropin"),
    ),
)
# The pages of the reference, by their file, with the title and what is on them.
REFERENCE = {
    "reference.md": ("Reference: planning and seeing", _PLANNING),
    "reference-training.md": ("Reference: training", _TRAINING),
}


def reference_pages() -> dict[str, str]:
    """Return the pages as Markdown, by file; docstrings are inserted when they are rendered."""
    groups = [group for _, page in REFERENCE.values() for group in page]
    named = [name for group in groups for name in group.names.split()]
    if wrong := sorted({name for name in named if "." not in name} ^ set(ps.__all__)):
        raise ArgumentError(
            f"every public name must be in one group of docs_build/reference.py (got different "
            f"lists for {', '.join(wrong)}); compare its groups with penstock.__all__"
        )
    return {path: _reference_page(path) for path in REFERENCE}


def _reference_page(path: str) -> str:
    title, groups = REFERENCE[path]
    others = [f"[{name}]({other})" for other, (name, _) in REFERENCE.items() if other != path]
    parts = [
        f"# {title}\n",
        "Names that `import penstock as ps` gives. The others are in "
        f"{', '.join(others)}; the command line has [a page of its own](commands.md).\n",
    ]
    for group in groups:
        parts.append(f"## {group.title}\n\n{group.purpose}\n")
        parts.extend(f"::: penstock.{name}\n" for name in group.names.split())
    return "\n".join(parts)


def commands_page() -> str:
    """Return the help of every command, as printed."""
    parts = [
        "# Reference: command line\n",
        "Also as `python -m penstock`. Planning works without torch. Colours are for terminals "
        "only, and `NO_COLOR=1` turns them off.\n",
        "For completion by TAB of commands, options, families and files, add this line to "
        "`~/.bashrc`:\n",
        '```sh\neval "$(_PENSTOCK_COMPLETE=bash_source penstock)"\n```\n',
        "For zsh it is `zsh_source` in `~/.zshrc`; for fish, "
        "`_PENSTOCK_COMPLETE=fish_source penstock | source` in `~/.config/fish/config.fish`.\n",
        f"## penstock\n\n```console\n{_main_help()}\n```\n",
    ]
    with Context(main, info_name="penstock") as context:
        for name, command in _commands(main, context).items():
            with Context(command, info_name=name, parent=context) as inner:
                parts.append(f"## penstock {name}\n\n```console\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def _main_help() -> str:
    with Context(main, info_name="penstock") as context:
        return main.get_help(context)


def _commands(group: Group, context: Context) -> Mapping[str, Command]:
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}

"""The examples page: every script of `examples/` with its docstring."""

import ast
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from penstock.errors import ArgumentError

__all__ = ["ORDER", "Script", "examples_page", "read_scripts"]

# From first steps to several machines.
ORDER = (
    "first_pipeline",
    "hugging_face",
    "hugging_face_trainer",
    "accelerator_loop",
    "lightning_trainer",
    "fabric_loop",
    "own_schedule",
    "custom_csv",
    "plan_a_cluster",
    "lora",
    "fsdp",
    "mixture_of_experts",
    "several_machines",
)


@dataclass(frozen=True, slots=True)
class Script:
    """An example: its title, its description, the command that runs it, and its code."""

    name: str
    title: str
    text: str
    command: str
    code: str


def read_scripts(folder: Path) -> list[Script]:
    """Read the examples of a folder in the order of the page; the lists must be equal."""
    found = {path.stem: path for path in folder.glob("*.py")}
    if wrong := sorted(set(found) ^ set(ORDER)):
        raise ArgumentError(
            f"every example must be listed in ORDER (got different lists for {', '.join(wrong)})"
        )
    return [_read(found[name]) for name in ORDER]


def examples_page(folder: Path) -> str:
    """Return the page as Markdown."""
    parts = [
        "# Examples\n",
        "Short scripts to copy. The tests run each on a CPU, with the command shown. Beside them "
        "is a notebook, `examples/first_look.ipynb`, whose cells the tests run too.\n",
    ]
    for script in read_scripts(folder):
        parts.append(f"## {script.title}\n\n{script.text}\n\n```sh\n{script.command}\n```\n")
        parts.append(f'```py title="examples/{script.name}.py"\n{script.code}\n```\n')
    return "\n".join(parts)


def _read(path: Path) -> Script:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    if docstring is None:
        raise ArgumentError(f"{path.name} must have a docstring; say what the example shows")
    title, _, rest = docstring.partition("\n")
    lines = rest.strip().splitlines()
    command = dedent("\n".join(line for line in lines if line.startswith("    ")))
    text = "\n".join(line for line in lines if not line.startswith("    ")).strip()
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
    return Script(path.stem, title.rstrip("."), text, command, code)

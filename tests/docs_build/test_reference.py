"""The reference has every public name once, and every command with its help."""

from click import Context

import penstock
from docs_build.docstrings import fence_examples
from docs_build.reference import REFERENCE, commands_page, reference_pages
from penstock.cli import main


def test_every_public_name_is_listed_once() -> None:
    groups = [group for _, page in REFERENCE.values() for group in page]
    named = [name for group in groups for name in group.names.split()]
    assert len(set(named)) == len(named)
    assert sorted(name for name in named if "." not in name) == sorted(penstock.__all__)
    for package in ("errors", "passes", "planner", "testing"):
        known = {name.rpartition(".")[2] for name in named}
        assert set(getattr(penstock, package).__all__) <= known
    page = "".join(reference_pages().values())
    assert all(page.count(f"::: penstock.{name}\n") == 1 for name in named)


def test_every_command_is_listed_with_its_help() -> None:
    page = commands_page()
    names = main.list_commands(Context(main))
    assert len(names) == 15
    for name in names:
        assert f"## penstock {name}\n\n```console\nUsage: penstock {name} " in page


def test_examples_in_docstrings_become_code_blocks() -> None:
    text = "Say it.\n\nMore.\n\n>>> 1 + 1\n2\n>>> 2 + 2\n4\n\nAnd so on."
    assert fence_examples(text) == (
        "Say it.\n\nMore.\n\n```pycon\n>>> 1 + 1\n2\n>>> 2 + 2\n4\n```\n\nAnd so on."
    )


def test_docstrings_without_examples_are_kept() -> None:
    assert fence_examples("Say it.\n\n> quoted") == "Say it.\n\n> quoted"

"""Examples in docstrings as code blocks; Markdown would render them as quotations."""

from typing import Any

from griffe import Extension, Object

__all__ = ["Examples", "fence_examples"]


class Examples(Extension):
    """An extension that fences the examples of every docstring when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the examples in the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)


def fence_examples(text: str) -> str:
    r"""Fence the examples of a docstring, each up to the next empty line.

    >>> fence_examples("Add.\n\n>>> 1 + 1\n2")
    'Add.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    lines: list[str] = []
    is_inside = False
    for line in text.splitlines():
        begins = line.startswith(">>> ") and not is_inside
        ends = is_inside and not line.strip()
        if begins or ends:
            lines.append("```pycon" if begins else "```")
            is_inside = begins
        lines.append(line)
    return "\n".join([*lines, "```"] if is_inside else lines)

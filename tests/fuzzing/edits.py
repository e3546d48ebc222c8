"""Changes to valid files that keep most of their structure, as plain data.

"forward = 1.5\n"  ->  tokens  "forward" " " "=" " " "1.5" "\n"  ->  Edit("replace", 4, 1, b"NaN")
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from random import Random
from struct import pack
from typing import Any, Literal, TypeAlias, get_args

__all__ = ["ODDITIES", "VALUES", "Edit", "How", "apply_edits", "draw_edits"]

How: TypeAlias = Literal[
    "delete",
    "duplicate",
    "replace",
    "insert",
    "swap",
    "repeat",
    "cut",
    "byte",
    "bytes",
    "value",
    "drop",
]

_TOKEN = re.compile(rb'[A-Za-z_]+|[0-9]+(?:\.[0-9]+)?|[ \t]+|\r?\n|"|[^"]', re.DOTALL)
_MANY, _MOST_BYTES = 3000, 300_000

# Pieces of text that have broken readers somewhere.
ODDITIES: tuple[bytes, ...] = (
    *(b"0 1 -1 00 1.5 -0.0 1e308 1e309 1e-320 5e-324 1e100 NaN -Infinity inf true null".split()),
    *(b"999999999 2147483648 9223372036854775808 1000000000000 _1 0x10 1_000".split()),
    b"9" * 400,
    b"9" * 5000,
    b"0x" + b"f" * 5000,
    *(b'"" {} [] [[]] { } [ ] ( ) , ; : = # | > \\ " \'\'\' """ \\ud800 \\u0000 \\u2028'.split()),
    *(b"0F0 1B0 0F1 1I0 1W0 999999999F0 0F999999999 0SEND_F0 1RECV_F0 0SEND_F0>9".split()),
    *(b"0UNSHARD 0RESHARD 0REDUCE_GRAD (0F0;1B0)OVERLAP_F_B (0F0)OVERLAP_F_B ()".split()),
    *(b"name layers sizes repeat forward transfer row pid ts dur args X </script> [/b]".split()),
    *(b" \n \r\n \r \t \x00 \x1a \x1b[31m \x7f \xff \xfe\xff \xef\xbb\xbf".split(b" ")),
    *(text.encode() for text in ("\u2028", "\u0085", "é", "٣", "\U0001f600", "\u202e", "\u00a0")),
    b"# dataflow: 0>1 | parts: 0 1\n",
    b"# dataflow: | parts:\n",
    b"[" * 5000,
    b"(" * 5000,
    b'{"a":' * 5000,
    b"a." * 3000,
    b"a" * 200_000,
    b" " * 200_000,
    b"," * 100_000,
    b"\n" * 100_000,
)

# Values to put where another one is expected.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, 10**12, 10**400, -(10**400), 0.5, -0.5),
    *(1e308, 1e-320, 1e100, 1e17, float("nan"), float("inf"), "", "a", "0F0", "</script>"),
    *("\ud800", "\u0000", "\x1b[2J", "[/b]", "a" * 10_000, [], [[]], [0], [1, 2], {}, {"a": 1}),
)

# Numbers of binary files.
_PATTERNS = (
    *(pack("<i", number) for number in (-1, 0, 1, 2, 7, 2**31 - 1)),
    *(pack("<q", number) for number in (-1, 2**62, 2**63 - 1)),
    *(pack("<d", number) for number in (-1.0, 0.0, 1e-320, 1e11, 1e308, inf, nan)),
)


@dataclass(frozen=True)
class Edit:
    """One change: how, at which token (counted round), over how many tokens, with which text."""

    how: How
    place: int
    length: int
    text: bytes
    value: int


def draw_edits(random: Random) -> list[Edit]:
    """A few edits, mostly one or two."""
    return [_draw_edit(random) for _ in range(random.choice((1, 1, 1, 2, 2, 3, 6)))]


def _draw_edit(random: Random) -> Edit:
    return Edit(
        random.choice(get_args(How)),
        random.randrange(100_000),
        random.choice((1, 1, 1, 2, 3, 8, 40)),
        random.choice(ODDITIES),
        random.randrange(len(VALUES)),
    )


def apply_edits(data: bytes, edits: Sequence[Edit]) -> bytes:
    """The file after these changes, one after the other."""
    for edit in edits:
        if edit.how in ("value", "drop"):
            data = _edit_tree(data, edit)
        elif edit.how == "byte":
            place = edit.place % (len(data) + 1)
            data = data[:place] + bytes([edit.value]) + data[place + 1 :]
        elif edit.how == "bytes":
            place, pattern = edit.place % (len(data) + 1), _PATTERNS[edit.value % len(_PATTERNS)]
            data = data[:place] + pattern + data[place + len(pattern) :]
        else:
            data = _edit_tokens(data, edit)
    return data


def _edit_tokens(data: bytes, edit: Edit) -> bytes:
    tokens = _TOKEN.findall(data)
    start = edit.place % (len(tokens) + 1)
    before, chosen = tokens[:start], tokens[start : start + edit.length]
    after = tokens[start + edit.length :]
    match edit.how:
        case "delete":
            changed = [*before, *after]
        case "duplicate":
            changed = [*before, *chosen, *chosen, *after]
        case "replace":
            changed = [*before, edit.text, *after]
        case "insert":
            changed = [*before, edit.text, *chosen, *after]
        case "swap":
            changed = [*before, *reversed(chosen), *after]
        case "repeat":
            times = min(_MANY, _MOST_BYTES // max(1, len(b"".join(chosen))))
            changed = [*before, *(chosen * times), *after]
        case "cut":
            changed = before
        case _:
            raise AssertionError(edit.how)
    return b"".join(changed)


def _edit_tree(data: bytes, edit: Edit) -> bytes:
    """Replace or drop one value of a JSON file; any other file stays as it is."""
    try:
        whole = {"": json.loads(data)}
    except (ValueError, RecursionError):
        return data
    places = list(_places(whole))
    node, key = places[edit.place % len(places)]
    if edit.how == "drop":
        del node[key]
    else:
        node[key] = VALUES[edit.value]
    return json.dumps(whole[""]).encode() if "" in whole else b""


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below here, by what holds it and the key or number under which it does."""
    stack = [tree]
    while stack:
        node = stack.pop()
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            if isinstance(node[key], dict | list):
                stack.append(node[key])

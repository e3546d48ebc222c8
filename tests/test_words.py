"""Phrases that read like a translation, found in code, tests and documentation.

Every phrase here comes with a better one. One folder: `pytest tests/test_words.py -k view`.
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"
# Folders beside the package whose words people read too.
BESIDE = ("benchmarks", "docs_build", "examples", "fuzz")

_VERBS = (
    r"(?:is|are|was|were|has|have|had|does|do|did|can|cannot|could|may|might|must|will|would|"
    r"should|takes?|makes?|needs?|goes|go|comes?|gets?|holds?|knows?)"
)
_CLAUSE_WORD = r"(?!(?:of|in|on|and|or|with|to|that|which|where|as|at|from)\b)[\w'`.-]+"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A banned phrase, and what to write instead."""

    pattern: re.Pattern[str]
    advice: str


def phrase(pattern: str, advice: str) -> Phrase:
    """Return a phrase that also matches across line breaks."""
    return Phrase(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), advice)


PHRASES = (
    # A subject pronoun after ", for", or a few words and then a verb: a clause, not an object.
    phrase(r", for (?:it|they|he|she|we|there) (?!and\b|or\b|to\b|alone\b|in\b)\w+", "because"),
    phrase(rf", for (?:{_CLAUSE_WORD} ){{1,4}}{_VERBS}\b", "because"),
    phrase(r"(?<!there\s)\b(?:is|are|was|were) no\b(?! longer\b)", "is not a ..., or: has no"),
    phrase(r"\bso (?:many|much|few)\b", "name the number: at most `limit` ranks"),
    phrase(r"\bfor so long\b", "name the time: for `seconds`"),
    phrase(r"\bstands\b", "is, appears, is listed"),
    phrase(r"\bstand (?:in|at|on|below|above|beside|behind|between|for|first|last)\b", "are"),
    phrase(r"\bstood\b", "was, appeared"),
    phrase(r"\bthere (?:is|are|was|were) not\b", "there is no ..., or: ... is missing"),
    phrase(r"\b(?:is|are|was|were) not there\b", "is missing"),
    phrase(r"\b(?:told|tells)\b", "say, name, print, report, notify"),
    phrase(r"\btell\b(?! (?:\S+ ){1,5}apart)", "say, name, print, report, notify"),
    phrase(r"\bhow-?manieth\b", "its number, its index"),
    phrase(r"\b(?:hangs?|hung|hanging) up\b", "close, abort"),
    phrase(r"\b(?:go|goes|went|going|gone) on\b", "continue"),
    phrase(
        r"\b(?:get|gets|got|getting) on\b(?! (?:a|an|another|each|every|its|that|the|this)\b)",
        "make progress",
    ),
    phrase(r"\bas (?:it|they) (?:was|were|is|are)(?=[.,;:)]|$)", "unchanged"),
    phrase(r"\bin the end\b", "leave it out, or: finally"),
    phrase(r"\banew\b", "again"),
    phrase(r"\bplease\b", "leave it out"),
    phrase(r"\bbells?\b", "waker"),
    phrase(r"\bjudges?\b", "failure detector, or: decide"),
    phrase(r"\bverdicts?\b", "lost rank, result, outcome"),
    phrase(r"\blifelines?\b", "heartbeat"),
    phrase(r"\bspokes?\b", "heartbeat client"),
    phrase(r"\bhubs?\b", "heartbeat server"),
    phrase(r"\blogbooks?\b", "progress log"),
    phrase(r"\bcrews?\b", "the assembled parts, by name"),
    phrase(r"\bdoors?\b", "way, function, interface"),
    phrase(r"\blessons?\b", "task"),
    phrase(r"(?<!of\s)\bcourses?\b", "candidate"),
    phrase(r"\bcontests?\b", "comparison"),
    phrase(r"\bbatons?\b", "turn"),
    phrase(r"\bhabits?\b", "pattern"),
    phrase(r"\brescues?\b", "release"),
    phrase(r"\bstrangers?\b", "caller"),
    phrase(r"\brooms\b", "packages, folders; of bytes: capacity"),
)

# By path below the root: phrases that are right there, each with its reason.
ALLOWED: dict[str, dict[str, str]] = {
    f"tests/splitting/by_layers/{name}.py": {"stand in": "the class StandIn, in names of tests"}
    for name in ("test_replay", "test_stand_ins")
} | {"CHANGELOG.md": {"Findings.verdicts": "the name that was replaced"}}

# Articles, pronouns and prepositions that open a noun phrase or a sentence about the code.
_NOT_IMPERATIVE = (
    "a|all|an|and|another|any|as|at|both|by|each|every|everything|for|from|here|how|if|in|it|its|"
    "nothing|of|on|one|some|that|the|these|they|this|to|what|when|where|which|who|whose|why|with"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of prose: where it begins, and its text."""

    path: Path
    line: int
    text: str


def folders() -> list[str]:
    """Return the folders and modules right below the package, and what lies beside it."""
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py"}
    found |= {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    return sorted(found | {*BESIDE, "pages"})


def files_of(folder: str) -> Iterator[Path]:
    """Yield the source files of a folder, and its tests."""
    if folder == "pages":
        yield from sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
        return
    base = ROOT / folder if folder in BESIDE else SOURCE / folder
    yield from [base.with_suffix(".py")] if base.with_suffix(".py").exists() else []
    for suffix in ("py", "ipynb", "md", "js", "html", "css"):
        yield from sorted(base.rglob(f"*.{suffix}"))
    yield from sorted((ROOT / "tests" / folder).rglob("*.py"))
    yield from sorted((ROOT / "tests").glob(f"test_{folder}.py"))


@cache
def pieces_of(path: Path) -> tuple[Piece, ...]:
    """Return the prose of a file: of tests, only names, docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    if path.suffix != ".py":
        return (Piece(path, 1, text),)
    nodes = list(ast.walk(ast.parse(text)))
    found = [*comments_of(path, text), *docstrings_of(path, nodes)]
    found += names_of_tests(path, nodes) if is_test(path) else strings_of(path, nodes)
    return tuple(found)


def is_test(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests")


def comments_of(path: Path, text: str) -> Iterator[Piece]:
    """Yield comments; those on consecutive lines are one piece."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    block: list[str] = []
    first = last = 0
    for token in (token for token in tokens if token.type == tokenize.COMMENT):
        line = token.start[0]
        if block and line != last + 1:
            yield Piece(path, first, "\n".join(block))
            block = []
        first, last = (line if not block else first), line
        block.append(token.string.lstrip("# "))
    if block:
        yield Piece(path, first, "\n".join(block))


def docstrings_of(path: Path, nodes: list[ast.AST]) -> Iterator[Piece]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Piece(path, node.body[0].lineno, text)


def strings_of(path: Path, nodes: list[ast.AST]) -> Iterator[Piece]:
    """Yield string literals; the parts of an f-string are one piece."""
    texts = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    joined = [node for node in texts if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    for node in texts:
        match node:
            case ast.JoinedStr(values=values):
                parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in values)
                yield Piece(path, node.lineno, "".join(map(str, parts)))
            case ast.Constant(value=str(text)) if id(node) not in inside:
                yield Piece(path, node.lineno, text)


def names_of_tests(path: Path, nodes: list[ast.AST]) -> Iterator[Piece]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Piece(path, node.lineno, node.name.replace("_", " "))


def complaints_about(piece: Piece) -> Iterator[str]:
    for banned in PHRASES:
        for found in banned.pattern.finditer(piece.text):
            around = piece.text[max(found.start() - 30, 0) : found.end() + 30]
            if is_allowed(piece, around):
                continue
            line = piece.line + piece.text.count("\n", 0, found.start())
            where = f"{piece.path.relative_to(ROOT)}:{line}"
            quoted = " ".join(found[0].split())
            yield f"{where}: {quoted!r} in {' '.join(around.split())!r}; write: {banned.advice}"


def is_allowed(piece: Piece, around: str) -> bool:
    return any(text in around for text in ALLOWED.get(str(piece.path.relative_to(ROOT)), {}))


every_folder = pytest.mark.parametrize("folder", folders())


# Nearly all files have none of these, and a file is searched faster than its pieces are.
_ANY_PHRASE = re.compile(
    "|".join(f"(?:{banned.pattern.pattern})" for banned in PHRASES), re.IGNORECASE | re.MULTILINE
)


@every_folder
def test_words_are_plain(folder: str) -> None:
    found = {
        complaint
        for path in files_of(folder)
        if _ANY_PHRASE.search(" \0 ".join(piece.text for piece in pieces_of(path)))
        for piece in pieces_of(path)
        for complaint in complaints_about(piece)
    }
    assert not found, "\n".join(["", *sorted(found)])


def functions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions; they are statements, and no expression holds one."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child
            yield from functions_in(child)


def opens_with_an_imperative(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function needs no change: properties are nouns, and `Whether` opens a question."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    text = ast.get_docstring(node)
    if text is None or decorators & {"property", "cached_property"}:
        return True
    return re.match(rf"(?:{_NOT_IMPERATIVE})\b", text, re.IGNORECASE) is None


@every_folder
def test_functions_open_with_an_imperative(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {ast.get_docstring(node)!r:.70}"
        for path in files_of(folder)
        if path.suffix == ".py"
        for node in functions_in(ast.parse(path.read_text(encoding="utf-8")))
        if not opens_with_an_imperative(node)
    ]
    advice = "open with an imperative, such as 'Return the rank that holds each stage'"
    assert not found, "\n".join(["", advice, *found])


def test_every_exception_is_still_needed() -> None:
    unused = [
        (path, text)
        for path, texts in ALLOWED.items()
        for text in texts
        if not any(text in piece.text for piece in pieces_of(ROOT / path))
    ]
    assert unused == []


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("it never runs, for the waits go in a circle", True),
        ("about twice as long, for it makes two gradients", True),
        ("drawn again, for their stages were moved", True),
        ("the number of ranks, for the name of a family", False),
        ("schedules, for example of 1F1B, are drawn", False),
        ("a line, for each rank and stage, is printed", False),
        ("'1F0' is no action", True),
        ("there is no GPU, and torch is no longer needed", False),
        ("at most so\nmany ranks", True),
        ("the kind that a code stands for", True),
        ("a stand-in for torch", False),
        ("all ranks are told", True),
        ("letters tell the kinds of action apart", False),
        ("of course it runs, like any course", True),
        ("of course it runs", False),
        ("leaves its input as it was.", True),
        ("the step as it was recorded", False),
    ],
)
def test_phrases_match_what_they_are_meant_for(text: str, is_wrong: bool) -> None:
    assert bool(list(complaints_about(Piece(ROOT / "made_up.py", 1, text)))) == is_wrong

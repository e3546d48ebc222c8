"""What `import penstock` offers: about 45 names, packages behind them, and nothing hidden."""

import ast
import inspect
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import penstock as ps

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "checkpoint",
    "checks",
    "dropin",
    "elastic",
    "errors",
    "files",
    "measuring",
    "passes",
    "planner",
    "sim",
    "testing",
    "view",
)
# What pages and examples may import beside the packages: the command line is a program, and each
# integration is a door of its own, because it loads the library that it is for.
INTEGRATIONS = {
    f"penstock.integrations.{name}" for name in ("hugging_face", "lightning", "pretrained")
}
OPEN = {
    "penstock",
    "penstock.cli",
    *INTEGRATIONS,
    *(f"penstock.{package}" for package in PACKAGES),
}


def test_package_has_about_45_names() -> None:
    assert len(ps.__all__) <= 48
    assert len(set(ps.__all__)) == len(ps.__all__)


def test_dir_lists_every_name_and_package() -> None:
    # Names that are loaded when first used were missing: Pipeline, split, plan, Checkpoints.
    listed = {name for name in dir(ps) if not name.startswith("_")}
    assert listed == {*ps.__all__, *PACKAGES}
    assert "__version__" in dir(ps)


def test_version_is_that_of_the_package() -> None:
    assert ps.__version__ == version("penstock")


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'Piepline'"):
        _ = ps.Piepline


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_that_a_package_lists_exists(package: str) -> None:
    module = getattr(ps, package)
    assert module is import_module(f"penstock.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_every_error_is_in_its_package() -> None:
    defined = {
        name
        for name, value in vars(ps.errors).items()
        if inspect.isclass(value) and issubclass(value, ps.PenstockError)
    }
    assert defined == set(ps.errors.__all__)


def test_every_pass_is_in_its_package() -> None:
    found = set()
    for file in (ROOT / "src/penstock/passes").glob("[a-z]*.py"):
        module = import_module(f"penstock.passes.{file.stem}")
        for name in module.__all__:
            hints = typing.get_type_hints(getattr(module, name))
            if hints.get("return") is ps.Schedule:
                found.add(name)
    # Halves of passes, for the planner, which chooses pairs and places itself.
    halves = {"merge_pairs", "insert_memory_rows", "join_where_possible"}
    assert found - halves == set(ps.passes.__all__)


WITHOUT_TORCH = """
import sys
from operator import attrgetter

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
import penstock as ps
for name in sys.argv[1:]:
    try:
        attrgetter(name)(ps)
    except ps.errors.MissingDependencyError as error:
        print(error)
"""


def test_missing_torch_says_how_to_install_it() -> None:
    # A bare ModuleNotFoundError named torch, but not what needed it or how to get it.
    names = ["Pipeline", "split", "measuring", "testing", "dropin.PipelineStage", "dropin.stage"]
    command = [sys.executable, "-c", WITHOUT_TORCH, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.splitlines() == [
        f"penstock.{name} needs torch, which is not installed; run pip install 'penstock[torch]'"
        for name in names
    ]


# ---- every type that a public function returns is public too


def public_values() -> dict[str, Any]:
    """Every public name but those of torch's interface, which are torch's to choose."""
    found = {f"penstock.{name}": getattr(ps, name) for name in ps.__all__}
    for package in PACKAGES:
        module = getattr(ps, package)
        names = [] if package == "dropin" else getattr(module, "__all__", [])
        found |= {f"penstock.{package}.{name}": getattr(module, name) for name in names}
    return found


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A function itself; of a class its public methods and properties."""
    if inspect.isfunction(value):
        yield name, value
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        inner = getattr(member, "fget", None) or getattr(member, "func", None)
        function = inner or getattr(member, "__func__", member)
        if not key.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{key}", function


def classes_in(hint: Any) -> Iterator[type]:
    """The classes that a type hint names."""
    if inspect.isclass(hint) and not isinstance(hint, types.GenericAlias):
        yield hint
    for part in typing.get_args(hint):
        yield from classes_in(part)


# Parts that a user is given only to pass on, or to read by the attributes that pages describe.
NOT_FOR_USERS = {"Rows", "HereOnly", "Prices", "Tie", "Candidate"}


# Types of optional libraries, which our modules import for type checkers only.
FOREIGN = {"Figure": object}


def test_every_type_that_is_returned_is_exported() -> None:
    values = public_values()
    exported = {value for value in values.values() if inspect.isclass(value)}
    hidden = {}
    for name, value in values.items():
        for place, function in functions_of(name, value):
            hint = typing.get_type_hints(function, localns=FOREIGN).get("return")
            for found in classes_in(hint):
                is_ours = found.__module__.startswith("penstock.")
                if is_ours and found not in exported and found.__name__ not in NOT_FOR_USERS:
                    hidden[place] = f"{found.__module__}.{found.__name__}"
    assert hidden == {}


# ---- pages, examples and the tests of the public side use public names only


def python_of(page: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return "\n".join(blocks)


def imports_of(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module)
    return {name for name in found if name.split(".")[0] == "penstock"}


def is_module(name: str) -> bool:
    """Whether the first three parts of a name are a module of ours."""
    path = ROOT / "src" / Path(*name.split(".")[:3])
    return path.is_dir() or path.with_suffix(".py").is_file()


PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PROGRAMS = sorted(
    [
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("tests/examples/*.py"),
        ROOT / "tests/test_documentation.py",
        ROOT / "tests/test_typing.py",
    ]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_import_public_names_only(page: Path) -> None:
    assert imports_of(python_of(page)) - OPEN == set()
    # Prose does not send readers to what a module behind a package defines.
    named = set(re.findall(r"`(?:rich\.print\()?(penstock(?:\.\w+)+)", page.read_text()))
    deep = {name for name in named if name.count(".") >= 3 and is_module(name)}
    assert page.name in ("design.md", "limits.md") or deep == set()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_programs_import_public_names_only(program: Path) -> None:
    assert imports_of(program.read_text()) - OPEN == set()


# ---- what is not a schedule, and what is not stages


class Model(nn.Module):
    """A model that nobody has split."""


# These were a TypeError: object of type 'Model' has no len().
@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (Model(), r"\(got Model\); split it first, as in penstock\.split\(model, stages=4\)"),
        (3, r"or one module per stage \(got int\)"),
        # The check used it up, and nothing was left to measure or to run.
        (iter([nn.Linear(2, 2)]), r"\(got list_iterator\); give a list"),
        ([nn.Linear(2, 2), 2], r"\(got int among them\); give modules only"),
        ({0: nn.Linear(2, 2), 1: "1"}, r"\(got str among them\); give modules only"),
    ],
)
def test_what_is_not_stages_is_refused_in_words(stages: Any, message: str) -> None:
    with pytest.raises(ps.errors.ArgumentError, match=message):
        ps.Pipeline(stages, "1F1B", microbatches=2)
    with pytest.raises(ps.errors.ArgumentError, match=message):
        ps.measure(stages, example=(), loss=lambda output: output)


# These were an AttributeError: 'Timeline' object has no attribute 'num_ranks'.
@pytest.mark.parametrize("verb", [ps.check, ps.explain, ps.lower, ps.simulate])
def test_verbs_of_schedules_say_where_to_get_one(verb: Callable[[Any], object]) -> None:
    timeline = ps.simulate(ps.build("1F1B", ranks=2, microbatches=2))
    with pytest.raises(ValueError, match=r"\(got Timeline\); give its \.schedule$"):
        verb(timeline)
    with pytest.raises(ValueError, match=r'\(got str\); make one, as in build\("1F1B", '):
        verb("1F1B")


# ---- what an interactive session shows of a value


def test_values_show_themselves_on_one_line(tmp_path: Path) -> None:
    # A review printed every pair of numbers in it, and a pipe every module of the model.
    costs = ps.Costs(activation_bytes=1)
    problem = ps.planner.SchedulingProblem.of(costs, ps.Placement.v(2), 4, memory=None)
    curve = ps.planner.memory_curve(costs, ranks=2, microbatches=2, limits=(2.0, 3.0), seconds=0)
    timeline = ps.simulate(ps.build("1F1B", ranks=2, microbatches=2))
    pipe = ps.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2)
    values = (problem, curve, ps.review(timeline, timeline), pipe, ps.Checkpoints(tmp_path))
    assert [repr(value) for value in values] == [
        "<SchedulingProblem: 2 ranks, 4 stages, 4 microbatches>",
        "<MemoryCurve: limits of 2, 3 bytes>",
        "<Review: predicted 9 s, recorded 9 s>",
        "<Pipe: 2 stages of the layers in the model itself>",
        f"<Checkpoints in {tmp_path}>",
    ]

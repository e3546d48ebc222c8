"""What `docs/design.md` and the style guide promise about the shape of the package."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "penstock"

# A module imports from its own line's unit and from the lines above. Torch is allowed from
# TORCH_LINE on, and inside the functions of the command line.
LAYERS = (
    ("errors", "version", "late_names"),
    ("untrusted", "atomic_files", "missing_torch", "units"),
    ("ir",),
    ("costs",),
    ("schedules", "passes", "checks"),
    ("sim",),
    ("files",),
    ("assembly",),
    ("planner",),
    ("view",),
    ("torch_private", "torch_attributes"),
    ("tensors", "modules"),
    ("parallel", "deferred"),
    ("loss", "ranks"),
    ("alive",),
    ("step", "splitting"),
    ("training",),
    ("measuring", "checkpoint"),
    ("elastic",),
    ("tools",),
    ("dropin", "cli", "testing", "integrations"),
    ("__init__", "__main__"),
)
TORCH_LINE = LAYERS.index(("torch_private", "torch_attributes"))
OPTIONAL = {"fsspec", "matplotlib", "numba", "ortools"}
# Private attributes that are neither torch's nor ours, and what they are.
FOREIGN_ATTRIBUTES = {
    "_active_collector": "transformers: what collects outputs now",
    "_dataloaders": "accelerate: the loaders that it has prepared",
    "_exit": "os: ends the process at once",
    "_fields": "a named tuple's names",
    "_getframe": "sys: the frame that runs now",
    "_init_weights": "transformers: fills a module's tensors",
    "_make": "makes a named tuple",
}
# torch's compiler takes seconds to load, and so does what builds on it.
LOADED_LATE = ("penstock.deferred.compiled", "torch._inductor.compile_fx")
MOST_LINES, MOST_MODULES = 350, 16
# Modules and folders above these limits, and why. Remove one once it is within them.
TOO_LONG: dict[str, str] = {}
TOO_FULL: dict[str, str] = {}


@dataclass(frozen=True)
class Import:
    """One import of a module or of a name in it, and whether it is inside a function."""

    module: str
    name: str | None
    is_inside_function: bool


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    name: str
    text: str
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def unit(self) -> str:
        """The package or module right below `penstock` that it belongs to."""
        if self.name == "penstock":
            return "__init__"
        return self.name.split(".")[1]

    @property
    def layer(self) -> int:
        return layer_of(self.unit)


def layer_of(unit: str) -> int:
    return next(number for number, units in enumerate(LAYERS) if unit in units)


def needs_torch(found: Import) -> bool:
    """Whether an import is of torch, or of our packages below the torch line."""
    package, _, rest = found.module.partition(".")
    is_ours = package == "penstock" and rest != ""
    return package == "torch" or (is_ours and layer_of(rest.split(".")[0]) >= TORCH_LINE)


def find_imports(node: ast.AST, *, is_inside: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        # Imports are statements, and no expression holds one.
        if isinstance(child, ast.expr):
            continue
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, None, is_inside) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=0):
                assert module is not None
                yield from (Import(module, alias.name, is_inside) for alias in names)
            case ast.ImportFrom():
                raise AssertionError(
                    "imports name the whole path, so that they can be searched for"
                )
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from find_imports(child, is_inside=is_inside or is_function)


@cache
def load_modules() -> dict[str, Module]:
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        modules[name] = Module(path, name, text, tree, tuple(find_imports(tree)))
    return modules


def own_imports(module: Module) -> Iterator[tuple[Import, str]]:
    """Yield the imports from this package, with the module that each comes from.

    An import from a module that does not exist is the type checker's to find.
    """
    for found in module.imports:
        if found.module in load_modules():
            whole = f"{found.module}.{found.name}"
            yield found, whole if whole in load_modules() else found.module


def exported_names(module: Module) -> list[str] | None:
    """Return the names in `__all__`, or None if the module has no `__all__`."""
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def defined_names(module: Module) -> set[str]:
    """Return the names that the module defines or imports at its top level."""
    names: set[str] = set()
    for node in module.tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                for target in targets:
                    names |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def test_every_module_has_its_place_in_the_layers() -> None:
    known = {unit for units in LAYERS for unit in units}
    assert {module.unit for module in load_modules().values()} <= known


def test_imports_go_down_the_layers_only() -> None:
    wrong = []
    for module in load_modules().values():
        for _, target in own_imports(module):
            unit = load_modules()[target].unit
            if unit != module.unit and layer_of(unit) >= module.layer:
                wrong.append(f"{module.name} imports {target}")
    assert wrong == []


def test_imports_make_no_circle() -> None:
    graph = {
        module.name: {target for _, target in own_imports(module)} - {module.name}
        for module in load_modules().values()
    }
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)


def test_pure_side_imports_no_torch_and_the_command_line_only_inside_functions() -> None:
    wrong = []
    for module in load_modules().values():
        for found in module.imports:
            if found.module.split(".")[0] == "torch":
                is_allowed = module.layer >= TORCH_LINE and module.unit not in ("cli", "__main__")
                if not is_allowed and not (module.unit == "cli" and found.is_inside_function):
                    wrong.append(f"{module.name} imports {found.module}")
    assert wrong == []


def test_nothing_is_built_on_the_incumbent() -> None:
    wrong = [
        f"{module.name} imports {found.module}"
        for module in load_modules().values()
        for found in module.imports
        if f"{found.module}.{found.name}".startswith("torch.distributed.pipelining")
    ]
    assert wrong == []


# Calls that unpickle what comes from elsewhere. The launcher reads what its own child processes
# write to a pipe, and `torch.load` unpickles nothing if it is asked for weights only.
UNPICKLING = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.loads", "cloudpickle.loads"),
    *("dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list"),
    *("dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list"),
}
MAY_UNPICKLE = {"penstock.tools.launcher"}


def unpickling_calls(module: Module) -> Iterator[str]:
    """Find what a module calls or imports that unpickles, whatever it calls the module of it."""
    ends = {name.partition(".")[2] for name in UNPICKLING if name.startswith("dist.")}
    for found in module.imports:
        if f"{found.module}.{found.name}" in UNPICKLING or found.name in ends:
            yield f"{found.module}.{found.name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in UNPICKLING or node.attr in ends:
                yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            asked = [keyword for keyword in node.keywords if keyword.arg == "weights_only"]
            yield from [] if asked else ["torch.load without weights_only"]


def test_nothing_that_comes_from_elsewhere_is_unpickled() -> None:
    # Integrations shared outputs by `broadcast_object_list`: whoever reached a port of the process
    # group could run code in every process.
    wrong = [
        f"{module.name} uses {use}"
        for module in load_modules().values()
        if module.name not in MAY_UNPICKLE
        for use in unpickling_calls(module)
    ]
    assert wrong == []
    assert list(unpickling_calls(load_modules()["penstock.tools.launcher"])) != []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def torch_names(module: Module) -> dict[str, str]:
    """Return the names by which a module knows torch and what it imports from torch."""
    names = {}
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.split(".")[0] == "torch":
                        names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str(source), names=aliases) if (
                source.split(".")[0] == "torch"
            ):
                names |= {
                    alias.asname or alias.name: f"{source}.{alias.name}" for alias in aliases
                }
    return names


def private_uses_of_torch(module: Module) -> Iterator[str]:
    """Find private names of torch that a module imports, or reaches from what it imports."""
    names = torch_names(module)
    imported = {f"{found.module}.{found.name}" for found in module.imports}
    imported |= {found.module for found in module.imports if found.name is None}
    for whole in sorted(imported):
        first, *rest = whole.split(".")
        if first == "torch" and any(map(is_private, rest)):
            yield whole
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            first, *rest = ast.unparse(node).split(".")
            # Operations are public by their full name, whatever they are called.
            if first in names and rest[:1] != ["ops"]:
                yield ".".join([names[first], *rest])


def test_private_names_of_torch_are_named_in_one_module() -> None:
    wrong = [
        f"{module.name} uses {use}"
        for module in load_modules().values()
        if module.unit != "torch_private"
        for use in private_uses_of_torch(module)
    ]
    assert wrong == []


def test_private_attributes_of_torch_are_listed_in_one_module() -> None:
    listed = listed_attributes()
    wrong = []
    for module in load_modules().values():
        if module.layer < TORCH_LINE or module.unit in ("torch_private", "torch_attributes"):
            continue
        own = own_attributes(module)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                is_own = owner in ("self", "cls") or node.attr in own
                if not is_own and node.attr not in listed:
                    wrong.append(f"{module.name} uses {owner}.{node.attr}")
    assert wrong == []


def listed_attributes() -> set[str]:
    """Return the attributes in `torch_attributes.ATTRIBUTES`, read without importing torch."""
    for node in load_modules()["penstock.torch_attributes"].tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id="ATTRIBUTES"), value=ast.Dict() as table):
                listed: dict[str, dict[str, str]] = ast.literal_eval(table)
                return {name for each in listed.values() for name in each} | {*FOREIGN_ATTRIBUTES}
    raise AssertionError("torch_attributes lists no attributes")


def own_attributes(module: Module) -> set[str]:
    """Return the private attributes that the classes of a module give their own objects."""
    assigned = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    methods = {
        node.name
        for outer in ast.walk(module.tree)
        if isinstance(outer, ast.ClassDef)
        for node in outer.body
        if isinstance(node, ast.FunctionDef)
    }
    return assigned | methods


def test_imports_inside_functions_are_optional_dependencies() -> None:
    wrong = []
    for module in load_modules().values():
        for found in module.imports:
            package = found.module.split(".")[0]
            is_late = package in OPTIONAL or found.module in LOADED_LATE
            is_allowed = is_late or (module.unit == "cli" and needs_torch(found))
            if found.is_inside_function and not is_allowed:
                wrong.append(f"{module.name} imports {found.module}")
    assert wrong == []


def test_names_with_an_underscore_stay_in_their_file() -> None:
    wrong = []
    for module in load_modules().values():
        modules_here = set()
        for found, target in own_imports(module):
            is_module = target != found.module
            # Torch's own names may begin with one; exporting such a name says that it is torch's.
            exported = exported_names(load_modules()[target]) or []
            is_torchs = module.unit == "dropin" and found.name in exported
            is_private = found.name is not None and found.name.startswith("_")
            if is_private and not is_torchs and not is_module:
                wrong.append(f"{module.name} imports {found.module}.{found.name}")
            if is_module and found.name is not None:
                modules_here.add(found.name)
        for node in ast.walk(module.tree):
            match node:
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                    owner in modules_here and name.startswith("_")
                ):
                    wrong.append(f"{module.name} uses {owner}.{name}")
    assert wrong == []


def is_face(module: Module) -> bool:
    """Return whether a module only gives what others have under the name of one of torch's."""
    is_torchs = module.unit == "dropin" and module.path.parent.name == "dropin"
    return is_torchs and all(isinstance(node, ast.ImportFrom) for node in module.tree.body[1:])


def test_what_other_files_import_is_exported() -> None:
    wrong = []
    for module in load_modules().values():
        for found, target in own_imports(module):
            if target == found.module and found.name is not None:
                exported = exported_names(load_modules()[target]) or []
                is_all = found.name == "*" and exported and is_face(module)
                if found.name not in exported and not is_all:
                    wrong.append(f"{module.name} imports {target}.{found.name}")
    assert wrong == []


def test_exported_names_exist_and_are_listed_once() -> None:
    for module in load_modules().values():
        exported = exported_names(module) or []
        assert len(set(exported)) == len(exported), module.name
        # Names that are loaded late are asked for, package by package, in `test_public_names`.
        finds_more = any(
            isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in module.tree.body
        )
        if not finds_more and "late_names" not in defined_names(module):
            assert set(exported) <= defined_names(module), module.name


def test_no_module_at_the_top_bears_the_name_of_something_exported_there() -> None:
    modules = {name.split(".")[1] for name in load_modules() if name.count(".") >= 1}
    exported = exported_names(load_modules()["penstock"])
    assert exported is not None
    assert modules & set(exported) == set()


def test_every_module_says_what_it_owns() -> None:
    silent = [m.name for m in load_modules().values() if not ast.get_docstring(m.tree)]
    assert silent == []


# Public classes that share a name, and why.
TWICE = {"Pipe": "ours, and torch's, whose name users of the drop-in type"}


# Nineteen names had two meanings, so that a reader took one class for another.
def test_a_class_has_its_name_for_itself() -> None:
    found: dict[str, list[str]] = {}
    for module in load_modules().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(module.name)
    assert {name for name, homes in found.items() if len(homes) > 1} == set(TWICE)


def test_modules_are_short() -> None:
    too_long = {
        str(module.path.relative_to(SOURCE))
        for module in load_modules().values()
        if len(module.text.splitlines()) > MOST_LINES
    }
    assert too_long == set(TOO_LONG)


def test_folders_hold_few_modules() -> None:
    sizes = Counter(
        str(module.path.parent.relative_to(SOURCE))
        for module in load_modules().values()
        if module.path.name != "__init__.py"
    )
    too_full = {folder for folder, size in sizes.items() if size > MOST_MODULES}
    assert too_full == set(TOO_FULL)


def test_only_the_command_line_prints() -> None:
    printing = [
        module.name
        for module in load_modules().values()
        if module.unit != "cli"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert printing == []


def test_what_is_left_to_do_names_its_issue() -> None:
    unnamed = [
        f"{module.name}: {line.strip()}"
        for module in load_modules().values()
        for line in module.text.splitlines()
        if re.search(r"\b(TODO|FIXME|XXX)\b", line) and not re.search(r"#[0-9]+", line)
    ]
    assert unnamed == []


def test_exceptions_to_type_checking_name_their_code_and_reason() -> None:
    bare = [
        f"{module.name}: {line.strip()}"
        for module in load_modules().values()
        for line in module.text.splitlines()
        if "type: ignore" in line and not re.search(r"# type: ignore\[[a-z-, ]+\]  # \w", line)
    ]
    assert bare == []


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)

import penstock as ps
for family in ("1F1B", "ZBV", "DualPipe"):
    schedule = ps.build(family, ranks=4, microbatches=8)
    lowered = ps.lower(schedule, receives="late")
    ps.check(lowered, channels="shared")
    ps.explain(lowered)

from penstock.cli import main
main(["show", "1F1B", "--ranks", "4", "--microbatches", "8"])
"""


def test_pure_side_runs_where_torch_cannot_be_imported() -> None:
    names = [
        module.name
        for module in load_modules().values()
        if module.layer < TORCH_LINE or module.unit == "cli"
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("rank 0  F0")


@pytest.mark.parametrize("name", ["penstock", "penstock.cli"])
def test_importing_the_package_loads_no_optional_dependency(name: str) -> None:
    code = f"import {name}, sys; print(*({{'torch', 'matplotlib', 'numba'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == ""

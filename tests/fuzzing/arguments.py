"""Arguments for every command: what is asked for, in the wrong measure, or something else."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import click

from penstock.cli import main
from tests.fuzzing.readers import READERS

__all__ = ["COMMANDS", "draw_arguments", "write_files"]

# The commands that compute; `demo` and `verify` run models, and have tests of their own.
COMMANDS = (
    "list",
    "show",
    "check",
    "simulate",
    "compare",
    "explain",
    "trace",
    "plan",
    "revise",
)

# What is asked for, and what is not; of the latter mostly one at a time.
_WHOLE = ("1", "2", "3", "4"), ("0", "-1", "1.5", "", "x", "100000000", "9" * 30, "٣", "1_0")
_NUMBERS = ("1", "0.5", "1,2", "0"), ("1,2,3", "1e-320", "1e99", "1e308", "nan", "inf", "-1", ",")
_BYTES = ("1e9", "40GiB", "80 GB"), ("1", "0", "9e999", "-1", "GiB", "nan", "1XB", "")
_FAMILIES = ("1F1B", "zbv", "DualPipe", "Interleaved1F1B", "V-Min"), ("1F1", "", "[/b]", "-")
_WRITTEN = ("out", "[b].svg", "a$_$"), ("absent/out", ".", "", "/dev/full", "/dev/null", "\udcff")
_ODD = 0.15
# How the names of files begin that an argument of a command is meant for.
_MEANT = {
    "costs_file": ("costs", "layers"),
    "files": ("trace", "profiler"),
    "plan_file": ("plan",),
    "steps": ("timeline",),
}


def write_files(folder: Path) -> list[str]:
    """Valid, broken, empty and absent files, by their paths; a folder and a device too."""
    (folder / "folder.csv").mkdir()
    for name, reader in READERS.items():
        for number, data in enumerate(reader.valid):
            (folder / f"{name}{number}{reader.ending}").write_bytes(data)
            (folder / f"{name}{number}-cut{reader.ending}").write_bytes(data[: len(data) // 2])
    for ending in (".csv", ".toml", ".json"):
        (folder / f"empty{ending}").touch()
        (folder / f"binary{ending}").write_bytes(bytes(range(256)) * 8)
        (folder / f"long{ending}").write_bytes(b"0F0," * 50_000)
        (folder / f"deep{ending}").write_bytes(b"[" * 50_000)
        (folder / f"[bold]{ending}").write_bytes(READERS["schedule"].valid[0])
    paths = sorted(map(str, folder.iterdir()))
    return [*paths, str(folder / "absent.csv"), "/dev/null", "", "-"]


def draw_arguments(random: Random, files: list[str], name: str) -> list[str]:
    """A command with some of its options and values for them."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = [each for each in command.params if isinstance(each, click.Option)]
    chosen = random.sample(options, random.randint(0, min(4, len(options))))
    found = [name]
    for option in chosen:
        found.append(random.choice(option.opts))
        if not option.is_flag:
            found.append(_draw_value(random, option, files))
    for argument in command.params:
        if isinstance(argument, click.Argument):
            count = random.choice((0, 1, 1, 1, 1, 1, 2))
            found += [_draw_value(random, argument, files) for _ in range(count)]
    # Planning stops when its time is over.
    return [*found, "--seconds", "0"] if name in ("plan", "revise") else found


def _draw_value(random: Random, parameter: click.Parameter, files: list[str]) -> str:
    kind = parameter.type
    match kind:
        case click.Choice():
            return _pick(random, (tuple(map(str, kind.choices)), ("other", "")))
        case click.IntRange() | click.types.IntParamType():
            return _pick(random, _WHOLE)
        case click.FloatRange():
            return _pick(random, _NUMBERS)
        case click.Path() if kind.exists:
            beginnings = _MEANT[parameter.name or ""]
            meant = [file for file in files if Path(file).name.startswith(beginnings)]
            return _pick(random, (meant, files))
        case click.Path():
            return _pick(random, _WRITTEN)
        case _ if kind.name == "BYTES":
            return _pick(random, _BYTES)
        case _ if kind.name.startswith("NUMBER"):
            return _pick(random, _NUMBERS)
        case _:
            usual, odd = _FAMILIES
            return _pick(random, (usual, [*odd, *files]))


def _pick(random: Random, pools: tuple[Sequence[str], Sequence[str]]) -> str:
    return random.choice(pools[random.random() < _ODD])

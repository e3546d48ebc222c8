"""`penstock verify`: families pass, errors are found. One test starts real processes."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from penstock.schedules.registry import FAMILIES

pytest.importorskip("torch")

# Models as a user would write them; the tests name the functions.
MODELS = """
import torch
from torch import nn

def make(num_stages, last=None, loss=nn.MSELoss()):
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)]
    if last is not None:
        stages[-1].append(last)
    return stages, (torch.randn(8, 4),), torch.randn(8, 4), loss

def valid(num_stages):
    return make(num_stages)

class Detach(nn.Module):
    def forward(self, x):
        return x.detach()

class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x * self.calls

class Keep(nn.Module):
    def __init__(self):
        super().__init__()
        self.outputs = []
    def forward(self, x):
        y = x * 2
        self.outputs.append(y)
        return y

class Raise(nn.Module):
    def forward(self, x):
        raise RuntimeError("the wheel is stuck")

class Auxiliary(nn.Module):
    def forward(self, x):
        import penstock as ps
        ps.add_loss((x ** 2).mean())
        return x

def detaches(num_stages):
    stages, args, target, loss = make(num_stages)
    stages[0].append(Detach())
    return stages, args, target, loss

def remembers(num_stages):
    return make(num_stages, Count())

def drops_out(num_stages):
    return make(num_stages, nn.Dropout(0.5))

def hoards(num_stages):
    return make(num_stages, Keep())

def fails(num_stages):
    return make(num_stages, Raise())

def adds_a_loss(num_stages):
    stages, args, target, loss = make(num_stages)
    stages[0].append(Auxiliary())
    return stages, args, target, loss

def takes_roots(num_stages):
    return make(num_stages, loss=lambda output, target: (output - target).square().mean() ** 0.5)

def too_few(num_stages):
    return make(num_stages - 1)

def no_tuple(num_stages):
    return list(make(num_stages))

def no_modules(num_stages):
    stages, *others = make(num_stages)
    return [1, 2], *others

def no_args(num_stages):
    stages, args, *others = make(num_stages)
    return stages, args[0], *others

def no_loss(num_stages):
    return make(num_stages, loss="mse")

def breaks(num_stages):
    raise ValueError("no water")
"""
SIZE = ("--ranks", "2", "--microbatches", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Change to a folder that contains a module of models."""
    (tmp_path / "river_models.py").write_text(MODELS)
    before = sys.path.copy()
    with chdir(tmp_path):
        yield tmp_path
    sys.path[:] = before
    sys.modules.pop("river_models", None)


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(
        main, ["verify", *map(str, arguments)]
    )


def results_of(result: Result) -> dict[str, bool]:
    """Return for every check of a JSON output whether it passed."""
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    found = {check["name"]: check["is_fine"] for check in answer["checks"]}
    assert answer["is_fine"] == all(found.values()) == (result.exit_code == 0)
    return found


def failed(result: Result) -> list[str]:
    return [name for name, is_fine in results_of(result).items() if not is_fine]


def test_output_has_a_line_per_check() -> None:
    result = run("ZBV", *SIZE)
    lines = [line.split() for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert lines[0][:3] == ["ZBV", "with", "mlp:"]
    assert [line[:2] for line in lines[2:]] == [
        ["gradients", "ok"],
        ["stages", "reached"],
        ["loss", "ok"],
        ["peak", "activations"],
        ["left", "for"],
        ["order", "ok"],
    ]
    assert "48 actions as planned" in result.output


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_with_an_uneven_batch(family: str, model: str) -> None:
    result = run(family, "-r", "2", "-m", "3", "--model", model, "--rows", "7", "--json")
    assert failed(result) == []


@pytest.mark.parametrize("family", ["1F1B", "ZB-H2", "InterleavedZeroBubble", "V-Min", "DualPipe"])
def test_more_ranks_and_fewer_rows_than_microbatches_pass(family: str) -> None:
    assert failed(run(family, "-r", "4", "-m", "6", "--json")) == []
    assert failed(run(family, "-r", "2", "-m", "6", "--rows", "4", "--json")) == []


def test_more_stages_per_rank_pass() -> None:
    result = run("Interleaved1F1B", *SIZE, "--stages-per-rank", "3", "--json")
    assert failed(result) == []
    assert "6 stages" in json.loads(result.stdout)["schedule"]


def test_csv_file_passes_with_a_model_of_the_user(folder: Path) -> None:
    (folder / "mine.csv").write_text("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1I1,1W1\n")
    assert failed(run("mine.csv", "--model", "river_models:valid", "--json")) == []


def test_schedule_with_skips_passes(folder: Path) -> None:
    (folder / "skip.csv").write_text(
        "# dataflow: 0>1 0>2 1>2 | parts: 0 1 2\n0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    )
    (folder / "river_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Join(nn.Bilinear):\n    pass\n"
        "def valid(num_stages):\n"
        "    stages = [nn.Linear(4, 4), nn.Linear(4, 4), Join(4, 4, 4)]\n"
        "    return stages, (torch.randn(4, 4),), torch.randn(4, 4), nn.MSELoss()\n"
    )
    assert failed(run("skip.csv", "--model", "river_models:valid", "--json")) == []


def test_one_process_per_rank_passes() -> None:
    result = run("ZBV", *SIZE, "--model", "gpt", "--rows", "7", "--processes", "--json")
    assert failed(result) == []


@pytest.mark.usefixtures("folder")
def test_loss_added_in_a_stage_is_included() -> None:
    assert failed(run("ZBV", *SIZE, "--model", "river_models:adds_a_loss", "--json")) == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("detaches", ["stages reached"]),
        ("remembers", ["gradients", "loss"]),
        ("drops_out", ["gradients", "loss"]),
        ("hoards", ["peak activations"]),
    ],
)
def test_model_that_cannot_be_split_exits_with_one(model: str, expected: list[str]) -> None:
    result = run("1F1B", *SIZE, "--model", f"river_models:{model}", "--json")
    assert (result.exit_code, failed(result)) == (1, expected)


@pytest.mark.usefixtures("folder")
def test_loss_that_microbatches_do_not_add_up_to_is_refused() -> None:
    result = run("1F1B", *SIZE, "--model", "river_models:takes_roots")
    assert result.exit_code == 2
    assert "compares rows with each other cannot be split" in result.stderr


def test_weights_finished_by_i_are_named(folder: Path) -> None:
    (folder / "river_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Cell(nn.GRUCell):\n    pass\n"
        "def cells(num_stages):\n"
        "    stages = [Cell(4, 4) for _ in range(num_stages)]\n"
        "    return stages, (torch.randn(4, 4),), torch.randn(4, 4), nn.MSELoss()\n"
    )
    with pytest.warns(UserWarning, match="cannot be split"):
        result = run("ZB-H1", *SIZE, "--model", "river_models:cells", "--json")
    assert (result.exit_code, failed(result)) == (1, ["left for W"])
    named = "0 of 4 weights (I finished 0.weight_ih, 0.weight_hh, 1.weight_ih ...)"
    assert named in [check["found"] for check in json.loads(result.stdout)["checks"]]


@pytest.mark.usefixtures("folder")
def test_failed_parameter_and_stage_are_named() -> None:
    lines = run("1F1B", *SIZE, "--model", "river_models:detaches").output.splitlines()
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    assert ["stages reached", "FAILED", "no gradient in stage 0", "all"] in cells
    lines = run("1F1B", *SIZE, "--model", "river_models:remembers").output.splitlines()
    assert re.search(r"gradients +FAILED +off by .* \(0.\w+ of stage [01]\)", "\n".join(lines))


def test_tolerance_limits_the_error() -> None:
    assert failed(run("ZBV", *SIZE, "--tolerance", "0", "--json")) != []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("too_few", "must return 2 stages (got 1)"),
        (
            "no_tuple",
            "must return stages, args, target and loss (got list of list, tuple, Tensor, MSELoss)",
        ),
        ("no_modules", "stages must be a list of modules (got list of int, int)"),
        ("no_args", "args must be the tuple of the first stage's inputs (got Tensor)"),
        ("no_loss", "loss must be a function of output and target (got str)"),
        ("breaks", "failed when asked for 2 stages"),
        ("absent", "river_models has no function 'absent'"),
    ],
)
def test_function_with_a_wrong_result_exits_with_two(model: str, message: str) -> None:
    result = run("1F1B", *SIZE, "--model", f"river_models:{model}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "rnn"), "not a model: 'rnn'; use mlp, gpt, or module:function for your own"),
        (("--model", "no_such_module:valid"), "cannot import 'no_such_module'"),
        (("--model", "river_models:valid", "--rows", "3"), "brings its own batch"),
    ],
)
def test_unknown_model_exits_with_two(arguments: tuple[str, ...], message: str) -> None:
    result = run("1F1B", *SIZE, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.usefixtures("folder")
def test_stage_that_raises_exits_with_two_and_its_location() -> None:
    result = run("1F1B", *SIZE, "--model", "river_models:fails")
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'raise RuntimeError("the wheel is stuck")' in result.stderr
    assert "rank 1, stage 1, microbatch 0, 1F0: RuntimeError: the wheel is stuck" in result.stderr


def test_invalid_schedule_is_rejected_before_it_runs(folder: Path) -> None:
    (folder / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    result = run("stuck.csv")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "stuck.csv is not a valid schedule: rank 0, position 1, 0B0" in result.stderr

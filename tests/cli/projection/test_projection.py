"""`penstock project`, `penstock curve`, and tokens per second in comparisons and plans."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import penstock as ps
from penstock.cli import main

LAYERS = """\
[[layers]]
name = "block"
repeat = 4
forward = 1.0
backward_input = 1.0
backward_weight = 1.0
gradient_bytes = 10
"""
CLUSTER = (
    *("--nodes", "2", "--devices-per-node", "2", "-m", "8"),
    *("--bandwidth-inside", "100", "--bandwidth-between", "10"),
)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def layers(tmp_path: Path) -> str:
    file = tmp_path / "layers.toml"
    file.write_text(LAYERS)
    return str(file)


def test_every_way_to_use_a_cluster_is_compared(layers: str) -> None:
    text = run("project", layers, *CLUSTER, "--tokens", "100")
    assert text.startswith("tensor  pipeline  data  step s  ratio  tokens/s")
    assert "\n  work: 24 s (96.0 %)\n" in text
    values = json.loads(run("project", layers, *CLUSTER, "--tokens", "100", "--json"))
    found = values["projections"]
    assert [one["step_seconds"] for one in found] == sorted(one["step_seconds"] for one in found)
    assert {one["tensor"] * one["pipeline"] * one["data"] for one in found} == {4}
    for one in found:
        assert sum(one["by_cause"].values()) == pytest.approx(one["step_seconds"])
        assert one["tokens_per_second"] == pytest.approx(800 / one["step_seconds"])


def test_one_layout_is_projected_by_its_degrees(layers: str) -> None:
    text = run("project", layers, *CLUSTER, "--pipeline", "4")
    assert text.startswith("tensor 1, pipeline 4, data 1: 4 stages, 8 microbatches")
    result = CliRunner().invoke(main, ["project", layers, *CLUSTER, "--tensor", "3"])
    assert result.exit_code == 2
    assert "must divide the number of devices (got 3 x 1, devices: 4)" in result.stderr


def test_a_curve_is_printed_and_drawn(tmp_path: Path) -> None:
    options = (
        "-r",
        "2",
        "-m",
        "4",
        "--activation-bytes",
        "1",
        "--points",
        "3",
        "--seconds",
        "0.2",
    )
    text = run("curve", *options, "--svg", str(tmp_path / "curve.svg"))
    assert text.splitlines()[0].split() == [
        "memory", "end", "time", "s", "bound", "s", "gap", "bubble", "order"
    ]  # fmt: skip
    assert "= no order is faster" in text
    picture = (tmp_path / "curve.svg").read_text()
    assert picture.startswith("<?xml")
    assert picture.count('id="line2d') > 2
    points = json.loads(run("curve", *options, "--json"))["points"]
    assert len(points) == 3
    assert points[0]["memory"] == 1
    assert all(point["lower_bound"] <= point["seconds"] * (1 + 1e-9) for point in points)


def test_a_curve_is_not_a_page() -> None:
    curve = ps.planner.memory_curve(
        ps.Costs(activation_bytes=1), ranks=2, microbatches=2, limits=[2], seconds=0.1
    )
    with pytest.raises(ps.errors.ArgumentError, match=r"saved as \.png, \.svg, \.pdf or \.txt"):
        ps.view.save(curve, "curve.html")
    with pytest.raises(ps.errors.ArgumentError, match="ranks must be left out"):
        ps.view.draw(curve, ranks=2)


def test_comparisons_have_tokens_per_second_and_mfu() -> None:
    given = ("--tokens", "100", "--flops-per-token", "1e6", "--peak-flops", "1e7")
    table = run("compare", "1F1B", "ZB-H1", "-r", "4", "-m", "8", *given).splitlines()
    assert table[0].endswith("tokens/s     MFU")
    # 8 microbatches of 100 tokens in 33 s; 24 MFLOP/s over four devices of 10 MFLOP/s each.
    assert table[1].split()[-3:] == ["24.24", "60.6", "%"]
    values = json.loads(run("compare", "1F1B", "-r", "4", "-m", "8", *given, "--json"))
    assert values["1F1B"]["throughput"]["mfu"] == pytest.approx(0.606, abs=0.001)
    result = CliRunner().invoke(main, ["compare", "1F1B", "--peak-flops", "1"])
    assert result.exit_code == 2
    assert "work with --tokens only" in result.stderr


def test_a_plan_says_its_throughput() -> None:
    text = run("plan", "-r", "2", "-m", "4", "--seconds", "0.2", "--tokens", "100")
    assert "tokens/s\n" in text

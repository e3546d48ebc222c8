"""Libraries that build torch's schedules run on the drop-in, unmodified.

They are installed without what they depend on, which would bring other versions of torch:
pip install --no-deps nemo-automodel==0.7.0 torchtitan==0.3.0
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps

LIMIT_SECONDS = 240
LIBRARIES = Path(__file__).with_name("libraries")


def run_program(name: str, *settings: str, processes: int = 2) -> dict[str, Any]:
    """Run a program with the drop-in; what is not split runs in one process without it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = ["-m", "penstock.dropin", *launcher] if processes > 1 else launcher
    command = [sys.executable, "-W", "ignore", *start]
    result = subprocess.run(
        [*command, str(LIBRARIES / f"{name}.py"), *settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


needs_nemo = pytest.mark.skipif(
    find_spec("nemo_automodel") is None,
    reason="pip install --no-deps nemo-automodel==0.7.0",
)

# torchtitan imports these as soon as it is imported.
TITAN = ("torchtitan", "spmd_types==0.2.3", "torchdata", "tyro", "datasets", "einops")
needs_titan = pytest.mark.skipif(
    any(find_spec(name.partition("=")[0]) is None for name in TITAN),
    reason=f"pip install --no-deps {' '.join(TITAN)} and what these need",
)
# Its trainer imports these too, and with them what has no use on a processor.
needs_titan_trainer = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("docstring_parser", "torchao", "triton")),
    reason="pip install torchtitan==0.3.0 torchao triton torch==2.13.0",
)

# The second and the third crashed: the loss was handed over bare, and a method was missing.
CASES = {
    "1F1B": ("pp_schedule=1F1B", "layers_per_stage=4"),
    "pool of buffers": ("pp_schedule=1F1B", "layers_per_stage=4", "pp_recv_buffer_pool=yes"),
    "own backward": (
        "pp_schedule=ZBVZeroBubble",
        "layers_per_stage=2",
        "patch_stage_backward_maybe_with_nosync=yes",
    ),
    "Interleaved1F1B": ("pp_schedule=Interleaved1F1B", "layers_per_stage=2"),
}


@needs_nemo
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nemo_trains_what_the_unsplit_model_does(name: str) -> None:
    found = run_program("nemo", *CASES[name])
    assert found["module"].startswith("penstock.dropin")
    assert max(found["wrong"]) < 1e-5


@needs_nemo
@pytest.mark.slow
def test_nemo_runs_a_plan_from_its_file(tmp_path: Path) -> None:
    plan = ps.plan(ps.Costs(), ranks=2, microbatches=8, placement="interleaved", effort=1e4)
    file = tmp_path / "schedule.csv"
    plan.schedule.to_csv(file)
    found = run_program(
        "nemo", "pp_schedule=Interleaved1F1B", "layers_per_stage=2", f"pp_schedule_csv={file}"
    )
    assert max(found["wrong"]) < 1e-5


SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


@needs_titan
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchtitan_trains_what_the_unsplit_model_does(schedule: str) -> None:
    found = run_program("titan", f"schedule={schedule}")
    assert found["module"].startswith("penstock.dropin")
    assert max(found["wrong"]) < 1e-4


@needs_titan
@pytest.mark.slow
def test_torchtitan_runs_a_plan_from_its_file(tmp_path: Path) -> None:
    plan = ps.plan(ps.Costs(), ranks=2, microbatches=8, placement="v", effort=1e4)
    file = tmp_path / "schedule.csv"
    plan.schedule.to_csv(file)
    found = run_program("titan", "schedule=ZBVZeroBubble", f"csv={file}")
    assert max(found["wrong"]) < 1e-4


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which torchtitan's own trainer has trained a model as a whole."""
    folder = tmp_path_factory.mktemp("titan")
    run_program("titan_trainer", str(folder), "name=unsplit", processes=1)
    return folder


# With torch 2.13's own module it does not run: its step has no arg_mbs.
@needs_titan
@needs_titan_trainer
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_torchtitans_own_trainer_trains_what_it_does_in_one_process(
    schedule: str, unsplit: Path
) -> None:
    found = run_program("titan_trainer", str(unsplit), f"name={schedule}", f"schedule={schedule}")
    assert found["module"].startswith("penstock.dropin")
    mine, expected = (torch.load(unsplit / f"{name}.pt") for name in (schedule, "unsplit"))
    # Six steps of two batches each, clipped, with an evaluation after the first and every third.
    step = ["loss", "norm"]
    kinds = [*step, "held", *step, *step, "held", *step, *step, *step, "held"]
    assert [kind for kind, _ in mine["logs"]] == kinds
    for (kind, value), (_, other) in zip(mine["logs"], expected["logs"], strict=True):
        assert value == pytest.approx(other, rel=1e-5), kind
    assert mine["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(mine["weights"][name], weight, rtol=0, atol=1e-4, msg=name)

"""Elastic training: real torchrun agents, of which one is killed, and one comes later."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest
from torch import nn

import penstock as ps
from penstock.atomic_files import write_atomically
from penstock.errors import ArgumentError
from penstock.planner.search.layer_files import read_layers
from tests.elastic_run import ROWS, STEPS, WIDTH, Model, adam, batch, make_job
from tests.processes import Processes

_LIMIT_SECONDS = 600.0
_SCRIPT = Path(__file__).with_name("elastic_run.py")


def losses_undisturbed() -> list[float]:
    """Train in one process as one rank, from the first step to the last."""
    pipe = ps.split(Model(), layers="layers", stages=1)
    pipeline = ps.Pipeline(pipe, "GPipe", microbatches=4, loss=nn.MSELoss(), ranks=1, seed=7)
    optimizer = adam(pipeline.parameters())
    losses = []
    for step in range(STEPS):
        args, target = batch(step)
        loss = pipeline.step(*args, target=target).loss
        assert loss is not None
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Agents:
    """torchrun agents of one process each, as on machines of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(ps.__file__).parents[1]),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start one more machine; the first one holds the rendezvous."""
        command = [
            *(sys.executable, "-m", "penstock.elastic"),
            *("--nnodes", "3:5", "--nproc-per-node", "1", "--max-restarts", "20"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}"),
            "--rdzv-conf",
            f"is_host={int(not self.running)},last_call_timeout=3,"
            "keep_alive_interval=2,keep_alive_max_attempt=15,join_timeout=300",
            *(str(_SCRIPT), str(self._folder)),
        ]
        log = (self._folder / f"agent-{len(self.running)}.txt").open("wb")
        with log:
            agent = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self.running.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill a machine: the agent, and what it has started."""
        for process in [*_children(agent.pid), agent.pid]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait(_LIMIT_SECONDS)

    def logs(self) -> str:
        """Return what the agents printed, for a test that fails."""
        files = sorted(self._folder.glob("agent-*.txt"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)


@contextmanager
def start_agents(folder: Path, count: int) -> Iterator[Agents]:
    agents = Agents(folder)
    try:
        for _ in range(count):
            agents.start()
        yield agents
    finally:
        for agent in agents.running:
            agents.kill(agent)


def _children(process: int) -> list[int]:
    """Return everything that a process has started, and that these have started."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [*_children(child), child]
    return found


def wait_until(happens: Callable[[], bool], agents: Agents) -> None:
    end = monotonic() + _LIMIT_SECONDS
    while not happens():
        assert monotonic() < end, agents.logs()
        sleep(0.1)


def noted(folder: Path) -> list[tuple[int, int, float]]:
    """Number, ranks and loss of every step that was done, in the order of doing."""
    file = folder / "steps.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [line.split() for line in lines if line.count(" ") == 2]
    return [(int(number), int(ranks), float(loss)) for number, ranks, loss in rows]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
def test_training_continues_with_three_of_four_ranks_and_with_four_again(tmp_path: Path) -> None:
    hold(tmp_path, (10, 4), (20, 3))
    with start_agents(tmp_path, 4) as agents:
        wait_until(lambda: (10, 4) in {row[:2] for row in noted(tmp_path)}, agents)
        agents.kill(agents.running[2])
        hold(tmp_path, (20, 3))
        wait_until(lambda: (20, 3) in {row[:2] for row in noted(tmp_path)}, agents)
        agents.start()
        wait_until(lambda: (STEPS, 4) in {row[:2] for row in noted(tmp_path)}, agents)
        check_ends(agents, killed={2})
    check_losses(tmp_path)
    assert sorted({ranks for _, ranks, _ in noted(tmp_path)}) == [3, 4]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
def test_training_survives_two_losses_at_once(tmp_path: Path) -> None:
    hold(tmp_path, (10, 5))
    with start_agents(tmp_path, 5) as agents:
        wait_until(lambda: (10, 5) in {row[:2] for row in noted(tmp_path)}, agents)
        agents.kill(agents.running[2])
        agents.kill(agents.running[3])
        hold(tmp_path)
        wait_until(lambda: (STEPS, 3) in {row[:2] for row in noted(tmp_path)}, agents)
        check_ends(agents, killed={2, 3})
    check_losses(tmp_path)


# init_process_group waited half an hour for a rank that was lost before all had met again.
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("when", ["before the meeting", "in the build"])
def test_training_survives_a_loss_during_the_restart(tmp_path: Path, when: str) -> None:
    hold(tmp_path, (10, 5))
    with start_agents(tmp_path, 5) as agents:
        wait_until(lambda: (10, 5) in {row[:2] for row in noted(tmp_path)}, agents)
        (tmp_path / "lost.txt").write_text(f"{when} 1 of 4")
        agents.kill(agents.running[2])
        hold(tmp_path)
        machine = tmp_path / "machine.txt"
        wait_until(machine.exists, agents)
        second = [agent.pid for agent in agents.running].index(int(machine.read_text()))
        agents.kill(agents.running[second])
        wait_until(lambda: (STEPS, 3) in {row[:2] for row in noted(tmp_path)}, agents)
        check_ends(agents, killed={2, second})
    check_losses(tmp_path)


def hold(folder: Path, *steps: tuple[int, int]) -> None:
    """Let the first rank wait after these steps, each with its number of ranks."""
    text = "".join(f"{number} {ranks}\n" for number, ranks in steps)
    write_atomically(folder / "held.txt", text)


def check_ends(agents: Agents, killed: set[int]) -> None:
    for number, agent in enumerate(agents.running):
        if number not in killed:
            assert agent.wait(_LIMIT_SECONDS) == 0, agents.logs()


def check_losses(folder: Path) -> None:
    """Check that all steps were done, with the losses of a run in which nothing happened."""
    undisturbed = losses_undisturbed()
    steps = noted(folder)
    assert {number for number, _, _ in steps} == set(range(1, STEPS + 1))
    # Also those that came again after a restart have the loss that they had.
    expected = [undisturbed[number - 1] for number, _, _ in steps]
    assert [loss for _, _, loss in steps] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rows", [0, 6, 9])
def test_a_job_with_uneven_microbatches_is_refused(rows: int) -> None:
    job = make_job()
    with pytest.raises(ArgumentError, match=rf"rows: {rows}, microbatches: 4"):
        ps.Job(
            job.model, job.layers, job.loss, job.optimizer, job.batch,
            rows=rows, microbatches=4, steps=3,
        )  # fmt: skip


def train_to(_: int, folder: Path, steps: int) -> list[tuple[int, float]]:
    """Return the steps that a start does, on a job that measures its layers."""
    done: list[tuple[int, float]] = []
    job = replace(make_job(), costs=None, steps=steps)
    ps.train_elastically(
        job,
        folder,
        save_every=2,
        plan_seconds=0.5,
        on_step=lambda step: done.append((step.number, step.loss)),
    )
    return done


def test_second_start_reuses_the_costs_and_the_plan_of_the_first(
    tmp_path: Path, two_processes: Processes
) -> None:
    first = two_processes.run(train_to, tmp_path, 3)
    files = {file: file.read_bytes() for file in tmp_path.glob("*.json")}
    second = two_processes.run(train_to, tmp_path, 6)
    assert [[number for number, _ in steps] for steps in first] == [[1, 2, 3]] * 2
    assert [[number for number, _ in steps] for steps in second] == [[4, 5, 6]] * 2
    assert {file: file.read_bytes() for file in tmp_path.glob("*.json")} == files
    assert sorted(name.split("-ranks")[0] for name in (f.name for f in files)) == [
        "layers.json",
        "plan-2",
    ]
    losses = [loss for _, loss in first[0] + second[0]]
    assert losses == pytest.approx(losses_undisturbed()[:6], rel=1e-12)


def test_a_store_that_restarts_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match=r"start python -m penstock\.elastic in place of"):
        ps.train_elastically(make_job(), "nowhere")


def plan_within(_: int, folder: Path, memory: float) -> str:
    """Return what a start says of a job with Adam and a limit of bytes per rank."""
    job = replace(make_job(), costs=None, steps=1, memory=memory)
    try:
        ps.train_elastically(job, folder, plan_seconds=0.5)
    except ps.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


# The plan was made from costs measured without the optimizer: it promised a limit that two
# averages per parameter broke, and only the rank that plans raised for limits that cannot be kept.
def test_a_plan_counts_the_state_of_the_jobs_optimizer(
    tmp_path: Path, two_processes: Processes
) -> None:
    two_processes.run(plan_within, tmp_path / "free", 1e9)
    layer = 8 * (WIDTH * WIDTH + WIDTH)
    measured = read_layers(tmp_path / "free" / "layers.json").layers[ROWS // 4]
    assert [(p.parameter_bytes, p.gradient_bytes, p.optimizer_bytes) for p in measured] == [
        (layer, layer, 2 * layer + 2 * 4)
    ] * 8
    # Room for the parameters and gradients of a rank's half, but not for its optimizer's state.
    first, second = two_processes.run(plan_within, tmp_path / "tight", 4 * 3 * layer)
    assert first.startswith("MemoryLimitError: ")
    message = first.removeprefix("MemoryLimitError: ")
    assert second == f"PipelineError: rank 0 cannot find a plan: {message}"

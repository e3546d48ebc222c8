"""The three ways in, each in processes of their own: what is imported there stays there."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

import pytest

SECONDS = 180


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """Return what a Python process prints; it must succeed, and in time."""
    result = start(*arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def start(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=SECONDS,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
    )


# Runs what it is given as python would, each in a fork of a process that has imported torch, which
# takes seconds, but neither torch's pipelining nor ours.
FORKS = """
import json, os, runpy, sys, tempfile, torch, torch.export, torch.distributed.fsdp

def run(option, name, *rest):
    sys.argv = [option, *rest]
    if option == "-c":
        exec(name, {"__name__": "__main__"})
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            asked = json.loads(line)
            os.chdir(asked["cwd"])
            code = 1
            try:
                run(*asked["arguments"])
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        errors.seek(0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps([code, printed.read(), errors.read()]), flush=True)
"""

Run: TypeAlias = Callable[..., str]


@pytest.fixture(scope="module")
def run_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run as `run` does, but in a process in which torch is imported already."""
    folder = tmp_path_factory.mktemp("forks")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**clean, "OMP_NUM_THREADS": "1"},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def run(*arguments: str, cwd: Path = folder) -> str:
            assert server.stdin is not None
            assert server.stdout is not None
            print(json.dumps({"arguments": arguments, "cwd": str(cwd)}), file=server.stdin)
            server.stdin.flush()
            code, printed, errors = json.loads(server.stdout.readline())
            assert code == 0, errors
            return str(printed).strip()

        yield run
        server.stdin.close()


def write(path: Path, text: str) -> Path:
    path.write_text(dedent(text), encoding="utf-8")
    return path


def test_after_install_torchs_names_are_ours() -> None:
    code = """
        import sys
        import penstock.dropin
        penstock.dropin.install()
        penstock.dropin.install()
        assert "torch" not in sys.modules
        import torch
        import torch.distributed.pipelining as whole
        import torch.distributed.pipelining._backward
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, pipe_split, pipeline
        from torch.distributed.pipelining import _IR, _utils, microbatch, schedules, stage
        from torch.distributed.pipelining.schedules import _Action
        assert whole is penstock.dropin is torch.distributed.pipelining
        modules = [_IR, _utils, microbatch, schedules, stage, whole._backward, whole._unflatten]
        modules += [whole._debug, whole._schedule_visualizer]
        print(*[module.__name__.removeprefix("penstock.dropin.") for module in modules])
        classes = (PipelineStage, ScheduleGPipe, _Action)
        print({one.__module__.split(".")[0] for one in classes})
        print(pipe_split is penstock.dropin.pipe_split, pipeline is penstock.dropin.pipeline)
    """
    assert run("-c", dedent(code)).splitlines() == [
        "_IR _utils microbatch schedules stage _backward _unflatten _debug _schedule_visualizer",
        "{'penstock'}",
        "True True",
    ]


def test_uninstall_gives_torchs_own_back(run_forked: Run) -> None:
    code = """
        import penstock.dropin
        penstock.dropin.install()
        import torch.distributed.pipelining.schedules
        ours = torch.distributed.pipelining.schedules
        penstock.dropin.uninstall()
        penstock.dropin.uninstall()
        import torch.distributed.pipelining.schedules
        from torch.distributed.pipelining import PipelineStage
        print(ours.__name__, torch.distributed.pipelining.schedules.__name__)
        print(PipelineStage.__module__)
    """
    assert run_forked("-c", dedent(code)).splitlines() == [
        "penstock.dropin.schedules torch.distributed.pipelining.schedules",
        "torch.distributed.pipelining.stage",
    ]


@pytest.mark.parametrize("name", ["", ".microbatch"])
def test_install_refuses_when_torchs_package_is_there_already(name: str, run_forked: Run) -> None:
    code = f"""
        import torch.distributed.pipelining{name}
        import penstock.dropin
        try:
            penstock.dropin.install()
        except penstock.PenstockError as error:
            print(error)
        import torch.distributed.pipelining.schedules as schedules
        print(schedules.__name__)
    """
    assert run_forked("-c", dedent(code)).splitlines() == [
        "torch.distributed.pipelining was imported before install(), and code that has it would "
        "keep using torch's; call penstock.dropin.install() first, or run the program with "
        "python -m penstock.dropin",
        "torch.distributed.pipelining.schedules",
    ]


def test_our_own_code_never_loads_torchs_package(run_forked: Run) -> None:
    code = """
        import importlib, pkgutil, sys
        import penstock
        for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
            if not found.name.endswith(("__main__", ".sitecustomize")):
                importlib.import_module(found.name)
        for name in penstock.__all__:
            getattr(penstock, name)
        print([name for name in sys.modules if name.startswith("torch.distributed.pipelining")])
    """
    assert run_forked("-c", dedent(code)) == "[]"


SCRIPT = """
    import sys
    from torch.distributed.pipelining import PipelineStage
    import beside
    print(__name__, PipelineStage.__module__, beside.VALUE, sys.argv[1:])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    write(tmp_path / "beside.py", "VALUE = 7")
    return write(tmp_path / "program.py", SCRIPT)


EXPECTED = "__main__ penstock.dropin.stage 7 ['--steps', '-m', 'x']"


def test_a_script_runs_as_python_would_run_it(program: Path, run_forked: Run) -> None:
    assert run_forked("-m", "penstock.dropin", str(program), "--steps", "-m", "x") == EXPECTED


def test_a_module_runs_as_python_would_run_it(program: Path, run_forked: Run) -> None:
    given = ("-m", "penstock.dropin", "-m", "program", "--steps", "-m", "x")
    assert run_forked(*given, cwd=program.parent) == EXPECTED


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-m"]])
def test_without_a_program_it_says_how_to_use_it(arguments: list[str]) -> None:
    result = start("-m", "penstock.dropin", *arguments)
    assert (result.returncode, result.stderr.strip()) == (
        1,
        "usage: python -m penstock.dropin [-m module | script.py] [arguments]",
    )


def test_a_program_that_does_not_exist_is_named() -> None:
    result = start("-m", "penstock.dropin", "nowhere.py")
    assert result.returncode == 1
    assert result.stderr.startswith("nowhere.py does not exist; usage:")


def test_a_programs_failure_is_its_own(tmp_path: Path) -> None:
    program = write(tmp_path / "failing.py", "raise SystemExit(3)")
    assert start("-m", "penstock.dropin", str(program)).returncode == 3


@pytest.mark.slow
def test_processes_that_a_program_starts_are_served_too(tmp_path: Path) -> None:
    program = write(
        tmp_path / "parent.py",
        """
        import multiprocessing
        import subprocess
        import sys

        def ask():
            code = "import torch.distributed.pipelining as p; print(p.__name__)"
            command = [sys.executable, "-c", code]
            return subprocess.run(command, capture_output=True, text=True).stdout.strip()

        def tell(queue):
            import torch.distributed.pipelining.stage as stage
            queue.put((stage.__name__, ask()))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=tell, args=(queue,))
            child.start()
            print(*queue.get(timeout=120))
            child.join()
            print(ask())
        """,
    )
    assert run("-m", "penstock.dropin", str(program)).split() == [
        "penstock.dropin.stage",
        "penstock.dropin",
        "penstock.dropin",
    ]


@pytest.mark.slow
def test_a_hidden_sitecustomize_still_runs(tmp_path: Path) -> None:
    write(tmp_path / "sitecustomize.py", "import sys; sys.was_customized = True")
    code = (
        "import sys; import torch.distributed.pipelining as p; "
        "print(p.__name__, sys.was_customized)"
    )
    program = write(
        tmp_path / "parent.py",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)",
    )
    found = run("-m", "penstock.dropin", str(program), PYTHONPATH=str(tmp_path))
    assert found == "penstock.dropin True"


TRAINING = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = PipelineStage(torch.nn.Linear(3, 3), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(torch.ones(4, 3))
    else:
        schedule.step(target=torch.ones(4, 3), losses=losses)
    with open(os.path.join(os.path.dirname(__file__), f"{rank}.txt"), "w") as file:
        print(type(stage).__module__, len(losses), file=file)
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "penstock.dropin", "-m", "torch.distributed.run", "{launch}", "{program}"],
        ["-m", "torch.distributed.run", "{launch}", "-m", "penstock.dropin", "{program}"],
    ],
    ids=["around torchrun", "inside torchrun"],
)
def test_every_rank_of_torchrun_is_served(tmp_path: Path, command: list[str]) -> None:
    program = write(tmp_path / "training.py", TRAINING)
    launch = ["--standalone", "--nproc-per-node", "2"]
    arguments = [
        word
        for part in command
        for word in (launch if part == "{launch}" else [part.format(program=program)])
    ]
    run(*arguments)
    found = [(tmp_path / f"{rank}.txt").read_text(encoding="utf-8").strip() for rank in range(2)]
    assert found == ["penstock.dropin.stage 0", "penstock.dropin.stage 2"]

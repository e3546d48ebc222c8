"""The same work by this checkout and by another one, in two processes that take turns.

    git worktree add ../first 538cc9b
    OMP_NUM_THREADS=1 python benchmarks/versions.py ../first
    python benchmarks/versions.py ../first --only split plain    on CUDA if there is one

Work of the host counts in seconds of processor time, since other processes disturb these least;
the split backward in seconds of a loop without pauses. Repeats take turns: this, the other, the
other, this. Values are medians; ratios, with quartiles, are of repeats right after each other.
What the other checkout cannot do gets a row that says so.
Prints its table and writes it to benchmarks/results/versions.md; where there is a GPU, to
versions_cuda.md.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

from result_files import write_result

HERE = Path(__file__).resolve().parent.parent
SIDES = ("other", "this")
STEPS = {
    "steps of 1F1B, mean": ("1F1B", 1, "mean"),
    "steps of 1F1B, auto": ("1F1B", 1, "auto"),
    "steps of Interleaved1F1B, mean": ("Interleaved1F1B", 4, "mean"),
    "steps of InterleavedZeroBubble, mean": ("InterleavedZeroBubble", 4, "mean"),
}
COMMANDS = {
    "import penstock": ("-c", "import penstock"),
    "penstock --help": ("-m", "penstock", "--help"),
    "compare 1F1B ZBV, 8 x 32": ("-m", "penstock", "compare", "1F1B", "ZBV", "-r8", "-m32"),
    "page of ZBV, 64 x 256": ("-m", "penstock", "show", "ZBV", "-r64", "-m256", "--html"),
}
SPLIT = ("split backward", "plain backward")
# Each request is a piece of work; each answer its seconds, or why there are none.
_Answer = float | str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="the root of the other checkout")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="work whose name begins like one of these"
    )
    parser.add_argument("--name", help="the other version, where git does not know it")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        serve(options.checkout)
        return
    roots = {"other": options.checkout.resolve(), "this": HERE}
    workers = {side: start(root) for side, root in roots.items()}
    lines = ["| work | other ms | this ms | this over other |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    try:
        device = ask(workers["this"], "device")
        for name in find_work(workers["this"], tuple(options.only)):
            lines.append(compare(name, workers, roots, options.repeats))
            print(lines[-1], flush=True)
    finally:
        for worker in workers.values():
            worker.kill()
    commit = subprocess.run(
        ["git", "-C", str(roots["other"]), "log", "-1", "--format=%h %cs"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    spread = f"medians of {options.repeats} repeats in turns, with quartiles of their ratios"
    title = f"This version beside that of {options.name or commit or 'another checkout'}"
    name = "versions_cuda" if device else "versions"
    write_result(name, title, ["\n".join(lines)], spread=spread, device=device)


def start(root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__).resolve()), str(root), "--work"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(worker: "subprocess.Popen[str]", request: str) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def find_work(worker: "subprocess.Popen[str]", only: tuple[str, ...]) -> list[str]:
    names = ["lower and check ZBV, 64 x 512", "simulate ZBV, 64 x 1024", *STEPS, *COMMANDS]
    names += [f"{kind}, {shape}" for shape in ask(worker, "shapes") for kind in SPLIT]
    return [name for name in names if name.startswith(only)]


def compare(
    name: str, workers: dict[str, "subprocess.Popen[str]"], roots: dict[str, Path], repeats: int
) -> str:
    """Return the row of this work. The first turn of both warms up and does not count."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(repeats + 1):
        for side in SIDES if turn % 2 else reversed(SIDES):
            answer = run(roots[side], name) if name in COMMANDS else ask(workers[side], name)
            if isinstance(answer, str):
                return f"| {name} | | | {side}: {answer} |"
            if turn:
                found[side].append(answer)
    ratios = [this / other for other, this in zip(*found.values(), strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    other, this = (f"{1e3 * statistics.median(found[side]):.2f}" for side in SIDES)
    return f"| {name} | {other} | {this} | {median:.3f} ({low:.3f} to {high:.3f}) |"


def run(root: Path, name: str) -> _Answer:
    """Return the processor seconds of a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    # An installed package has bytecode, which the first turn writes. Without it, Python compiles
    # every module that it loads, and an import would mostly show how many lines there are.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *COMMANDS[name]]
        words += [f"{folder}/page.html"] if words[-1] == "--html" else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return done.stderr.strip().rpartition("\n")[2]
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ---- in a process that has one of the checkouts


def serve(root: Path) -> None:
    """Do the work that is asked for, and answer with its seconds."""
    sys.path[:0] = [str(root / "src"), str(root / "benchmarks")]
    import torch

    import penstock
    import split_backward as blocks

    assert str(penstock.__file__).startswith(str(root)), penstock.__file__
    torch.set_num_threads(1)
    is_cuda = torch.cuda.is_available()
    shapes = {
        str(shape): shape for shape in (blocks.CUDA_SHAPES if is_cuda else blocks.CPU_SHAPES)
    }
    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name = json.loads(line)
        answer: Any
        try:
            if name == "shapes":
                answer = list(shapes)
            elif name == "device":
                answer = torch.cuda.get_device_name() if is_cuda else ""
            else:
                if name not in ready:
                    ready[name] = prepare(name, penstock, blocks, shapes)
                answer = ready[name]()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}".partition("\n")[0]
        print(json.dumps(answer), flush=True)


def prepare(name: str, ps: Any, blocks: Any, shapes: dict[str, Any]) -> Callable[[], float]:
    """Return what does this work once, and gives its seconds."""
    import torch

    kind, _, shape = name.partition(", ")
    if kind in SPLIT:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        variant = blocks.EAGER["ours" if kind == "split backward" else "plain"]
        job = blocks.make_job(variant, shapes[shape], device)
        return lambda: float(blocks.loop(job, device))
    if name in STEPS:
        return timed(prepare_steps(ps, *STEPS[name]))
    if name.startswith("simulate"):
        add = getattr(ps, "add_send_recv", None) or ps.passes.add_send_recv
        large = add(ps.build("ZBV", ranks=64, microbatches=1024))
        return timed(lambda: ps.simulate(large))
    return timed(
        lambda: ps.check(ps.lower(ps.build("ZBV", ranks=64, microbatches=512)), channels="shared")
    )


def prepare_steps(ps: Any, family: str, stages: int, reduction: str) -> Callable[[], object]:
    """Return ten steps of layers so small that little but the host's work is left."""
    import torch

    pipeline = ps.Pipeline(
        [torch.nn.Linear(8, 8) for _ in range(stages)],
        family,
        microbatches=64,
        loss=torch.nn.MSELoss(),
        ranks=1,
        reduction=reduction,
    )
    x = torch.randn(64, 8)
    for _ in range(9):
        pipeline.step(x, target=x)
    return lambda: [pipeline.step(x, target=x) for _ in range(10)]


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def run_once() -> float:
        begin = process_time()
        work()
        return process_time() - begin

    return run_once


if __name__ == "__main__":
    main()

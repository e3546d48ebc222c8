"""What benchmarks of several ranks share: a device divided among them, and a clock.

With as many GPUs as ranks every rank has its own. With fewer, all ranks share the first one: each
gets its share of the multiprocessors by MPS, if that can be started, and NCCL is made to talk over
loopback sockets, because it refuses two ranks on one device of one host.
"""

import datetime
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_JOIN_SECONDS = 120


@contextmanager
def shared_device(ranks: int, share: int) -> Iterator[None]:
    """Split one GPU between processes by MPS, where that can be started."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if torch.cuda.device_count() >= ranks or tool is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        subprocess.run([tool, "-d"], check=True)
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share)
        try:
            yield
        finally:
            subprocess.run([tool], input=b"quit\n", check=False)


def is_device_shared(ranks: int) -> bool:
    return torch.cuda.device_count() < ranks


def describe_device(ranks: int, share: int) -> str:
    """Name the device, what each rank has of it, and what NCCL's messages go over."""
    if not is_device_shared(ranks):
        return f"{torch.cuda.get_device_name()}, NCCL over the machine's own links"
    return (
        f"{torch.cuda.get_device_name()}, {ranks} ranks on one GPU, {share} % each by MPS, NCCL "
        "over loopback sockets"
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def join(rank: int, port: int, ranks: int) -> torch.device:
    """Join the ranks' NCCL group, and return this rank's device."""
    warnings.simplefilter("ignore")
    is_shared = is_device_shared(ranks)
    device = torch.device("cuda", 0 if is_shared else rank)
    if is_shared:
        # NCCL takes every rank for a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
        os.environ.update(NCCL_SOCKET_NTHREADS="2", NCCL_NSOCKS_PERTHREAD="2")
    torch.cuda.set_device(device)
    _open_group("nccl", rank, port, ranks, device)
    return device


def join_on_cpu(rank: int, port: int, ranks: int) -> torch.device:
    """Join the ranks' gloo group, with one thread each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _open_group("gloo", rank, port, ranks, None)
    return torch.device("cpu")


def _open_group(
    backend: str, rank: int, port: int, ranks: int, device: torch.device | None
) -> None:
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=ranks,
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=datetime.timedelta(seconds=_JOIN_SECONDS),
        device_id=device,
    )


class Meter:
    """The seconds and bytes of what all ranks do together: those of the rank with most."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The host's own barrier: NCCL's would take part of a shared device.
        self.host = dist.new_group(backend="gloo")

    def time(self, call: Callable[[], object], times: int = 1) -> float:
        """Return the seconds of one call of several in a row, from idle devices to idle ones."""
        self.meet()
        begin = perf_counter()
        for _ in range(times):
            call()
        self.wait_for_device()
        return self.largest(perf_counter() - begin) / times

    def peak(self, call: Callable[[], object], others: int) -> float:
        """Return the most MiB of any rank in a call, without the bytes that others hold."""
        if self.device.type == "cpu":
            return 0.0
        self.wait_for_device()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait_for_device()
        return self.largest(torch.cuda.max_memory_allocated() - others) / 2**20

    def meet(self) -> None:
        """Wait until every rank is here and its device idle."""
        self.wait_for_device()
        dist.barrier(self.host)

    def wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def held(self) -> int:
        """Return the bytes in use on this rank's device."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def of_every_rank(self, number: float) -> list[float]:
        """Return the numbers of all ranks."""
        everyone = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        everyone[dist.get_rank()] = number
        dist.all_reduce(everyone, group=self.host)
        found: list[float] = everyone.tolist()
        return found

    def largest(self, number: float) -> float:
        most = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.host)
        return most.item()


def take_turns(
    items: Sequence[T], repeats: int, measure: Callable[[T], float]
) -> list[list[float]]:
    """Measure every item, round by round; who comes first changes from round to round."""
    found: list[list[float]] = [[] for _ in items]
    for turn in range(repeats):
        for step in range(len(items)):
            number = (turn + step) % len(items)
            found[number].append(measure(items[number]))
    return found


def spread_of(numbers: list[float]) -> tuple[float, float, float]:
    """Return the median between the quartiles."""
    low, middle, high = statistics.quantiles(numbers, n=4)
    return low, middle, high

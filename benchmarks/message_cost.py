"""What a message costs the compute beside it on its receiver: NCCL and peer memory.

    python benchmarks/message_cost.py

Two ranks. The receiver runs a chain of matrix products alone, while it waits for one message, and
while messages arrive one after the other. Penstock's own channels carry the messages. With one
GPU both ranks share it, by MPS if that can be started; see ranks_on_one_gpu.py. Times are medians.
Prints its table and writes it to benchmarks/results/message_cost.md.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from penstock.ranks.group_transport import GroupTransport
from penstock.ranks.transport import Message
from penstock.tensors.packet import Packet
from ranks_on_one_gpu import free_port, join, shared_device
from result_files import write_result

MEBIBYTES = 8
ARRIVING = 20


class Receiver:
    """Products on one rank, with a clock of the device."""

    def __init__(self, products: int) -> None:
        self.products = products
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped upstream
        self.factor = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def time(self, before: Callable[[], None] = lambda: None) -> float:
        """Return the milliseconds of the products, after something else was started."""
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped upstream
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped upstream
        before()
        begin.record()
        product = self.factor
        for _ in range(self.products):
            product = self.factor @ product
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def message(number: int) -> Message:
    return Message(is_forward=True, edge=0, microbatch=number, source=0, destination=1)


def measure(rank: int, transport: GroupTransport, options: argparse.Namespace) -> list[float]:
    """Return the times alone, with a pending message, and with arriving ones, on the receiver."""
    payload = torch.zeros(MEBIBYTES << 20, device="cuda", dtype=torch.uint8)
    receiver = Receiver(options.products)
    host = dist.new_group(backend="gloo")
    times: list[list[float]] = [[], [], []]

    def step(count: int, is_pending: bool, kept: list[float] | None) -> None:
        transport.begin_step(str(count).encode())
        torch.cuda.synchronize()
        dist.barrier(host)
        if rank == 0:
            if is_pending:
                dist.barrier(host)
            for number in range(count):
                transport.send(message(number), Packet("T", [payload]))
        else:
            taken = receiver.time(lambda: receive(count)) if count else receiver.time()
            if is_pending:
                dist.barrier(host)
            if kept is not None:
                kept.append(taken)
            torch.cuda.synchronize()
        transport.end_step()
        transport.control.gather_bytes(b"well")
        transport.remember_shapes()

    def receive(count: int) -> None:
        with torch.cuda.stream(receiver.side):
            for number in range(count):
                transport.post_receive(message(number))
            for number in range(count):
                transport.receive(message(number))

    for repeat in range(options.repeats + 3):
        kept = times if repeat >= 3 else [None, None, None]
        step(0, is_pending=False, kept=kept[0])
        # The first two steps with a shape exchange headers, which a pending message would block.
        step(1, is_pending=repeat >= 2, kept=kept[1])
        step(ARRIVING, is_pending=False, kept=kept[2])
    return [statistics.median(each) if each else 0.0 for each in times]


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    device = join(rank, port, options.ranks)
    lines = [
        f"{options.products} products of 2048 x 2048 in bf16, ms; {options.share} % of the GPU "
        "for each of two ranks.",
        "",
        f"| messages by | alone | one pending | {ARRIVING} x {MEBIBYTES} MiB arriving |",
        "|---|---|---|---|",
    ]
    for uses_peer_memory in (False, True):
        world = dist.group.WORLD
        assert world is not None
        transport = GroupTransport(world, device, uses_peer_memory=uses_peer_memory)
        transport.open_channels({(0, 1): 2})
        name = ", ".join(set(transport.routes.values()))
        alone, pending, arriving = measure(rank, transport, options)
        if rank == 1:
            lines.append(
                f"| {name} | {alone:.2f} | {pending:.2f} ({pending / alone:.2f}x) | "
                f"{arriving:.2f} ({arriving / alone:.2f}x) |"
            )
        transport.close()
    if rank == 1:
        print("\n".join(lines), flush=True)
        spread = f"medians of {options.repeats} repeats"
        gpu = torch.cuda.get_device_name()
        text = "\n".join(lines)
        title = "Compute beside messages"
        write_result("message_cost", title, [text], spread=spread, device=gpu)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"products": 300, "repeats": 7, "share": 25}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.ranks = 2
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, but torch sees none")
    with shared_device(options.ranks, options.share):
        spawn(work, (free_port(), options), nprocs=2)  # type: ignore[no-untyped-call]  # untyped upstream


if __name__ == "__main__":
    main()

"""`penstock project`: from layers measured on one device to a cluster."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock import planner
from penstock.cli import options, reports
from penstock.cli.projection.workload import throughput_values, with_workload
from penstock.cli.waiting.busy import busy
from penstock.errors import ArgumentError
from penstock.planner.projection.projection import projection_table
from penstock.sim.throughput import Workload

if TYPE_CHECKING:
    from penstock.planner import Assumptions, Cluster, Degrees, Piece, Projection

__all__ = ["project_command"]


@options.command("project")
@click.argument("layers_file", metavar="LAYERS", type=options.INPUT_FILE)
@click.option("--nodes", type=options.COUNT, metavar="N", required=True, help="Number of nodes.")
@click.option(
    "--devices-per-node",
    type=options.COUNT,
    metavar="N",
    default=8,
    show_default=True,
    help="Devices of a node.",
)
@click.option(
    "--bandwidth-inside",
    type=options.Bytes(),
    metavar="BYTES/S",
    required=True,
    help="Bytes per second of a device in its node, such as 400GB.",
)
@click.option(
    "--bandwidth-between",
    type=options.Bytes(),
    metavar="BYTES/S",
    required=True,
    help="Bytes per second of a device between nodes, such as 50GB.",
)
@click.option(
    "--latency-inside",
    type=float,
    metavar="SECONDS",
    default=0.0,
    help="Seconds of an empty message in a node, such as 2e-6.",
)
@click.option(
    "--latency-between",
    type=float,
    metavar="SECONDS",
    default=0.0,
    help="Seconds of an empty message between nodes, such as 1e-5.",
)
@click.option("--memory", type=options.Bytes(), help="Memory of a device, such as 80GB.")
@click.option(
    "--speed",
    type=options.POSITIVE,
    metavar="FACTOR",
    default=1.0,
    show_default=True,
    help="How many times faster a device is than the one on which LAYERS were measured.",
)
@click.option(
    "-m",
    "--microbatches",
    type=options.COUNT,
    metavar="N",
    required=True,
    help="Microbatches of a step, over all replicas.",
)
@click.option(
    "--tensor", type=options.COUNT, metavar="N", help="Devices that share a rank's layers."
)
@click.option("--pipeline", type=options.COUNT, metavar="N", help="Ranks of a pipeline.")
@click.option(
    "--tensor-efficiency",
    type=options.SHARE,
    metavar="SHARE",
    default=1.0,
    show_default=True,
    help="Share of the ideal speed-up that tensor parallelism keeps in compute.",
)
@click.option(
    "--tensor-overlap",
    type=options.SHARE,
    metavar="SHARE",
    default=0.0,
    show_default=True,
    help="Share of tensor collectives that compute hides.",
)
@click.option(
    "--data-overlap",
    type=options.SHARE,
    metavar="SHARE",
    default=0.0,
    show_default=True,
    help="Share of the reduction of gradients that compute hides.",
)
@click.option("--shard-optimizer", is_flag=True, help="Divide optimizer state over replicas.")
@with_workload
@options.JSON
def project_command(
    layers_file: Path,
    nodes: int,
    devices_per_node: int,
    bandwidth_inside: float,
    bandwidth_between: float,
    latency_inside: float,
    latency_between: float,
    memory: float | None,
    speed: float,
    microbatches: int,
    tensor: int | None,
    pipeline: int | None,
    tensor_efficiency: float,
    tensor_overlap: float,
    data_overlap: float,
    shard_optimizer: bool,
    workload: Workload | None,
    as_json: bool,
) -> None:
    """Project layers that were measured on one device to a cluster that you do not have yet.

    LAYERS is a file as `penstock plan --search` reads it, with one microbatch size. Without
    --tensor and --pipeline, every way to use all devices is compared, the fastest first.

    \b
    Example:
      penstock project layers.toml --nodes 16 --bandwidth-inside 400e9 \\
          --bandwidth-between 50e9 --memory 80GB -m 256 --tokens 4096
    """
    layers = _read_one_size(layers_file)
    work = Workload(0.0) if workload is None else workload
    cluster = planner.Cluster(
        nodes,
        devices_per_node,
        bandwidth_inside,
        bandwidth_between,
        latency_inside,
        latency_between,
        inf if memory is None else memory,
        work.peak_flops,
        speed,
    )
    given = planner.Assumptions(
        tensor_efficiency=tensor_efficiency,
        tensor_overlap=tensor_overlap,
        data_overlap=data_overlap,
        shard_optimizer=shard_optimizer,
    )
    is_open = tensor is None and pipeline is None
    degrees = None if is_open else _degrees(cluster, tensor or 1, pipeline or 1)
    with busy("projecting"):
        found = _project(layers, cluster, degrees, microbatches, work, given)
    _show(found, as_json=as_json)


def _read_one_size(layers_file: Path) -> "Sequence[Piece]":
    model = planner.read_layers(layers_file)
    if len(model.layers) != 1:
        raise ArgumentError(
            f"{layers_file} must have one microbatch size (got {len(model.layers)})"
        )
    (layers,) = model.layers.values()
    return layers


def _project(
    layers: "Sequence[Piece]",
    cluster: "Cluster",
    degrees: "Degrees | None",
    microbatches: int,
    work: Workload,
    assumptions: "Assumptions",
) -> "tuple[Projection, ...]":
    """Project in one way, or without degrees in all."""
    tokens, flops = work.tokens_per_microbatch, work.flops_per_token
    if degrees is None:
        return planner.project_all(
            layers,
            cluster,
            microbatches=microbatches,
            tokens_per_microbatch=tokens,
            flops_per_token=flops,
            assumptions=assumptions,
        )
    one = planner.project(
        layers,
        cluster,
        degrees,
        microbatches=microbatches,
        tokens_per_microbatch=tokens,
        flops_per_token=flops,
        assumptions=assumptions,
    )
    return (one,)


def _degrees(cluster: "Cluster", tensor: int, pipeline: int) -> "Degrees":
    data, rest = divmod(cluster.devices, tensor * pipeline)
    if rest:
        raise ArgumentError(
            f"--tensor times --pipeline must divide the number of devices (got {tensor} x "
            f"{pipeline}, devices: {cluster.devices})"
        )
    return planner.Degrees(tensor, pipeline, data)


def _show(found: "tuple[Projection, ...]", *, as_json: bool) -> None:
    if as_json:
        click.echo(reports.to_json({"projections": [_values(one) for one in found]}))
        return
    if len(found) > 1:
        click.echo(f"{projection_table(found)}\n")
    click.echo(str(found[0]))


def _values(one: "Projection") -> dict[str, object]:
    degrees = one.degrees
    return {
        "tensor": degrees.tensor,
        "pipeline": degrees.pipeline,
        "data": degrees.data,
        "step_seconds": one.seconds,
        "by_cause": one.by_cause,
        "schedule": one.plan.schedule.name,
        "layers_per_stage": list(one.sizes),
        "peak_bytes": one.plan.timeline.peak_bytes,
        **throughput_values(one.throughput),
    }

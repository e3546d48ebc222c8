"""`penstock verify`: run one training step and check its gradients, loss, memory and order."""

import sys

import click

from penstock.cli import inputs, options, reports
from penstock.cli.waiting.busy import busy

__all__ = ["verify_command"]


@options.command("verify")
@options.schedule_argument(metavar="SCHEDULE")
@options.with_size
@click.option(
    "--model",
    default="mlp",
    show_default=True,
    metavar="mlp|gpt|MODULE:FUNCTION",
    help="A built-in model, or a function of yours, which is imported and called.",
)
@click.option(
    "--rows", type=options.COUNT, metavar="ROWS", help="Rows of the batch, for a built-in model."
)
@click.option(
    "--processes", is_flag=True, help="Run one gloo process per rank instead of one process."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    metavar="SHARE",
    default=1e-10,
    show_default=True,
    help="Largest relative error of loss and gradients.",
)
@options.JSON
def verify_command(
    schedule: str,
    size: options.Size,
    model: str,
    rows: int | None,
    processes: bool,
    tolerance: float,
    as_json: bool,
) -> None:
    """Run one training step and check it: gradients, loss, memory and order.

    Gradients and loss are compared in float64 with those of the unsplit model, the number of live
    activations with the prediction, and the recorded order with the schedule. A function of your
    own takes the number of stages and returns stages, args, target and loss.

    \b
    Examples:
      penstock verify ZBV --ranks 2 --microbatches 4
      penstock verify mine.csv --model gpt --rows 11 --processes
      penstock verify 1F1B --model mymodel:make_case
    """
    inputs.require_torch()
    from penstock.tools.verify.verification import VerifyRequest, verify

    found = inputs.load_checked(schedule, size).schedule
    inputs.add_working_folder()
    request = VerifyRequest(found, model, tolerance, rows)
    with busy("training one step"):
        checks = verify(request, uses_processes=processes)
    if as_json:
        click.echo(reports.to_json(reports.verification(found, model, checks)))
    else:
        click.echo(f"{found.name} with {model}: {reports.describe(found)}")
        reports.make_console().print(reports.verification_table(checks))
    sys.exit(0 if all(check.is_fine for check in checks) else 1)

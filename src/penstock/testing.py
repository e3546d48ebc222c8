"""Tools for tests: faults on purpose, a step against the unsplit model, and local processes."""

from penstock.ranks.fault_injection import Drop, FaultInjection
from penstock.step.layer_random import stream_seed
from penstock.tools.launcher import Report, run_on_ranks
from penstock.tools.verify.case import Case
from penstock.tools.verify.verification import Check, VerifyRequest, verify

__all__ = [
    "Case",
    "Check",
    "Drop",
    "FaultInjection",
    "Report",
    "VerifyRequest",
    "run_on_ranks",
    "stream_seed",
    "verify",
]

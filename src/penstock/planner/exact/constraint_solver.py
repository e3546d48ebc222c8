"""The constraint solver: loaded where it is needed, deterministic, on one core."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver

__all__ = ["kept_interrupt", "load_library", "make_solver"]


def load_library() -> ModuleType:
    """Return the module of the solver, or raise an error that says how to install it."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingDependencyError(
            "exact answers need OR-Tools, which is not installed; "
            "pip install 'penstock[solver]' brings it"
        ) from error
    return cp_model


@contextmanager
def kept_interrupt() -> Iterator[None]:
    """Restore what Ctrl-C does afterwards: the solver leaves it ending the process at once."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def make_solver(library: ModuleType, seconds: float, work: float | None) -> CpSolver:
    """Return a deterministic solver on one core.

    Its linear relaxation says little about orders and takes long; what helps is to look hard at
    who must come before whom on a rank.
    """
    solver: CpSolver = library.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    if work is not None:
        solver.parameters.max_deterministic_time = work
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    solver.parameters.use_strong_propagation_in_disjunctive = True
    solver.parameters.use_dynamic_precedence_in_disjunctive = True
    solver.parameters.use_hard_precedences_in_cumulative = True
    return solver

"""Checks before a run: is a schedule complete and consistent, and will it finish?"""

from penstock.checks.problem import Problem
from penstock.checks.report import check, find_problems

__all__ = [
    "Problem",
    "check",
    "find_problems",
]

"""Planning from costs alone, without torch: cuts, orders, and a proof of how good they are."""

from penstock.planner.order.best_so_far import Progress
from penstock.planner.partition.partition import Partition
from penstock.planner.partition.pieces import Piece
from penstock.planner.planning import plan
from penstock.planner.plans import Plan
from penstock.planner.problem import SchedulingProblem
from penstock.planner.revision import Revision, revise
from penstock.planner.search.breakdown import Breakdown
from penstock.planner.search.choices import Choices
from penstock.planner.search.findings import Finding, Findings
from penstock.planner.search.in_flight import count_in_flight
from penstock.planner.search.layer_files import LayerCosts, read_layers, write_layers

__all__ = [
    "Breakdown",
    "Choices",
    "Finding",
    "Findings",
    "LayerCosts",
    "Partition",
    "Piece",
    "Plan",
    "Progress",
    "Revision",
    "SchedulingProblem",
    "count_in_flight",
    "plan",
    "read_layers",
    "revise",
    "write_layers",
]

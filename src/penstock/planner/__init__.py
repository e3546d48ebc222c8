"""Planning from costs alone, without torch: cuts, orders, and a proof of how good they are."""

from typing import TYPE_CHECKING

from penstock.late_names import late_names

if TYPE_CHECKING:
    from penstock.planner.curve_planning import memory_curve
    from penstock.planner.curves import CurvePoint, MemoryCurve
    from penstock.planner.memory.planning import plan_memory
    from penstock.planner.order.best_so_far import Progress
    from penstock.planner.partition.partition import Partition
    from penstock.planner.partition.pieces import Piece
    from penstock.planner.planning import plan
    from penstock.planner.plans import Plan
    from penstock.planner.problem import SchedulingProblem
    from penstock.planner.projection.cluster import Cluster
    from penstock.planner.projection.layout import Degrees
    from penstock.planner.projection.projecting import Assumptions, project, project_all
    from penstock.planner.projection.projection import Projection
    from penstock.planner.reordering import Reordering
    from penstock.planner.revision import Revision, revise
    from penstock.planner.search.breakdown import Breakdown
    from penstock.planner.search.choices import Choices
    from penstock.planner.search.findings import Finding, Findings
    from penstock.planner.search.in_flight import count_in_flight
    from penstock.planner.search.layer_files import LayerCosts, read_layers, write_layers

# Loaded when first used: who looks at a plan needs neither the solver nor the projections.
_HOMES = {
    "Assumptions": "projection.projecting",
    "Breakdown": "search.breakdown",
    "Choices": "search.choices",
    "Cluster": "projection.cluster",
    "CurvePoint": "curves",
    "Degrees": "projection.layout",
    "Finding": "search.findings",
    "Findings": "search.findings",
    "LayerCosts": "search.layer_files",
    "MemoryCurve": "curves",
    "Partition": "partition.partition",
    "Piece": "partition.pieces",
    "Plan": "plans",
    "Progress": "order.best_so_far",
    "Projection": "projection.projection",
    "Reordering": "reordering",
    "Revision": "revision",
    "SchedulingProblem": "problem",
    "count_in_flight": "search.in_flight",
    "memory_curve": "curve_planning",
    "plan": "planning",
    "plan_memory": "memory.planning",
    "project": "projection.projecting",
    "project_all": "projection.projecting",
    "read_layers": "search.layer_files",
    "revise": "revision",
    "write_layers": "search.layer_files",
}

__all__ = [
    "Assumptions",
    "Breakdown",
    "Choices",
    "Cluster",
    "CurvePoint",
    "Degrees",
    "Finding",
    "Findings",
    "LayerCosts",
    "MemoryCurve",
    "Partition",
    "Piece",
    "Plan",
    "Progress",
    "Projection",
    "Reordering",
    "Revision",
    "SchedulingProblem",
    "count_in_flight",
    "memory_curve",
    "plan",
    "plan_memory",
    "project",
    "project_all",
    "read_layers",
    "revise",
    "write_layers",
]

__getattr__, __dir__ = late_names(__name__, _HOMES)

"""The plan: how each gradient is grouped, compressed, exchanged and ordered; see docs/plan.md.

And the planner, which finds a plan from measured costs; see docs/planner.md.
"""

from syncline.plan.buckets import bucket_plan
from syncline.plan.costs import CodecCost, Costs, Curve, Host, LinkCost, load_costs
from syncline.plan.default import default_plan
from syncline.plan.errors import Budget, CodecError, Errors
from syncline.plan.file import load, save
from syncline.plan.launch_order import greedy_order
from syncline.plan.planner import ALWAYS, Choice, FrontierPoint, Weighed, reorder, search
from syncline.plan.predict import predict, scenario
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit, shape_of

__all__ = [
    "ALWAYS",
    "Budget",
    "Choice",
    "CodecCost",
    "CodecError",
    "Costs",
    "Curve",
    "Errors",
    "FrontierPoint",
    "Host",
    "LinkCost",
    "Plan",
    "Shape",
    "Unit",
    "Weighed",
    "bucket_plan",
    "default_plan",
    "greedy_order",
    "load",
    "load_costs",
    "predict",
    "reorder",
    "save",
    "scenario",
    "search",
    "shape_of",
]

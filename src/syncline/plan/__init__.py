"""The plan: which gradients travel together, with which codec and exchange, in which order; see docs/plan.md."""

from syncline.plan.default import default_plan
from syncline.plan.file import load, save
from syncline.plan.order import greedy_order
from syncline.plan.table import Plan
from syncline.plan.unit import Shape, Unit

__all__ = ["Plan", "Shape", "Unit", "default_plan", "greedy_order", "load", "save"]

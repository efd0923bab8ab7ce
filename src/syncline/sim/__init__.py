"""Simulator of training steps, and closed forms for the time of an exchange; see docs/sim.md."""

from syncline.sim.network import Network, Transfer, exchange_time, fit
from syncline.sim.steady.scenario import Job, Layer, Outcome, Scenario, Wait
from syncline.sim.steady.simulate import simulate

__all__ = [
    "Job",
    "Layer",
    "Network",
    "Outcome",
    "Scenario",
    "Transfer",
    "Wait",
    "exchange_time",
    "fit",
    "simulate",
]

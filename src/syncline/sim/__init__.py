"""Simulator of training steps, closed forms for the time of an exchange, and sweeps; see docs/sim.md."""

from syncline.sim.network import Network, Transfer, exchange_time, fit
from syncline.sim.steady.scenario import Job, Layer, Outcome, Scenario, Wait
from syncline.sim.steady.simulate import simulate
from syncline.sim.steady.sweep import Prediction, sweep, table

__all__ = [
    "Job",
    "Layer",
    "Network",
    "Outcome",
    "Prediction",
    "Scenario",
    "Transfer",
    "Wait",
    "exchange_time",
    "fit",
    "simulate",
    "sweep",
    "table",
]

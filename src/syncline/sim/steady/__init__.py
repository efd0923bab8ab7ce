"""Simulation of a plan's step in steady state."""

"""Simulation of a plan's steady step."""

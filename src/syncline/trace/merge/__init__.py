"""Merging: spans of all ranks on one clock, and what is known about each rank."""

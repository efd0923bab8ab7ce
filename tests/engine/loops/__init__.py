"""Conformance suite of the engine: a table of training loops, each compared with the same loop under DDP or by hand."""

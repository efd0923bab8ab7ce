"""Syncline: data-parallel PyTorch training that is fast on the network you have, and explains itself."""

__version__ = "0.1.0"

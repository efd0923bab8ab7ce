"""Causes of slowness injected into training loops, and whether the analysis names them."""

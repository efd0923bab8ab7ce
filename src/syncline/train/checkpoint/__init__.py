"""Checkpoints: their content, their files, and resuming a run from them."""

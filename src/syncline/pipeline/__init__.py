"""Freeze-and-shrink training of transformers: freeze policies; see docs/pipeline.md."""

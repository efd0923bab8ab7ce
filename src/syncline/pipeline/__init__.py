"""Freeze-and-shrink training of transformers; see docs/pipeline.md."""

"""Checkpoints: what a rank saves, where, and how a run resumes."""

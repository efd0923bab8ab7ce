"""Executors: where and when launches and updates run (CPU threads, CUDA streams)."""

"""Executors: run launches and updates on CPU threads or CUDA streams, and one after the other for profiling."""

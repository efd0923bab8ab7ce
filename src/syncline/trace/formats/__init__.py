"""Trace files: reading and writing Chrome, Horovod, torch.profiler and our own."""

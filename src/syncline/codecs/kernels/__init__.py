"""Implementations of the operators in `syncline.codecs.ops`: plain torch, and fused for CPU and CUDA."""

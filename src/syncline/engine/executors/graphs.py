"""A tape of CUDA graphs: records the work of a function for one stream."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor


class GraphTape:
    """Records for one side stream. Its graphs share memory, so they must be replayed on that stream only."""

    def __init__(self, device: torch.device) -> None:
        # Not the side stream itself: libraries keep their workspaces by stream, and those that graphs use must be in
        # the graphs' memory, which nobody frees. Kernels keep the priority that this stream has.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._pool = torch.cuda.graph_pool_handle()
        self._output = torch.empty(0, device=device)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call `work`, whose work for the device is recorded and not done; returns the function that does it."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # objects that are freed during a recording may call what a recording forbids
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's, and the one that looks for late events) query events all the time.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def output(self, like: Tensor) -> Tensor:
        """Memory of this shape in which a result can lie until the next one; shared by all recordings."""
        if self._output.numel() < like.numel() or self._output.dtype != like.dtype:
            self._output = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
        return self._output[: like.numel()].view(like.shape)

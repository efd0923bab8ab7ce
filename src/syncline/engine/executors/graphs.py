"""A tape of CUDA graphs: captures the work of a function for one stream."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from syncline._compat.tensors import unowned_view
from syncline.errors import UsageError


class GraphTape:
    """Captures for the stream that was current when it was made, on which alone its graphs may be replayed.

    Graphs share the memory of their temporary tensors, and cuBLAS's workspace of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        # Others (compilers) may free all workspaces of the process. In a pool of its own, no one gets the memory then.
        self._workspace = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._workspace, device):
            one = torch.ones(1, 8, 8, device=device)
            torch.bmm(one, one)
        # torch gives the memory up with the last graph, and refuses to capture into it again: this one stays.
        self._first = self._graph(lambda: torch.zeros_like(one))

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """Call `work`, whose work for the device is captured and not done; returns the function that does it."""
        return self._graph(work).replay

    def _graph(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # objects that are freed during a capture may call what a capture forbids
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's, and the one that looks for late events) query events all the time.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                self._call(work, graph)
        finally:
            if collects:
                gc.enable()
        return graph

    @staticmethod
    def _call(work: Callable[[], object], graph: torch.cuda.CUDAGraph) -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        try:
            graph.capture_end()
        except RuntimeError as broken:  # torch's allocator and random numbers do not recover from that
            raise UsageError(
                "a codec declares captures=True and waits for the device or does what a CUDA graph cannot hold:"
                f" declare captures=False, or attach with capture=False ({error or broken})"
            ) from error or broken
        if error is not None:
            raise error

    def unowned(self, tensor: Tensor) -> Tensor:
        """A view of a tensor of the capture that does not keep its memory: later work may use that again."""
        return unowned_view(tensor)

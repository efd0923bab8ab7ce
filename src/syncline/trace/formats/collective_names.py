"""Names of collectives in other tools' traces, in one spelling; sizes of their messages."""

import re

_BITS = re.compile(r"(?:float|int)(\d{1,3})")
_BYTES = {
    "float": 4, "double": 8, "half": 2, "long": 8, "long int": 8, "int": 4, "short": 2, "short int": 2, "char": 1,
    "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1,
}  # fmt: skip
# The longer name first: "reduce" is in "allreduce".
_NAMES = {
    "allreduce": "all-reduce", "reducescatter": "reduce-scatter", "allgather": "all-gather", "alltoall": "all-to-all",
    "bcast": "broadcast", "broadcast": "broadcast", "barrier": "barrier", "sendrecv": "send-recv", "send": "send",
    "recv": "recv", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip

NEEDS_ALL_RANKS = frozenset({"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "barrier"})
"""Collectives in which every rank needs every other one: they end at about the same time on all ranks."""


def collective(name: str) -> str:
    """The collective that a kernel, an op or a phase performs.

    >>> [collective(n) for n in ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "gloo:all_gather", "MPI_BCAST")]
    ['all-reduce', 'all-gather', 'broadcast']
    """
    squeezed = name.lower().replace("_", "").replace("-", "")
    return next((ours for theirs, ours in _NAMES.items() if theirs in squeezed), "exchange")


def item_size(dtype: object) -> int:
    """Bytes of one element, 0 where the type is unknown.

    >>> [item_size(d) for d in ("Float", "c10::BFloat16", "long int", "float32", "Float8_e4m3fn", "?")]
    [4, 2, 8, 4, 1, 0]
    """
    if not isinstance(dtype, str):
        return 0
    name = dtype.removeprefix("c10::").lower()
    bits = _BITS.search(name)
    return int(bits[1]) // 8 if bits else _BYTES.get(name, 0)


def elements(shape: object) -> int:
    """The number of elements of a shape or a list of shapes; 0 where it is invalid."""
    if not isinstance(shape, list):
        return 0
    if shape and all(isinstance(item, list) for item in shape):
        return min(sum(elements(item) for item in shape), 1 << 62)
    product = 1
    for size in shape:
        if not isinstance(size, int) or not 0 <= size < 1 << 62 or product > 1 << 62:
            return 0
        product *= size
    return min(product, 1 << 62)

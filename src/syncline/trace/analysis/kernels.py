"""Kernels of a GPU by name, by operator and by class (matmul, attention, memory, communication and others)."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from syncline.trace.analysis.steps import Prepared
from syncline.trace.span import COMPUTE_LANES, Span, is_copy, is_copy_name

# The first that matches counts: fused attention is made of products, and a convolution's kernel may be called a gemm.
_CLASSES = (
    ("attention", r"fmha|flash|attention|sdpa|mha_(?:fwd|bwd)"),
    ("optimizer", r"multi_tensor_apply|fused_adam|foreach"),
    ("normalization", r"norm(?!al_)|welford|bn_(?:fw|bw)"),
    ("convolution", r"conv(?!ert)|fprop|dgrad|wgrad|winograd|cudnn"),
    ("matmul", r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wgmma|Cijk_|splitK|triton_tem|_mm_|dot_kernel"),
    ("reduction", r"reduce|softmax|cunn_SoftMax|triton_(?:red|per)_|nll_loss|argmax|cumsum"),
    ("memory", r"^Memcpy|^Memset|copy_kernel|CatArray|direct_copy|FillFunctor|index|gather|scatter|embedding"),
    ("elementwise", r"elementwise|triton_poi_|vectorized|unrolled|dropout|gelu|relu"),
)
_OPERATORS = (("attention", "attention"), ("convolution", "convolution"), ("convolution", "aten::conv"))
_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _CLASSES]


@dataclass(frozen=True)
class KernelRow:
    """The kernels with one name that one operator started: ms and count per step, the mean over ranks."""

    name: str
    kind: str
    operator: str
    ms: float
    count: float


@dataclass(frozen=True)
class OperatorRow:
    """The GPU's time for one operator: ms and kernels per step, the mean over ranks."""

    name: str
    ms: float
    count: float


@lru_cache(maxsize=1 << 14)
def kernel_class(name: str, operator: str = "") -> str:
    """The class of a kernel, from its operator and its name; `other` where they tell nothing.

    >>> [kernel_class(n) for n in ("sm90_xmma_gemm_bf16", "void fmha_cutlassF_f16", "Memcpy DtoH", "my_kernel")]
    ['matmul', 'attention', 'memory', 'other']
    """
    # An attention or a convolution may consist of products and copies.
    of_operator = next((kind for kind, word in _OPERATORS if word in operator), "")
    return of_operator or next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


@lru_cache(maxsize=1 << 14)
def short_name(name: str) -> str:
    """A kernel's name without return type, namespaces without a name, template arguments and parameters.

    >>> short_name("void at::native::(anonymous namespace)::reduce_kernel<512, 1, Op<float> >(Op<float>)")
    'at::native::reduce_kernel'
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return name if is_copy_name(name) else re.split(r"[<(]", plain, maxsplit=1)[0].strip()


def is_kernel(span: Span) -> bool:
    """Whether a span is a kernel or a copy of a GPU that the host launched, but no collective."""
    return bool(span.stream) and (span.lane in COMPUTE_LANES or (span.lane == "data" and is_copy(span)))


def kernel_tables(
    trace: Prepared, steps: Sequence[int]
) -> tuple[tuple[KernelRow, ...], tuple[OperatorRow, ...], dict[str, float]]:
    """The kernels, the operators and the classes of these steps by time; classes are ms per step."""
    kept, per_step = set(steps), 1e6 * max(1, len(steps) * len(trace.ranks))
    kernels: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    operators: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    classes: dict[str, int] = defaultdict(int)
    for rank in trace.ranks:
        for span in trace.spans[rank]:
            if span.step not in kept:
                continue
            if is_kernel(span):
                kind, name, operator = kernel_class(span.name, span.unit), short_name(span.name), span.unit
            elif span.stream and span.lane in ("exchange", "wait"):
                # The kernel of a collective runs from when its rank joins; waits for late ranks are a part of it.
                kind, name, operator = "communication", span.name, ""
            else:
                continue
            took, more = span.end - span.start, span.lane != "wait"
            for row in (kernels[name, kind, operator], operators[operator or name]):
                row[0] += took
                row[1] += more
            classes[kind] += took
    counts = max(1, len(steps) * len(trace.ranks))
    rows = [KernelRow(*key, ns / per_step, count / counts) for key, (ns, count) in kernels.items()]
    ops = [OperatorRow(name, ns / per_step, count / counts) for name, (ns, count) in operators.items()]
    return (
        tuple(sorted(rows, key=lambda row: -row.ms)),
        tuple(sorted(ops, key=lambda row: -row.ms)),
        {kind: ns / per_step for kind, ns in sorted(classes.items(), key=lambda item: -item[1])},
    )

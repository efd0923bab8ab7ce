"""Launch Triton kernels with little host time.

Triton looks at every argument, at its settings and at all global values before each launch, which takes the host longer
than the launch itself. Here a compiled kernel is found by what its code depends on: dtypes and alignment of tensors,
width of integers, and constants. Kernels must not specialise on the values of integers (`do_not_specialize`).
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

from torch import Tensor

_compiled: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, *args: Any, warps: int, fusion: int = True, **constants: Any) -> None:
    """`kernel[(programs,)](*args, **constants)`; the first argument is a tensor, the constants come last.

    `fusion=False` keeps the compiler from fusing multiplications and additions, which round differently then.
    """
    key = (id(kernel), args[0].device, warps, fusion, *constants.items(), *map(_kind, args))
    found = _compiled.get(key)
    if found is not None:
        code, tail = found
        code[programs, 1, 1](*args, *tail)
        return
    code = kernel[(programs,)](*args, **constants, num_warps=warps, enable_fp_fusion=fusion)
    if code is not None:  # the interpreter compiles nothing
        _compiled[key] = code, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _kind(value: Any) -> object:
    """What the code depends on of an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return -(1 << 31) <= value < 1 << 31
    return type(value)

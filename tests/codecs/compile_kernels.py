"""Compile every Triton kernel for compute capability 9.0, without a GPU, and look at the loads of the hot ones."""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncline.codecs.kernels import (
    gpu_blocks,
    gpu_factors,
    gpu_keep,
    gpu_moments,
    gpu_random,
    gpu_sample,
    gpu_saturate,
    gpu_scatter,
    gpu_select,
    gpu_sign,
    gpu_ternary,
)

TYPES = {
    "x_ptr": "*fp32", "values_ptr": "*fp32", "out_ptr": "*fp32", "scale_ptr": "*fp32", "scales_ptr": "*fp32",
    "pos_ptr": "*fp32", "neg_ptr": "*fp32", "partial_ptr": "*fp32", "means_ptr": "*fp32", "packed_ptr": "*u8",
    "codes_ptr": "*u8", "table_ptr": "*i64", "pieces_ptr": "*i64", "pairs_ptr": "*i64",
    "threshold_ptr": "*fp32", "tallies_ptr": "*i64", "ends_ptr": "*i64", "sums_ptr": "*fp64", "limit": "fp32",
    "residual_ptr": "*fp32", "rest_ptr": "*fp32", "sum_ptr": "*fp32", "new_ptr": "*fp32", "old_ptr": "*fp32",
    "divisor": "fp32", "factor": "fp32", "clip": "fp32",
}  # fmt: skip
OPTIONAL = {"table_ptr": "TABLE", "pieces_ptr": "TABLE", "residual_ptr": "ADD", "sum_ptr": "ADD", "rest_ptr": "KEEP"}
"""Pointers that are None where this constant is false."""
COUNTS = {"tallies_ptr": "*i32", "ends_ptr": "*i32"}
FACTORS = {"m_ptr": "*fp32", "gram_ptr": "*fp64", "factor_ptr": "*fp32", "fresh_ptr": "*fp32"}
NO_RESIDUAL, RESIDUAL = {"ADD": False, "KEEP": False}, {"ADD": True, "KEEP": True}
KERNELS = [
    (gpu_factors._orthonormal, {"ROWS": 128, "SIZE": 8}, FACTORS, False),
    (gpu_factors._invert, {"LAST": False, "SIZE": 64}, {**FACTORS, "out_ptr": "*fp64"}, False),
    (gpu_factors._invert, {"LAST": True, "SIZE": 16}, {**FACTORS, "out_ptr": "*fp64"}, False),
    (gpu_factors._unit_columns, {"ROWS": 256, "SIZE": 4}, FACTORS, False),
    (gpu_scatter._scatter, {"TILE": 512}, {}, False),
    (gpu_keep._keep_if, {"ZERO": False, "TILE": 2048}, {"good_ptr": "*i1"}, False),
    (gpu_keep._keep_if, {"ZERO": True, "TILE": 2048}, {"good_ptr": "*i1"}, False),
    (gpu_sign._sign_encode, {"TABLE": False, "ADD": False, "BYTES": 1024}, {}, True),
    (gpu_sign._sign_encode, {"TABLE": False, "ADD": True, "BYTES": 512}, {}, True),
    (gpu_sign._sign_encode, {"TABLE": True, "ADD": True, "BYTES": 1024}, {"x_ptr": "*bf16"}, False),
    (gpu_sign._sign_rest, {"TABLE": False, "L1": False, "BYTES": 512}, {}, True),
    (gpu_sign._sign_rest, {"TABLE": True, "L1": True, "BYTES": 512}, {}, False),
    (gpu_sign._sign_means, {"TABLE": False, "L1": False}, {}, False),
    (gpu_sign._sign_means, {"TABLE": True, "L1": True}, {}, False),
    (gpu_sign._sign_decode, {"TABLE": False, "ONTO": False, "BYTES": 512}, {}, False),
    (gpu_sign._sign_decode, {"TABLE": True, "ONTO": True, "BYTES": 512}, {}, False),
    (gpu_ternary._ternary_encode, {"TABLE": False, "CHANCE": False, **NO_RESIDUAL, "BYTES": 1024}, {}, True),
    (gpu_ternary._ternary_encode, {"TABLE": False, "CHANCE": False, **RESIDUAL, "BYTES": 512}, {}, True),
    (
        gpu_ternary._ternary_encode,
        {"TABLE": True, "CHANCE": True, **NO_RESIDUAL, "BYTES": 1024},
        {"x_ptr": "*fp16"},
        False,
    ),
    (gpu_ternary._terngrad, {"SIZE": 512, "BYTES": 1024}, {}, True),
    (gpu_ternary._ternary_decode, {"TABLE": False, "ONTO": True, "BYTES": 1024}, {}, False),
    (gpu_ternary._ternary_decode, {"TABLE": True, "ONTO": False, "BYTES": 1024}, {}, False),
    *[
        (gpu_blocks._quantize, {"BITS": b, "CHANCE": c, "L2": c, **keep, "ROWS": 8, "BLOCK": 256}, {}, True)
        for b, keep in ((2, NO_RESIDUAL), (4, RESIDUAL), (8, RESIDUAL), (8, NO_RESIDUAL))
        for c in (False, True)
    ],
    *[(gpu_blocks._dequantize, {"BITS": b, "ONTO": b == 8, "ROWS": 16, "BLOCK": 256}, {}, False) for b in (2, 4, 8)],
    *[(gpu_blocks._pack, {"BITS": b, "BYTES": 1024}, {"values_ptr": "*u8"}, False) for b in (1, 2, 4)],
    *[(gpu_blocks._unpack, {"BITS": b, "BYTES": 1024}, {"out_ptr": "*u8"}, False) for b in (1, 2, 4)],
    (gpu_random._natural_encode, {"TILE": 2048}, {"out_ptr": "*u8"}, True),
    (gpu_random._natural_decode, {"ONTO": False, "TILE": 2048}, {}, False),
    (gpu_random._natural_decode, {"ONTO": True, "TILE": 2048}, {}, False),
    (gpu_select._collect, {"TILE": 2048}, {}, True),
    (gpu_select._collect, {"TILE": 2048}, {"x_ptr": "*bf16"}, False),
    *[(gpu_select._digits, {"ROUND": r, "TILE": 1024}, {}, False) for r in range(4)],
    (gpu_select._tally, {"TILE": 2048, "TILES": 16, "BLOCK": 32}, {}, False),
    (gpu_select._place, {"TIES": True, "TILE": 2048, "TILES": 16, "BLOCK": 32}, {}, False),
    (
        gpu_select._place,
        {"TIES": False, "TILE": 2048, "TILES": 16, "BLOCK": 32},
        {"tallies_ptr": "*i32", "ends_ptr": "*i32"},
        False,
    ),
    (gpu_sample._sample, {"ALL": False, "SIZE": 8192}, {}, False),
    (gpu_sample._sample, {"ALL": True, "SIZE": 8192}, {"x_ptr": "*fp16"}, False),
    (gpu_moments._moments, {"TABLE": False, "TILE": 4096}, {}, True),
    (gpu_moments._moments, {"TABLE": True, "TILE": 4096}, {"x_ptr": "*bf16"}, False),
    (gpu_moments._finish, {"TABLE": False}, {}, False),
    (gpu_moments._finish, {"TABLE": True}, {}, False),
    (gpu_saturate._saturate, {"TILE": 2048}, {"out_ptr": "*fp16"}, True),
    (gpu_saturate._saturate, {"TILE": 2048}, {"x_ptr": "*fp16", "out_ptr": "*fp16"}, True),
]


def compiled(kernel, constants, types):
    signature, values, hints = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        absent = not constants.get(OPTIONAL.get(name, ""), True)
        if name in constants or absent:
            signature[name], values[(i,)] = "constexpr", constants.get(name)
            continue
        default = "*i32" if name.endswith("_ptr") else "i32"
        signature[name] = types.get(name, TYPES.get(name, default))
        if name.endswith("_ptr"):
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def main():
    for kernel, constants, types, wide in KERNELS:
        text = compiled(kernel, constants, types).asm["ptx"]
        loads = len(re.findall(r"ld\.global[.\w:]*\.v4", text))
        print(f"{kernel.__name__} {constants}: {loads} 16-byte loads")
        if wide and not loads:
            sys.exit(f"{kernel.__name__}: a full tile is no longer loaded 16 bytes at a time")


if __name__ == "__main__":
    main()

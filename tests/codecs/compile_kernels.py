"""Compile every Triton kernel for compute capability 9.0, without a GPU, and look at the loads of the hot ones."""

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncline.codecs.kernels import (
    gpu_blocks,
    gpu_moments,
    gpu_random,
    gpu_sample,
    gpu_saturate,
    gpu_select,
    gpu_sign,
    gpu_ternary,
)

TYPES = {
    "x_ptr": "*fp32", "values_ptr": "*fp32", "out_ptr": "*fp32", "scale_ptr": "*fp32", "scales_ptr": "*fp32",
    "pos_ptr": "*fp32", "neg_ptr": "*fp32", "partial_ptr": "*fp32", "means_ptr": "*fp32", "packed_ptr": "*u8",
    "codes_ptr": "*u8", "table_ptr": "*i64", "pieces_ptr": "*i64", "pairs_ptr": "*i64",
    "threshold_ptr": "*fp32", "tallies_ptr": "*i64", "ends_ptr": "*i64", "sums_ptr": "*fp64", "limit": "fp32",
}  # fmt: skip
COUNTS = {"tallies_ptr": "*i32", "ends_ptr": "*i32"}
KERNELS = [
    (gpu_sign._sign_encode, {"TABLE": False, "BYTES": 1024}, {}, True),
    (gpu_sign._sign_encode, {"TABLE": True, "BYTES": 1024}, {"x_ptr": "*bf16"}, False),
    (gpu_sign._sign_means, {"TABLE": False, "L1": False}, {}, False),
    (gpu_sign._sign_means, {"TABLE": True, "L1": True}, {}, False),
    (gpu_sign._sign_decode, {"TABLE": False, "BYTES": 512}, {}, False),
    (gpu_sign._sign_decode, {"TABLE": True, "BYTES": 512}, {}, False),
    (gpu_ternary._ternary_encode, {"TABLE": False, "CHANCE": False, "BYTES": 1024}, {}, True),
    (gpu_ternary._ternary_encode, {"TABLE": True, "CHANCE": True, "BYTES": 1024}, {"x_ptr": "*fp16"}, False),
    (gpu_ternary._ternary_decode, {"TABLE": False, "BYTES": 1024}, {}, False),
    (gpu_ternary._ternary_decode, {"TABLE": True, "BYTES": 1024}, {}, False),
    *[
        (gpu_blocks._quantize, {"BITS": b, "CHANCE": c, "L2": c, "ROWS": 16, "BLOCK": 256}, {}, True)
        for b in (2, 4, 8)
        for c in (False, True)
    ],
    *[(gpu_blocks._dequantize, {"BITS": b, "ROWS": 16, "BLOCK": 256}, {}, False) for b in (2, 4, 8)],
    *[(gpu_blocks._pack, {"BITS": b, "BYTES": 1024}, {"values_ptr": "*u8"}, False) for b in (1, 2, 4)],
    *[(gpu_blocks._unpack, {"BITS": b, "BYTES": 1024}, {"out_ptr": "*u8"}, False) for b in (1, 2, 4)],
    (gpu_random._natural_encode, {"TILE": 2048}, {"out_ptr": "*u8"}, True),
    (gpu_random._natural_decode, {"TILE": 2048}, {}, False),
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
    (gpu_moments._moments, {"TILE": 2048}, {}, True),
    (gpu_moments._moments, {"TILE": 2048}, {"x_ptr": "*bf16"}, False),
    (gpu_moments._finish, {"SIZE": 2048}, {}, False),
    (gpu_saturate._saturate, {"TILE": 2048}, {"out_ptr": "*fp16"}, True),
    (gpu_saturate._saturate, {"TILE": 2048}, {"x_ptr": "*fp16", "out_ptr": "*fp16"}, True),
]


def compiled(kernel, constants, types):
    signature, values, hints = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        absent = name in ("table_ptr", "pieces_ptr") and not constants.get("TABLE")
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

"""The operators of `native.c`, compiled once per machine if a C compiler is installed; never required.

The library is built at first use into the user's cache folder, named by a hash of the source, the flags and the
processor, and loaded with ctypes, whose calls release Python's lock. Without a compiler, or with
`SYNCLINE_NATIVE=0`, `library()` is None, `status()` says why, and the vectorised torch versions run.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("native.c")
# No contraction: a * b + c rounds as it does in torch and in the Triton kernels.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_P, _I64, _INT, _U32, _F = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_float,
)
_FUNCTIONS = {
    "sl_sign_encode": (_I64, [_P, _I64, _P, _P]),
    "sl_sign_decode": (None, [_P, _I64, _F, _F, _P]),
    "sl_quantize": (None, [_P, _I64, _INT, _I64, _INT, _INT, _U32, _U32, _P, _P]),
    "sl_quantize_residual": (None, [_P, _P, _I64, _INT, _I64, _INT, _INT, _U32, _U32, _P, _P, _P]),
    "sl_dequantize": (None, [_P, _P, _I64, _INT, _I64, _P]),
    "sl_dequantize_onto": (None, [_P, _P, _I64, _INT, _I64, _F, _P]),
    "sl_ternary_encode": (None, [_P, _I64, _F, _INT, _U32, _U32, _P]),
    "sl_ternary_decode": (None, [_P, _I64, _F, _P]),
    "sl_natural_encode": (None, [_P, _I64, _INT, _U32, _U32, _P]),
    "sl_natural_decode": (None, [_P, _I64, _INT, _P]),
    "sl_topk": (None, [_P, _I64, _I64, _P, _P]),
    "sl_compact": (_I64, [_P, _I64, ctypes.c_int32, _I64, _P, _P]),
}


def library() -> ctypes.CDLL | None:
    """The compiled functions, or None."""
    return _load()[0]


def status() -> str:
    """Where the compiled functions came from, or why there are none."""
    return _load()[1]


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SYNCLINE_NATIVE", "1") == "0":
        return None, "switched off by SYNCLINE_NATIVE=0"
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, "no C compiler found"
    try:
        path = _build(compiler)
        loaded = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return None, f"{compiler} did not build it: {str(detail).strip()[:500]}"
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded, str(path)


def _build(compiler: str) -> Path:
    text = _SOURCE.read_bytes()
    name = hashlib.sha256(text + repr((compiler, _FLAGS, _processor())).encode()).hexdigest()[:16]
    folder = _folder()
    path = folder / f"native-{name}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "native.so"
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)  # noqa: S603
        made.replace(path)  # whole or not at all: other ranks build at the same moment
    return path


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "syncline"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise OSError(f"others may write to {folder}, so no code is loaded from it")
    return folder


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    lines = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = "".join(
            sorted({x for x in info.read_text().splitlines() if x.startswith(("flags", "model name", "Features"))})
        )
    return f"{platform.machine()} {platform.system()} {lines}"

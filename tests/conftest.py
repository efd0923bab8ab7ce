"""Settings for all tests."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # after the setting above, which it reads when it is imported

if not torch.cuda.is_available():
    # Before anything imports Triton: it decides then whether kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

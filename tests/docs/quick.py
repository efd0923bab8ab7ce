"""How documented commands and programs run in a test: shorter, with what they expect to find, and what they print.

A command that is not named here runs as it is written, and must end with exit code 0.
"""

import re

from documented import ROOT

MOST_BYTES = 8e9
"""What a documented command may use, unless the line above it says that it needs more."""

SHORTER = [
    (r"make demo", "syncline compare --recipe demo"),  # what it runs after the installation
    # Steps keep the model and the batch, so that memory is that of the documented command.
    (r"^(?!.*auto)(.*syncline (?:compare|train)\b.*?)--steps \d+", r"\1--steps 3"),
    (r"^(?!.*--(?:steps|resume))(.*syncline (?:compare|train)\b.*)$", r"\1 --steps 3"),
    (r"^(.*syncline (?:compare|train)\b.*)$", r"\1 --set train.test_samples=32"),
    (r"--checkpoint-every \d+", "--checkpoint-every 2"),
    (r"(syncline bench codecs(?!.*--codecs).*)", r"\1 --codecs 'topk,powersgd'"),
    (
        r"(syncline bench quality(?!.*--device).*)",
        r"\1 --steps 2 --seeds 0 --batch 16 --model 'mlp(hidden=16)' --data 'shapes(train=64, test=32)'",
    ),
    (r"(syncline bench integrations(?!.*--quick).*)", r"\1 --quick"),
    (r"(syncline bench pipeline(?!.*(?:--quick|cuda))).*", r"\1 --quick"),
    (r"--never-slower(?!.*--quick)", "--never-slower --quick"),
    (r"(syncline bench overhead(?!.*--(?:steps|never-slower)).*)", r"\1 --steps 1"),
    (r"syncline bench recorder", "python -m syncline.bench.recorder --blocks 1 --steps 1 --out recorder.json"),
    (r"(syncline bench overlap.*?)(?: --rounds \d+)?$", r"\1 --rounds 1 --seconds 0.5 --steps 3"),
    (r"(syncline bench models)(?!.*--quick).*", r"\1 --quick --only byteps"),
    (r"bench overhead --steps 6", "bench overhead --steps 1 --model 'mlp(hidden=16)'"),
    (r"before_after.py ../base . --rounds 2", f"before_after.py {ROOT} {ROOT} --rounds 1"),
    (r"trace analyze dumps", f"trace analyze {ROOT}/tests/trace/fixtures/flight/gloo-hang"),
    (r" \| jq .*", ""),
    (r"--steps 100:120", "--steps 10:20"),
    (r"examples/ddp_loop.py", "examples/ddp_loop.py --steps 12"),
    (r"make (\S+)", r"make --dry-run \1"),
    (r"\bRUN\b", "run"),
]
"""Regular expressions and their replacements, applied to a command in this order."""

NOT_RUN = {
    r"^pip install": "tests/docs/test_install.py runs it in a clean environment",
    r"--never-slower": "takes 18 minutes; tests/bench/test_bench_overhead.py runs a short form of it",
    r"bench causes": "takes 15 minutes; tests/bench/test_bench_causes.py runs a short form of it",
    r"bench\.causes": "the same command as a module",
    r"--serve": "serves until Ctrl-C; tests/cli/test_trace_view.py does that",
    r"^torchrun --nnodes 4": "needs four machines; its options are checked",
    r"--launcher ray": "needs a Ray cluster; tests/integrations/test_ray.py runs it on one",
}
"""Commands whose options are checked only, with the reason."""

NO_GPU = (2, r"there is no device 'cuda' here")
EXPECTED = {
    r"^torchrun .*--device cuda": (1, NO_GPU[1]),  # torchrun's own exit code
    r"--device cuda": NO_GPU,
    r"--recipe hipress-vgg19": (2, r"needs about .* of memory, and 8 GB are allowed: use "),
    r"--resume run$": (2, r"is finished: use --epochs 3 to train longer"),  # nothing has killed it here
    r"^syncline trace analyze": (0, r"verdict"),
    r"^syncline trace diff": (0, r"no significant difference"),
    r"^syncline simulate .*--what": (0, r"as it was .* ms"),
    r"^(syncline (compare|train)|make demo)": (0, r"report: .*report\.html"),
    r"^torchrun .* my_ddp\.py": (0, r"loss \d\.\d\d"),
    r"laws": (0, r"passes all laws"),
    r"^syncline doctor": (0, r"cores"),
    r"^syncline list codecs": (0, r"powersgd +rank=4"),
}
"""The exit code, and what is in the output (standard output and errors)."""

NEEDS = {r"--recipe hipress-vgg19": " --set cluster.memory=8GB"}
"""Added to commands that say in the line above them what they need: on a machine with less they are refused."""

FRAMEWORKS = """
import os
from pathlib import Path
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
folder = Path("checkpoint")
os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
def prepared_parts():
    from accelerate import Accelerator
    model = fresh()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 64)))
    return Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1), loader
def trainer_parts():
    from transformers import TrainingArguments
    arguments = TrainingArguments(output_dir="out", use_cpu=True, ddp_backend="gloo", report_to="none")
    return fresh(), arguments, torch.utils.data.TensorDataset(torch.randn(8, 64))
"""

PRELUDES = {
    "README.md": """
import torch, syncline
from torch import nn
model = nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
loader = [(torch.randn(4, 20), torch.randn(4, 1))] * 3
loss_fn = nn.functional.mse_loss
""",
    "docs/codecs.md": """
import torch, torch.distributed as dist
from syncline import exchange
from syncline.codecs import *
from syncline.codecs.algorithms.powersgd import start
from syncline.codecs.ops import orthonormal
grads = [[torch.randn(64, 32)] for _ in range(2)]
names, shapes, states, new_states, step = ["w", "b"], [(64, 32), (7,)], {}, {}, 0
rank, world = dist.get_rank(), dist.get_world_size()
link = exchange.connect("allreduce", dist.group.WORLD)
def grads_of(batch): return [torch.randn(shapes[names.index(name)]) for name in batch.names]
""",
    "docs/exchange.md": """
import torch, torch.distributed as dist, pytest, syncline
from syncline.codecs import DENSE, Merge
process_group = dist.group.WORLD
request = Merge(torch.ones(8), DENSE)
rank, steps, model = dist.get_rank(), 3, torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "docs/integrations.md": """
import torch, torch.distributed as dist, syncline
from torch import nn
from torch.nn.parallel import DistributedDataParallel
rank, model = dist.get_rank(), nn.Linear(64, 64)
def fresh():
    return nn.Linear(64, 64)
"""
    + FRAMEWORKS,
    "docs/pipeline.md": """
import torch, syncline
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = nn.Linear(4, 4), nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
model, loader = Net(), [(1, 2)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
def evaluate(model): return 1.0
""",
    "docs/trace.md": """
import time, torch.distributed as dist
from syncline.trace.merge.clocks import measure_clocks, with_drift
group, rank, ns = dist.group.WORLD, dist.get_rank(), time.perf_counter_ns()
""",
}
PRELUDES |= dict.fromkeys(
    ("docs/engine.md", "docs/hangs.md", "docs/recording.md", "docs/why-slow.md"), PRELUDES["README.md"]
)
"""What the programs of a page take for granted."""

PYTHON = [
    (r'codec\("powersgd"', 'codec("documented"'),
    (r'start\(state, "q", \.\.\.\)', 'start(state, "q", (grad.shape[-1], rank), grad)'),
    (r"(exchange\.check\(.*\))  # UsageError.*", r"with pytest.raises(ValueError, match='with this codec use'): \1"),
    (r"model = syncline.DistributedDataParallel\(model\)", "model = syncline.DistributedDataParallel(fresh())"),
    (r'"runs/vgg11"', '"run"'),
    (r'mesh = init_device_mesh\("cuda", \(nodes, gpus\)', 'model = Blocks()\nmesh = init_device_mesh("cpu", (2, 1)'),
    (r"from .*accelerate import prepare", r"\g<0>\naccelerator, model, optimizer, loader = prepared_parts()"),
    (r"from .*accelerate import SynclineKwargs", r"\g<0>\nfrom accelerate import Accelerator"),
    (r"from .*trainer import SynclineTrainer", r"\g<0>\nmodel, arguments, data = trainer_parts()"),
    (r"from .*lightning import SynclineStrategy", r"\g<0>\nimport lightning as L"),
    (r"ray\.train\.torch\.prepare_model\(model, parallel_strategy=None\)", "fresh()"),  # needs a worker of Ray
]
"""Replacements in programs."""


def shortened(command: str) -> str:
    """The command as a test runs it."""
    for pattern, replacement in SHORTER:
        command = re.sub(pattern, replacement, command)
    return command + "".join(more for pattern, more in NEEDS.items() if re.search(pattern, command))


def program(text: str) -> str:
    """A program as a test runs it."""
    for pattern, replacement in PYTHON:
        text = re.sub(pattern, replacement, text)
    return text


def expected(command: str) -> tuple[int, str]:
    """The exit code and a pattern of the output; the first entry that fits the documented command counts."""
    return next((value for pattern, value in EXPECTED.items() if re.search(pattern, command)), (0, ""))


def why_not_run(command: str) -> str:
    """Why only the options of a command are checked, or an empty text."""
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), "")

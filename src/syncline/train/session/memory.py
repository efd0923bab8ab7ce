"""The memory that the ranks of a session need, estimated before they start; a session that does not fit is refused.

A process without data measures the model on torch's meta device, which allocates nothing: the bytes of parameters and
optimizer state, and of what the forward pass keeps for the backward pass. The constants below are from 15 measured runs
(ResNet-50, VGG, BERT; one to four ranks), whose peaks were 0.8 to 1.0 times the estimate. Only ranks on the CPU are
estimated: a GPU without room says so itself.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from syncline import spec
from syncline._compat.tensors import storage_address
from syncline.cluster.memory import free_bytes
from syncline.cluster.quantities import parse_bytes
from syncline.cluster.ranks import Place, Report, run_ranks
from syncline.errors import RankFailure, UsageError
from syncline.report.figures import plural, size
from syncline.train.config import Config, Train
from syncline.train.rank.worker import RunSpec
from syncline.train.workload import build, load_optimizer

_PROCESS = 60e6
"""Private memory of a rank without a model: the pages of torch that it changes, its threads and its buffers."""
_SESSION = 450e6
"""The command itself and the forkserver, each with torch."""
_PASS = 1.4
"""Peak of a forward and backward pass, in bytes that the forward pass keeps."""
_COPIES = {"single": 0.0, "local": 0.0, "ddp": 1.0, "ddp-powersgd": 4.0}
_COPIES_DENSE, _COPIES_COMPRESSED = 2.5, 7.0
"""Memory for exchanging gradients (buckets, residuals, messages in flight), in bytes of gradients."""
_HALVED = ("syncline(bf16)", "syncline(fp16)")  # they keep no residual
_FALLBACK = "vgg11"
"""Suggested for images where nothing smaller of the same model is known."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model in one rank."""

    parameters: int
    state: int
    """Of the optimizer."""
    fixed: int
    """Kept by a forward pass, whatever the batch."""
    per_sample: float

    def between_steps(self, run: RunSpec) -> float:
        """What one rank holds all the time."""
        return _PROCESS + self.state + (2 + _copies(run.strategy)) * self.parameters

    def in_a_step(self, run: RunSpec, batch: int) -> float:
        """What the forward and backward pass of one rank adds to that."""
        return _PASS * (self.fixed + self.per_sample * batch / run.workers)


def check_memory(config: Config, runs: Sequence[RunSpec], *, together: bool = False) -> None:
    """Refuse a session that needs more memory than is free, with a smaller one that fits.

    `together`: the ranks of all runs are alive at the same time, and one run at a time trains.
    """
    if config.train.device == "cuda" or (config.train.device == "auto" and torch.cuda.is_available()):
        return
    free = parse_bytes(config.cluster.memory) if config.cluster.memory else free_bytes()
    smaller = _smaller_model(config.train.model)
    found = _measure(config.train, [config.train.model, smaller] if smaller else [config.train.model])
    if free is None or found[0] is None:
        return
    batches = [run.train.batch for run in runs]
    need = _need(found[0], runs, batches, together=together)
    if need <= free:
        return
    fix = _smaller_session(found, runs, batches, smaller, free=free, together=together)
    ranks = plural(sum(run.ranks for run in runs) if together else max(run.ranks for run in runs), "rank")
    raise UsageError(
        f"'{config.train.model}' on {ranks} with a batch of {max(batches)} needs about {size(need)} of memory, and"
        f" {size(free)} {'are allowed' if config.cluster.memory else 'are free'}: {fix}; if this estimate is wrong, set"
        f" a limit of your own, --set cluster.memory={size(need * 1.2).replace(' ', '')}"
    )


def _smaller_session(
    found: "Sequence[Footprint | None]",
    runs: Sequence[RunSpec],
    batches: Sequence[int],
    smaller: str,
    *,
    free: float,
    together: bool,
) -> str:
    """The first of these that fits: half the batch (again and again), fewer contestants, a smaller model."""
    whole, little = found[0], found[-1] if len(found) > 1 else None
    assert whole is not None
    workers = max(run.workers for run in runs)
    batch = max(batches)
    while batch > workers and len(set(batches)) == 1:
        batch = max(1, batch // 2 // workers) * workers
        if (need := _need(whole, runs, [batch] * len(runs), together=together)) <= free:
            return f"use --batch {batch} (about {size(need)})"
    if together:
        for count in range(len(runs) - 1, 1, -1):
            few = runs[:count]
            if (need := _need(whole, few, batches[:count], together=True)) <= free:
                names = ",".join(run.strategy for run in few)
                return f"use fewer contestants, --strategies '{names}' (about {size(need)})"
    if little is not None and (need := _need(little, runs, batches, together=together)) <= free:
        return f"use --model '{smaller}' (about {size(need)})"
    return "use a smaller model, a smaller batch or fewer ranks"


def _need(found: Footprint, runs: Sequence[RunSpec], batches: Sequence[int], *, together: bool) -> float:
    """Bytes of all ranks at their peak."""
    held = [run.ranks * found.between_steps(run) for run in runs]
    added = [run.workers * found.in_a_step(run, batch) for run, batch in zip(runs, batches, strict=True)]
    if together:
        return _SESSION + sum(held) + max(added)
    return _SESSION + max(a + b for a, b in zip(held, added, strict=True))


def _copies(strategy: str) -> float:
    call = spec.parse_one(strategy)
    dense = not call.args or strategy in _HALVED
    return _COPIES.get(call.name, _COPIES_DENSE if dense else _COPIES_COMPRESSED)


def _smaller_model(model: str) -> str:
    """The same model in its default size, which trains on a CPU; a small one for the large models of images."""
    call = spec.parse_one(model)
    if call.name in ("vgg19", "resnet50") or ":" in call.name:
        return _FALLBACK
    return call.name if call.args or call.kwargs else ""


def _measure(train: Train, models: Sequence[str]) -> list[Footprint | None]:
    """The footprints of some models, None for one that cannot be measured: what is wrong with it shows in the run."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        payload = (train, list(models))
        try:
            (found,) = run_ranks(_measure_all, [Place(rank=0, world_size=1)], payload, logs=Path(folder))
        except RankFailure:
            return [None] * len(models)
    return [None if one is None else Footprint(**one) for one in found]


def _measure_all(place: Place, payload: tuple[Train, list[str]], report: Report) -> list[dict[str, Any] | None]:
    """The main function of the process that measures. In a process of its own, because it runs the user's code."""
    train, models = payload
    return [_measure_one(replace(train, model=model)) for model in models]


def _measure_one(train: Train) -> dict[str, Any] | None:
    try:
        return asdict(measure_footprint(train))
    except Exception:  # models of users may need real tensors; then there is no estimate
        return None


def measure_footprint(train: Train) -> Footprint:
    """The bytes of the model and of its passes, from meta tensors."""
    with torch.device("meta"):
        workload = build(train.model, train.data, seed=train.seed).to("meta")
    batch = workload.train.batch(torch.arange(2, device="cpu"))
    parameters = state = 0
    kept = [0, 0]
    for phase in workload.phases:
        values = [p for p in phase.module.parameters() if p.requires_grad]
        parameters += sum(p.nbytes for p in values)
        for i, count in enumerate((2, 4)):
            sample = [torch.empty((count, *part.shape[1:]), dtype=part.dtype, device="meta") for part in batch]
            kept[i] = max(kept[i], _kept_bytes(phase.module, sample))
        optimizer = load_optimizer(train.optimizer or phase.optimizer, values)
        for p in values:
            p.grad = torch.empty_like(p)
        optimizer.step()
        entries = [value for entry in optimizer.state.values() for value in entry.values()]
        state += sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))
    per_sample = (kept[1] - kept[0]) / 2
    return Footprint(parameters, state, max(0, round(kept[0] - 2 * per_sample)), per_sample)


def _kept_bytes(module: torch.nn.Module, batch: Sequence[torch.Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the parameters."""
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Kept with its tensor: a key is free for another storage as soon as the tensor is gone.
        seen[storage_address(tensor)] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*batch)
    own = {storage_address(p) for p in module.parameters()}
    return sum(count for key, (count, _) in seen.items() if key not in own)

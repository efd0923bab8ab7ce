"""Plans of earlier runs for this job: rank 0 reads and writes the plan cache, and all ranks take what it found."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from syncline.engine.node_layout import node_numbers
from syncline.engine.protocols import EngineView
from syncline.plan import cache
from syncline.plan.cache import Job, Remembered
from syncline.trace.record.cpu_time import available_cores
from syncline.version import VERSION


class PlanMemory:
    """The plan cache as one engine uses it. All ranks call all methods together; only rank 0 touches the disk."""

    def __init__(self, folder: Path | None, *, request: str, codecs: Sequence[str], recall: bool = True) -> None:
        """`folder`: rank 0's decides, None is off. `request`: all that a plan depends on; `codecs`: it may use.

        Without `recall` earlier plans are not used: the job is to be measured.
        """
        self._folder, self._request, self._codecs, self._recall = folder, request, list(codecs), recall
        self._found: list[Remembered] = []
        self._job: Job | None = None

    def read(self, engine: EngineView) -> bool:
        """Read the plans for this job; True if there are some."""
        job = self._job = self._describe(engine)
        text = ""
        if engine.rank == 0 and self._folder is not None and self._recall:
            texts, problems = cache.read(self._folder, job, self._codecs)
            for problem in problems:
                engine.say(problem)
            text = json.dumps([asdict(job), texts])
        # Rank 0's job: other ranks may have another GPU, or another number of cores.
        about, texts = json.loads(engine.groups.text_of_rank_0(text).strip() or "[{}, []]")
        self._found = [cache.parse_remembered(one, Job(**about), self._codecs) for one in texts]
        self._found = [one for one in self._found if self._fits(engine, one)]
        return bool(self._found)

    def find(self, network: float) -> Remembered | None:
        """The plan for a network with this time for a dense exchange."""
        return cache.nearest(self._found, network)

    def write(self, engine: EngineView, found: Remembered) -> None:
        """Remember a plan. A cache that cannot be written is a remark, not an error."""
        if engine.rank or self._folder is None or self._job is None:
            return
        try:
            cache.write(self._folder, self._job, found)
        except OSError as error:
            engine.say(
                f"the plan is not remembered, because {self._folder} cannot be written ({error.strerror}): set"
                f" {cache.VARIABLE} to another folder, or to off"
            )

    def _fits(self, engine: EngineView, found: Remembered) -> bool:
        try:
            found.plan.check(engine.shapes, world=engine.world)
        except ValueError as error:
            engine.say(f"a remembered plan is ignored: {error}")
            return False
        return True

    def _describe(self, engine: EngineView) -> Job:
        frozen = ["" if slot.parameter.requires_grad else ", frozen" for slot in engine.slots]
        rows = [f"{s.name}: {list(s.shape)} {s.dtype}{f}" for s, f in zip(engine.shapes, frozen, strict=True)]
        device = f"cpu {platform.machine()}, {available_cores()} cores, {torch.get_num_threads()} threads"
        if engine.device.type == "cuda":
            device = f"cuda {torch.cuda.get_device_name(engine.device)}"
        versions = f"syncline {VERSION}, torch {torch.__version__}"
        nodes = tuple(node_numbers(engine.groups))
        return Job(tuple(rows), engine.world, nodes, device, self._request, versions)

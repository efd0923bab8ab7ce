"""One rank searches, all have its answer: a search is the same everywhere, and ranks may share cores."""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist

from syncline.engine.process_groups import Groups
from syncline.errors import UsageError
from syncline.plan.file import parse, text_of
from syncline.plan.planner import Choice


def decided(groups: Groups, find: Callable[[], Choice]) -> Choice:
    """What `find` gives on rank 0; the plans that it did not choose stay there. An error is raised on every rank."""
    error: Exception | None = None
    text, choice = "", None
    if groups.rank == 0:
        try:
            choice = find()
            facts = {"step": choice.step, "bound": choice.bound, "why": choice.why}
            text = json.dumps({**facts, "plan": text_of(choice.plan)})
        except Exception as failure:
            error, text = failure, json.dumps({"error": f"{type(failure).__name__}: {failure}"})
    text = shared(groups, text)
    if error is not None:
        raise error
    if choice is not None:
        return choice
    heard = json.loads(text)
    if "error" in heard:
        raise UsageError(f"rank {groups.ranks[0]} found no plan: {heard['error']}")
    return Choice(parse(heard["plan"]), heard["step"], heard["bound"], (), heard["why"])


def shared(groups: Groups, text: str) -> str:
    """Rank 0's text, on every rank."""
    content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    dist.broadcast(size, src=groups.ranks[0], group=groups.control)
    if groups.rank:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=groups.ranks[0], group=groups.control)
    return bytes(content.tolist()).decode()

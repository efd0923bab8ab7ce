"""docs/architecture.md is true: its modules exist, and a PowerSGD step takes the walk of a gradient on that page."""

import re
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest
import torch

import syncline
from ranks import run_ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = dict(re.findall(r"^## (Walk \d.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
GRADIENT = WALKS["Walk 1: a gradient"]


def _steps(walk: str) -> list[tuple[str, str]]:
    """The numbered lines of a walk: (module, the text about it)."""
    lines = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*?)(?=\n\d+\. |\n\n|\Z)", walk, re.DOTALL | re.MULTILINE)
    return [(_module(path), text) for path, text in lines]


def _module(path: str) -> str:
    return "syncline." + path.removesuffix(".py").replace("/", ".")


def test_every_module_of_the_page_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert len(named) > 40
    missing = [path for path in named if not any((ROOT / base / path).is_file() for base in ("src/syncline", "."))]
    assert not missing


def test_there_are_four_walks_without_repetition() -> None:
    assert len(WALKS) == 4
    for title, walk in WALKS.items():
        modules = [module for module, _ in _steps(walk)]
        assert len(modules) >= 10, title
        assert len(modules) == len(set(modules)), f"{title}: a module is listed twice"


def test_the_walk_of_a_gradient_is_short() -> None:
    assert len(_steps(GRADIENT)) <= 12


class Calls:
    """Records (module, function) of Syncline's calls, in the order of first calls, on all threads that start later."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self.on = False

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call" and frame.f_globals.get("__name__", "").startswith("syncline."):
            self.seen.setdefault((frame.f_globals["__name__"], frame.f_code.co_name))

    def __enter__(self) -> "Calls":
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def record_gradient(rank: int, world: int, last: tuple[str, str]) -> list[tuple[str, str]]:
    """Train three steps with PowerSGD and record the third.

    `last` is the function that must have been called before the updated parameter is read.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Calls() as calls:
        sync = syncline.attach(model, optimizer, compress="powersgd(rank=4)", tune=False)
        assert len(sync.plan.units) == 1
        for step in range(3):
            loss = model(torch.randn(8, 64)).sum()
            before = model.weight.clone()
            calls.on = step == 2
            loss.backward()
            optimizer.step()
            deadline = time.monotonic() + 20
            while calls.on and last not in calls.seen and time.monotonic() < deadline:
                time.sleep(0.001)
            assert not torch.equal(model.weight, before)  # the read waits for the update
            calls.on = False
            optimizer.zero_grad()
    return list(calls.seen)


@pytest.mark.timeout(60)
def test_a_gradient_takes_the_walk_of_the_page() -> None:
    walk = [(module, re.findall(r"`(\w+)`", text)[0]) for module, text in _steps(GRADIENT)]
    for calls in run_ranks(record_gradient, 2, walk[-1]):
        for step in walk:
            assert step in calls, f"{step} is listed and was not called"
        order = [calls.index(step) for step in walk]
        assert order == sorted(order), [walk[order.index(place)] for place in sorted(order)]
        entered = {m for m, _ in calls if m.split(".")[1] in ("codecs", "exchange", "engine")}
        helpers = {_module(path) for path in re.findall(r"`([\w/]+\.py)`", GRADIENT.split("Small helpers")[1])}
        missing = entered - {module for module, _ in walk} - helpers
        assert not missing, "these modules work on a gradient and are neither in the walk nor named as helpers"


def train(model: torch.nn.Module, compress: str | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if compress:
        syncline.attach(model, optimizer, compress=compress)
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()


def record_auto(rank: int, world: int) -> list[tuple[str, str]]:
    with Calls() as calls:
        calls.on = True
        train(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), "auto")
    return list(calls.seen)


def record_span(rank: int, world: int, path: str) -> list[tuple[str, str]]:
    with Calls() as calls:
        calls.on = True
        with syncline.trace.recording(path=path):
            train(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64)), None)
        if rank == 0:
            syncline.trace.analyze(path)
    return list(calls.seen)


@pytest.mark.timeout(60)
def test_a_span_takes_the_walk_of_the_page(tmp_path: Path) -> None:
    entered = {module for module, _ in run_ranks(record_span, 2, str(tmp_path / "trace.json"))[0]}
    assert not [module for module, _ in _steps(WALKS["Walk 2: a span"]) if module not in entered]


@pytest.mark.full
@pytest.mark.timeout(60)
def test_auto_takes_the_walk_of_the_page() -> None:
    entered = {module for module, _ in run_ranks(record_auto, 2)[0]}
    assert not [module for module, _ in _steps(WALKS["Walk 4: `auto`"]) if module not in entered]

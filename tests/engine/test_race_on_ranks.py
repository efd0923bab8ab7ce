"""Races of plans on real ranks: after a fallback to dense, with several optimizers, and where the reducer is left."""

from importlib import import_module
from typing import Any

import pytest
import torch
from loops.models import wide_mlp
from test_contender import steps_take

import syncline
from ranks import run_ranks
from syncline.engine.tuning import choose, drift_watch, measure_errors, tuner
from syncline.engine.tuning.drift import WINDOW
from syncline.plan import Choice, CodecError, Errors, bucket_plan, default_plan

TUNED = 13
"""Steps until both plans were timed and race."""
FASTER = {("overlap", "none"): 1.0, ("overlap", "int8"): 1.0, ("overlap", "int4"): 0.95}


def train(rank: int, steps: int, windows: dict[tuple[str, str], float], *, between: Any = None, **how: Any) -> Any:
    """Train; `windows` are the seconds of a step by executor and codec. Returns the codec in use after every step."""
    torch.manual_seed(0)
    model = wide_mlp()
    parameters = list(model.parameters())
    parts = [parameters[:3], parameters[3:]] if how.get("two") else [parameters]
    optimizers = [torch.optim.SGD(part, lr=0.02) for part in parts]
    sync = syncline.attach(model, optimizers, compress="auto(int8, int4)", plan_cache=False)
    mean = drift_watch.DriftWatch.mean

    def seen(self: Any) -> float | None:
        codec = sync.plan.units[0].codec
        return None if mean(self) is None else windows.get((sync.plan.executor, codec), 1.0)

    drift_watch.DriftWatch.mean = seen  # type: ignore[method-assign]
    drift_watch.DriftWatch.add_window = how.get("drift", lambda *_: False)  # type: ignore[method-assign]
    used = []
    for step in range(steps):
        if between is not None:
            between(sync, step)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 10 + rank))
        loss = (model(x) - x[:, :10]).square().mean()
        loss.backward(create_graph=step == how.get("special"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        used.append(sync.plan.units[0].codec)
    sync.wait()
    auto = sync.auto
    found = {"used": used, "confirmed": auto.confirmed, "why": auto.choice.why}
    drift_watch.DriftWatch.mean = mean  # type: ignore[method-assign]
    sync.close()
    return found


def fall_back(sync: Any) -> None:
    sentinel = sync._sentinel
    sentinel._falling_back = {unit.row.name for unit in sync.units}
    sentinel._fall_back()
    assert sync.fell_back


def raced(rank: int, world: int) -> dict[str, Any]:
    tuner.reducer_plans = lambda *_: []
    steps_take(FASTER, chosen="int8")
    found = {}
    for at in (6, 10, 20):  # in the trial of the first plan, of the second, and in the race
        found[f"fell back at {at}"] = train(
            rank, TUNED + WINDOW + 15, FASTER, between=lambda sync, step, at=at: fall_back(sync) if step == at else None
        )
    steps_take(FASTER, chosen="int8", group_bytes=1)  # every optimizer has its own units
    found["two optimizers"] = train(rank, TUNED + 8 * WINDOW, FASTER, two=True)
    return found


@pytest.mark.timeout(90)
def test_a_race_does_not_undo_what_the_sentinel_did_and_ends_with_several_optimizers() -> None:
    first, second = run_ranks(raced, 2, timeout=80)
    assert first == second
    for at in (6, 10, 20):
        one = first[f"fell back at {at}"]
        assert one["used"][at - 1] != "none", "a lossy plan ran"
        assert set(one["used"][at:]) == {"none"}
        assert one["why"].endswith("units fell back to dense")
    two = first["two optimizers"]
    assert {"int8", "int4"} <= set(two["used"][TUNED:])
    assert two["confirmed"]


def measured_again(rank: int, world: int) -> Any:
    tuner.reducer_plans = lambda *_: []
    steps_take(FASTER)
    given, measurements = [], []

    def search(shapes: Any, *_: Any, errors: Errors, **__: Any) -> Choice:
        given.append(errors.codecs["int4"]["0.weight"].with_feedback)
        return Choice(default_plan(shapes, compress="int4"), 1.0, 0.5, (), "int4")

    def measure(self: Any, engine: Any, specs: Any) -> Errors:
        error = (1e-5, 0.5)[len(measurements)]
        measurements.append(error)
        names = [slot.name for slot in engine.slots]
        rows = {name: CodecError(error, error) for name in names}
        return Errors(dict.fromkeys(names, 1.0), dict.fromkeys(("int8", "int4"), rows))

    def drift(sync: Any, step: int) -> None:
        once = sync.auto.settled and len(sync.auto.planned_at) == 1
        drift_watch.DriftWatch.add_window = lambda *_: once  # type: ignore[method-assign]

    choose.search = search
    measure_errors.GradientHistory.measure = measure  # type: ignore[method-assign]
    drift_watch.DriftWatch.probe = lambda *_: "compute"  # type: ignore[method-assign]
    train(rank, TUNED + 2 * WINDOW, FASTER, between=drift)
    return measurements, given


def test_errors_that_are_measured_again_count() -> None:
    (measured, given), _ = run_ranks(measured_again, 2)  # rank 0 plans
    assert measured == given == [1e-5, 0.5]


def left_later(rank: int, world: int) -> Any:
    import_module("syncline.engine.attach").START = "reducer"
    tuner.reducer_plans = lambda plan, step, shapes, *_: [bucket_plan(shapes, codec="bf16")]
    ours = {("overlap", "bf16"): 0.63, ("overlap", "int4"): 0.6}
    steps_take({("reducer", "none"): 1.5, ("reducer", "bf16"): 0.58, **ours})
    windows = {("reducer", "bf16"): 0.58, ("overlap", "bf16"): 0.60, ("overlap", "int4"): 0.62}
    return train(rank, 160, windows, special=150)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.timeout(90)
def test_a_loop_that_leaves_the_reducer_after_a_race_gets_the_plan_that_was_faster_in_the_race() -> None:
    for found in run_ranks(left_later, 2, timeout=80):
        assert "int4" in found["used"], "it was faster in the trial"
        assert set(found["used"][151:]) == {"bf16"}

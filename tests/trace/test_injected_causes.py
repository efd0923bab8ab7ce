"""Causes of slowness put in on purpose, on real ranks: the verdict names each, and says what removing it gains.

Each is run once with the cause and once without, with sleeps and sizes that are large against a machine's noise. A pair
that noise has pulled apart is run again. That the cause is there and is named is asserted of every pair.
"""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from injected_ranks import Job, analysis, without_delays

from syncline.cluster.capabilities import capabilities
from syncline.trace.analysis.analyze import analyze
from syncline.trace.formats.load import load
from syncline.train.config import Config
from syncline.train.session.local import run_local

pytestmark = [pytest.mark.timeout(100), pytest.mark.alone]
ATTEMPTS, QUIET = 3, 0.1
CLOSE, BUSY = 0.2, 0.5


def first(told):
    """The costliest cause of the ranks' own; how busy other programs are is not ours to say."""
    return next((f for f in told.findings if f.kind != "oversubscribed"), told.verdict)


def finding(told, kind):
    return next((one for one in told.findings if one.kind == kind), None)


def typical(told, rank, phase):
    """A phase's ms in a rank's steps, their median."""
    return median(row["breakdown_ms"][phase] for row in told.per_step if row["rank"] == rank)


def is_quiet(told):
    return (told.queue_ms or 0.0) < QUIET * told.step_ms["median"]


def gains_what_it_says(measure):
    """`measure` returns what is said to be recoverable, both analyses, and whether the machine was its ranks' own.

    Within 20% in one of three pairs; where other programs hold up the ranks in the last one, too, within 50%.
    """
    for _ in range(ATTEMPTS):
        said, slow, quick, alone = measure()
        gained = slow.step_ms["median"] - quick.step_ms["median"]
        if said == pytest.approx(gained, rel=CLOSE):
            return
    assert said == pytest.approx(gained, rel=CLOSE if alone else BUSY), f"{slow.queue_ms} ms in the queue"


def test_a_rank_that_sleeps_in_forward_is_the_straggler():
    # Its backward pass is longer than the delay: just before it comes it is always in backward.
    job = Job(delays={(1, "forward"): 0.1}, backward_s=0.12, sizes=(2_000, 200), steps=12)

    def measure():
        slow, fired = analysis(job, 3)
        quick, _ = analysis(without_delays(job), 3)
        assert fired == [0, job.steps, 0], "the fault is there"
        assert first(slow).kind == "straggler"
        assert "Rank 1 is late, delayed in forward" in first(slow).sentence
        assert (slow.late[0].rank, slow.late[0].doing) == (1, "forward")
        for rank in (0, 2):
            assert typical(slow, rank, "wait") > 80, "the innocent wait"
            # Two cores that others use, too, make messages slow: as slow as without the delay.
            moving = typical(quick, rank, "exposed_exchange")
            assert typical(slow, rank, "exposed_exchange") < 2 * moving + 15, "it is not their communication"
        assert typical(slow, 1, "wait") < 30
        return first(slow).recoverable_ms, slow, quick, is_quiet(slow) and is_quiet(quick)

    gains_what_it_says(measure)


def test_a_slow_loader_is_input_bound():
    job = Job(delays={(rank, "data"): 0.12 for rank in range(2)}, sizes=(2_000,), steps=12)

    def measure():
        slow, fired = analysis(job, 2)
        quick, _ = analysis(without_delays(job), 2)
        assert fired == [job.steps] * 2
        assert first(slow).kind == "input-bound"
        left = finding(quick, "input-bound")
        assert left is None or left.recoverable_ms < 0.1 * first(slow).recoverable_ms
        return first(slow).recoverable_ms, slow, quick, is_quiet(slow) and is_quiet(quick)

    gains_what_it_says(measure)


def test_500_tiny_tensors_one_by_one_are_latency_bound():
    job = Job(sizes=(16,) * 500, steps=9)

    def measure():
        slow, _ = analysis(job, 2)
        quick, _ = analysis(replace(job, sizes=(16 * 500,)), 2)
        assert slow.network.messages == 500
        assert first(slow).kind == "latency-bound"
        assert "500 messages of 64 B" in first(slow).sentence
        assert finding(quick, "latency-bound") is None
        return first(slow).recoverable_ms, slow, quick, is_quiet(slow) and is_quiet(quick)

    gains_what_it_says(measure)


def test_eight_ranks_on_two_cores_are_too_many():
    job = Job(forward_s=0, backward_s=0, spin=300_000, sizes=(2_000,), steps=12, cores=2)

    def measure():
        slow, _ = analysis(job, 8)
        quick, _ = analysis(job, 2)
        assert slow.verdict.kind == "oversubscribed"
        assert "8 ranks on 2 cores" in slow.verdict.sentence
        # Without the cause the work of a rank is the same, and there are as many ranks as cores.
        alone = is_quiet(quick) and not slow.verdict.sentence.startswith("Other programs")
        # What two ranks still lose to other programs is not theirs to gain.
        left = finding(quick, "oversubscribed")
        return slow.verdict.recoverable_ms - (left.recoverable_ms if left else 0.0), slow, quick, alone

    gains_what_it_says(measure)


class Silent:
    """A watcher that shows nothing."""

    def note(self, text: str) -> None: ...
    def begin(self, run: Any) -> None: ...
    def step(self, message: dict[str, Any]) -> None: ...
    def end(self, run: Any, result: dict[str, Any]) -> None: ...


@pytest.mark.namespaces
def test_a_link_of_100_mbit_is_bandwidth_bound(tmp_path: Path):
    able = capabilities()
    if not (able.can_namespaces and able.can_shape):
        pytest.skip(able.why)

    def trained(bandwidth):
        config = Config().override(
            {
                "train.model": "mlp(hidden=100)",
                "train.batch": 4,
                "train.steps": 12,
                "train.test_samples": 0,
                "train.device": "cpu",
                "cluster.nodes": 2,
                "cluster.bandwidth": bandwidth,
                "compare.strategies": ["ddp"],
            }
        )
        source = load(run_local(config, out=tmp_path / bandwidth, watcher=Silent())[0])
        return analyze(source)

    def measure():
        slow, quick = trained("100Mbit"), trained("5Gbit")
        assert slow.network.link == 100e6
        assert slow.network.busy_ms > 2 * quick.network.busy_ms, "the link is shaped"
        assert first(slow).kind == "bandwidth-bound"
        assert "a link of 100 Mbit/s" in first(slow).sentence
        assert slow.bound.wire_ms == pytest.approx(slow.network.busy_ms, rel=0.3), "its bytes need that long"
        return first(slow).recoverable_ms, slow, quick, is_quiet(slow) and is_quiet(quick)

    gains_what_it_says(measure)

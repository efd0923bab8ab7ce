"""Comparison of two traces: figures, intervals, and the exit code of a gate."""

import json
import random

import diff_traces
import pytest
from diff_traces import MS

from syncline.errors import UsageError
from syncline.trace import PHASES, Span, Trace
from syncline.trace.analysis.bootstrap import draws, interval
from syncline.trace.analysis.diff import FEWEST, FORMAT, diff, side


def made(**options):
    about = {key: options.pop(key) for key in ("strategy", "world_size") if key in options}
    return side(Trace.of(diff_traces.trace(**options), metadata=about), source="here")


def test_a_slower_phase_is_found_with_its_size():
    told = diff(made(seed=1), made(seed=2, exchange=12.0))
    step, exchange = told.step, told.phases["exposed_exchange"]
    assert (told.kind, told.exit_code) == ("slower", 1)
    assert exchange.difference_ms == pytest.approx(4, abs=0.5)
    assert exchange.interval_ms[0] < 4 < exchange.interval_ms[1] or exchange.difference_ms == pytest.approx(4, rel=0.05)
    assert exchange.significant
    assert step.significant
    assert step.ratio == pytest.approx(24 / 20, rel=0.05)
    assert "most of it in exposed_exchange" in told.sentence
    assert diff(told.b, told.a).kind == "faster"
    assert diff(told.b, told.a).exit_code == 0


def test_phases_sum_to_the_step():
    told = diff(made(seed=3), made(seed=4, forward=11.0))
    assert set(told.phases) == set(PHASES)
    assert sum(change.a_ms for change in told.phases.values()) == pytest.approx(told.step.a_ms)
    assert sum(change.difference_ms for change in told.phases.values()) == pytest.approx(told.step.difference_ms)


def test_start_up_does_not_count():
    one = made(seed=5)
    assert one.steps[0] > 0
    assert max(row[0] for row in one.rows) < 30, "the first step takes 50"


def test_a_change_below_the_threshold_passes():
    slower = diff(made(seed=6, noise=0.005), made(seed=7, noise=0.005, exchange=8.7))
    assert slower.step.significant
    assert (slower.kind, slower.exit_code) == ("same", 0)
    assert "by no more than 5%" in slower.sentence
    assert diff(slower.a, slower.b, threshold=0.01).exit_code == 1
    with pytest.raises(UsageError, match="threshold"):
        diff(slower.a, slower.b, threshold=-0.1)


def test_two_equal_runs_rarely_differ():
    """Noise is correlated from step to step: without blocks this would fail for every third pair."""
    sides = [made(seed=seed, noise=0.06, steps=40) for seed in range(40)]
    found = [diff(sides[n], sides[n + 1], threshold=0) for n in range(0, 40, 2)]
    assert sum(told.step.significant for told in found) <= 4
    assert sum(diff(told.a, told.b).exit_code for told in found) <= 1


def test_one_slow_step_is_no_regression():
    rows = diff_traces.trace(seed=8)
    last = max(s.step for s in rows)
    slow = [s if s.step < last else diff_traces.span(s.rank, s.lane, s.step, s.start / 1e6, s.end / 1e6 + 900 *
            (s.lane in ("update", "step")), s.unit, s.bytes) for s in rows]  # fmt: skip
    told = diff(side(Trace.of(rows, split=False)), side(Trace.of(slow, split=False)))
    assert told.exit_code == 0
    assert max(row[0] for row in told.b.rows) > 900


def slowed(spans, chosen, *, more=0.0, times=1.0):
    """The same steps, `chosen` ones with so many ms more of forward, all so many times as long."""
    at, rows = {}, []
    for span in sorted((s for s in spans if s.lane == "step"), key=lambda s: s.step):
        begin = at.get(span.rank, 0.0)
        at[span.rank] = end = begin + (span.end - span.start) / 1e6 * times + more * chosen(span.step)
        rows += [diff_traces.span(span.rank, lane, span.step, begin, end) for lane in ("step", "forward")]
    return rows


@pytest.mark.parametrize("every", [5, 8, 10])
def test_a_slow_step_in_ten_is_a_regression(every):
    # Step 0 is start-up. A trimmed mean leaves out a tenth at each end: 10 of 101 steps, but not 10 of 99.
    one, other = (diff_traces.trace(seed=seed, steps=102) for seed in (10, 11))
    told = diff(
        side(Trace.of(slowed(one, lambda step: False), split=False)),
        side(Trace.of(slowed(other, lambda step: step % every == 4, more=100), split=False)),
    )
    assert (told.kind, told.exit_code) == ("slower", 1)
    assert told.slow_steps.difference_ms > told.step.difference_ms
    if every == 10:
        assert "slower in some steps" in told.sentence
        assert abs(told.step.difference_ms) < 1
    assert diff(told.b, told.a).exit_code == 0


def test_a_stray_step_hides_no_regression():
    one, other = (diff_traces.trace(seed=seed, steps=60) for seed in (12, 13))
    before = side(Trace.of(slowed(one, lambda step: step == 20, more=600), split=False))
    assert diff(before, side(Trace.of(slowed(other, lambda step: False, times=1.2), split=False))).exit_code == 1
    assert (
        diff(
            side(Trace.of(slowed(one, lambda step: False), split=False)),
            side(Trace.of(slowed(other, lambda step: step == 20, more=600), split=False)),
        ).kind
        == "same"
    )


def test_too_few_steps_give_no_verdict():
    told = diff(made(steps=30), made(steps=FEWEST))
    assert (told.kind, told.exit_code, told.step.interval_ms) == ("unknown", 2, None)
    assert f"B has {FEWEST - 1}" in told.sentence
    assert "A has" not in told.sentence


def test_different_ranks_strategies_and_units_are_noted():
    a, b = made(strategy="ddp", world_size=2), made(strategy="ring", world_size=3, ranks=3, units=("c",), size=500)
    told = diff(a, b)
    assert [note.split(":")[0] for note in told.notes] == [
        "the strategies differ", "the numbers of ranks differ", "A and B have no unit in common"
    ]  # fmt: skip
    assert (told.a.bytes, told.b.bytes) == (2000, 500)
    assert {row["unit"] for row in told.units} == {"a", "b", "c"}
    assert next(row for row in told.units if row["unit"] == "c")["a_bytes"] is None


def test_the_unit_that_changed_most_comes_first():
    a = diff_traces.trace(seed=9, units=("a", "b", "c"))
    b = [s for s in a if s.unit != "b"] + [diff_traces.span(s.rank, s.lane, s.step, s.start / 1e6, s.start / 1e6 + 0.1,
         "b", 10) for s in a if s.unit == "b"]  # fmt: skip
    told = diff(side(Trace.of(a, split=False)), side(Trace.of(b, split=False)))
    assert told.units[0]["unit"] == "b"
    assert (told.units[0]["a_bytes"], told.units[0]["b_bytes"]) == (1000, 10)


def test_the_result_is_deterministic_plain_data():
    told = [diff(made(seed=1), made(seed=2)).as_json() for _ in range(2)]
    assert told[0] == told[1]
    assert json.loads(json.dumps(told[0])) == told[0]
    assert told[0]["format"] == FORMAT
    assert set(told[0]) == {
        "format", "verdict", "confidence", "threshold", "a", "b", "step", "slow_steps", "phases", "operators", "units",
        "notes",
    }  # fmt: skip
    assert set(told[0]["step"]) == {"a_ms", "b_ms", "interval_ms", "difference_ms", "ratio", "significant"}
    assert set(told[0]["a"]) == {
        "source", "strategy", "world_size", "steps", "step_ms", "overlap", "bytes_per_step", "notes"
    }  # fmt: skip


def test_thousands_of_steps_are_fast():
    rows = [[float(n % 7), 1.0] for n in range(5000)]
    low, high = interval(draws(rows, seed=1)[:, 0], confidence=0.95)
    assert low < 3 < high
    assert high - low < 0.2


def _operators(mm, *, on_gpu, seed):
    """Steps of two operators, as kernels of a GPU or as ops of the host; one rank."""
    numbers, spans, host = random.Random(seed), [], []
    for step in range(20):
        at = 30 * step * MS
        lengths = {
            "aten::mm": round((mm + numbers.gauss(0, 0.1)) * MS),
            "aten::relu": round(numbers.gauss(3, 0.05) * MS),
        }
        for name, length in lengths.items():
            kernel = (
                {"name": f"kernel of {name}", "unit": name, "stream": "7"}
                if on_gpu
                else {"name": "forward", "unit": ""}
            )
            spans.append(Span(rank=0, lane="forward", step=step, start=at, end=at + length, **kernel))
            host.append([step, name, length])
            at += length
        spans.append(Span(0, "step", "step", "", step, 30 * step * MS, at))
    return Trace.of(spans, metadata={} if on_gpu else {"operators": {"0": host}})


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_operator_that_became_slower_is_named(on_gpu):
    result = diff(side(_operators(10.0, on_gpu=on_gpu, seed=1)), side(_operators(12.0, on_gpu=on_gpu, seed=2)))
    assert list(result.operators) == ["aten::mm", "aten::relu"]
    slower, same = result.operators.values()
    assert slower.difference_ms == pytest.approx(2.0, abs=0.2)
    assert (slower.significant, same.significant) == (True, False)
    assert result.sentence.endswith(f"by operator in aten::mm ({slower.difference_ms:+.2f} ms)")
    assert result.as_json()["operators"]["aten::mm"]["ratio"] == pytest.approx(1.2, abs=0.02)

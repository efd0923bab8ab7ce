"""Derived figures, on made-up runs whose answers are known."""

import pytest

import report_samples as samples
from syncline.report import compare, scaling


def test_speedup_and_efficiency_against_single() -> None:
    one, four = samples.run("single"), samples.run("ddp")
    one["samples_per_s"], four["samples_per_s"] = 100.0, 300.0
    row = compare.rows(samples.results(one, four))[1]
    assert (row.speedup, row.efficiency, row.against) == (3.0, 0.75, "single")


def test_without_single_the_smallest_world_size_is_the_baseline() -> None:
    runs = [samples.run("ddp", world=n) for n in (4, 2)]
    runs[0]["samples_per_s"], runs[1]["samples_per_s"] = 300.0, 200.0
    rows = compare.rows(samples.results(*runs))
    assert [row.label for row in rows] == ["ddp x4", "ddp x2"]
    assert (rows[0].speedup, rows[0].efficiency, rows[0].against) == (1.5, 0.75, "ddp x2")


def test_without_any_baseline_there_is_no_speedup() -> None:
    crashed = samples.crashed("single")
    rows = compare.rows(samples.results(crashed, samples.run("ddp"), samples.run("ring")))
    assert all(row.speedup is None and row.efficiency is None for row in rows)


def test_labels_are_unique() -> None:
    runs = [
        samples.run("ddp"),
        samples.run("ddp"),
        samples.run("ddp", world=2),
        {"strategy": "ddp", "status": "crashed"},
    ]
    assert compare.labels(runs) == ["ddp x4 #1", "ddp x4 #2", "ddp x2", "ddp"]


def test_loss_difference_is_the_largest_at_a_common_step() -> None:
    one, other = samples.run("single"), samples.run("ddp")
    one["loss"], other["loss"] = [3.0, 2.0, None, 9.0], [3.5, 1.75, 2.0]
    assert compare.loss_difference(one, other) == 0.5
    other["batch"] = 128
    assert compare.loss_difference(one, other) is None


def test_nearest_losses_name_the_twin() -> None:
    row = compare.rows(samples.results())[1]
    assert row.nearest == compare.Nearest("all-reduce", 0.0)


def test_bytes_are_compared_only_when_measured() -> None:
    run = samples.run("gather-scatter")
    assert compare.wire_ratio(run) == pytest.approx(1.034)
    run["wire"]["measured"] = False
    assert compare.wire_ratio(run) is None


def test_the_straggler_waits_least() -> None:
    rank, ms = compare.late_rank(samples.run("ddp")) or (None, 0.0)
    assert rank == 3
    assert ms > 0
    assert compare.late_rank(samples.run("single")) is None


def test_spread_between_ranks() -> None:
    assert compare.rank_spread(samples.run("ddp")) == pytest.approx(1 / 0.94 - 1)


def test_parts_sum_to_the_median_step() -> None:
    run = samples.run("ddp")
    assert sum(compare.parts_ms(run).values()) == pytest.approx(run["step_ms"]["median"])


def test_scaling_separates_steady_state_from_the_whole_run() -> None:
    (curve,) = scaling.curves(samples.scaling())
    last = curve.points[-1]
    assert [p.world_size for p in curve.points] == [1, 2, 4]
    assert last.first_epoch_s == pytest.approx(22.359)
    assert last.later_epoch_s == pytest.approx(0.502, rel=0.02)
    assert last.speedup == pytest.approx(3.27, rel=0.03)
    assert last.efficiency == pytest.approx(0.82, rel=0.03)
    assert last.whole_speedup is not None
    assert last.whole_speedup < 1 < last.speedup


def test_start_up_names_its_largest_part() -> None:
    start = scaling.start_up(samples.scaling()["runs"][2])
    assert start.largest is not None
    assert start.largest[0] == "first step"
    assert start.share > 0.75
    assert start.total_ms == pytest.approx(sum(ms for _, ms in start.parts))


def test_a_crashed_world_size_leaves_the_curve() -> None:
    made = samples.scaling()
    made["runs"][1] = samples.crashed("ddp")
    assert [p.world_size for p in scaling.curves(made)[0].points] == [1, 4]

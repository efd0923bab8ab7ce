"""Rows of `bench overlap`, without ranks: step times, paired ratios, bounds, the two steps of the timeline."""

import pytest

from syncline.bench.overlap.ablation import ablation, label_rows
from syncline.bench.overlap.rows import Entry, family_of, kind_of, last_two_steps, pictured, rows
from syncline.bench.overlap.run import all_rivals, contestants
from syncline.train.strategies import load


def entry(strategy, by_round, *, wire=None, losses=(), **more):
    turns = [{"round": n, "step_ms": steps, "wire_bytes": wire} for n, steps in enumerate(by_round, 1)]
    return Entry(strategy, turns=turns, losses=list(losses), **more)


def by_name(entries, **options):
    return {row["strategy"]: row for row in rows(entries, **options)}


def test_ratios_are_paired_by_round_and_the_best_buckets_are_the_rival():
    # The machine is ten times as slow in the second round: a ratio of medians over rounds would be of nothing.
    made = by_name(
        [
            entry("local", [[1.0, 1.0, 9.0], [10.0]]),
            entry("ddp", [[8.0], [80.0]]),
            entry("ddp(bucket_mb=5)", [[6.0], [60.0]]),
            entry("ddp-bf16", [[4.0], [40.0]]),
            entry("syncline", [[2.0], [30.0]]),
        ],
        bytes_per_s=None,
    )
    ours = made["syncline"]["times_faster_than"]
    assert set(ours) == {"ddp", "ddp-bf16"}
    assert ours["ddp"] == {"against": "ddp(bucket_mb=5)", "median": 2.5, "low": 2, "high": 3, "rounds": [3.0, 2.0]}
    assert [name for name, row in made.items() if row["best_of_family"]] == ["ddp(bucket_mb=5)", "ddp-bf16"]
    assert made["ddp"]["times_faster_than"] == {}
    assert (made["ddp"]["step_ms_low"], made["ddp"]["step_ms_high"]) == (8, 80)


def test_hierarchical_is_compared_with_the_same_codec_over_the_best_flat_exchange():
    made = by_name(
        [
            entry("syncline(int8)", [[8.0], [80.0]]),
            entry("syncline(int8, sharded)", [[6.0], [60.0]]),
            entry("syncline(bf16)", [[1.0], [1.0]]),
            entry("syncline(auto)", [[1.0], [1.0]]),
            entry("syncline(int8, hierarchical(node=2))", [[2.0], [30.0]]),
        ],
        bytes_per_s=None,
    )
    found = made["syncline(int8, hierarchical(node=2))"]["times_faster_than_flat"]
    assert found == {"against": "syncline(int8, sharded)", "median": 2.5, "low": 2, "high": 3, "rounds": [3.0, 2.0]}
    assert all(row["times_faster_than_flat"] is None for name, row in made.items() if "hierarchical" not in name)


def test_the_best_of_all_rivals_is_compared_too():
    made = by_name(
        [
            entry("ddp", [[8.0]]),
            entry("horovod(cycle_ms=5)", [[7.0]]),
            entry("horovod", [[6.0]]),
            entry("byteps", [[1.0]], error={"rank": 1, "summary": "gone", "traceback": ""}),
            entry("syncline", [[2.0]]),
        ],
        bytes_per_s=None,
    )
    assert made["syncline"]["times_faster_than_best"]["against"] == "horovod"
    assert set(made["syncline"]["times_faster_than"]) == {"ddp", "horovod", "byteps"}
    assert made["ddp"]["times_faster_than_best"] is None


def test_all_rivals_are_strategies_that_differ():
    names = all_rivals()
    assert len(names) == len(set(names))
    assert {kind_of(name) for name in names} == {"rival"}
    kinds = {"ddp", "ddp-bf16", "horovod", "byteps", "ring-dgc", *(f"ddp-powersgd(rank={n})" for n in (1, 4, 64))}
    assert {family_of(name) for name in names} == kinds


def test_an_ablation_adds_one_part_in_each_row():
    stages = ablation("int8")
    schedules = [load(name).schedule for name in stages.values()]
    parts = [0 if s is None else s.overlap + s.ordered + s.grouped + s.planned for s in schedules]
    assert parts == [0, 0, 1, 2, 3, 4, 0]
    assert [kind_of(name) for name in stages.values()] == ["ours"] * 7
    names = ("local", *stages.values())
    entries = [entry(name, [[8.0 / number], [80.0 / number]]) for number, name in enumerate(names, 1)]
    result = {"rows": rows(entries, bytes_per_s=None)}
    label_rows(result, stages)
    assert [row["stage"] for row in result["rows"]] == [None, *stages]
    assert "times_faster_than_first" not in result["rows"][1]
    assert result["rows"][3]["times_faster_than_first"]["median"] == pytest.approx(2.0), "paired with the dense row"


def test_the_bound_is_the_longer_of_compute_and_wire():
    entries = [
        entry("local", [[20.0]], wire=0),
        entry("ddp", [[100.0]], wire=8_000_000),
        entry("syncline(bf16)", [[25.0]], wire=1_000_000, plans=[{"predicted_ms": 30.0}]),
    ]
    made = by_name(entries, bytes_per_s=1e8)
    assert (made["ddp"]["wire_ms"], made["ddp"]["bound_ms"], made["ddp"]["to_bound"]) == (80, 80, 1.25)
    assert (made["syncline(bf16)"]["wire_ms"], made["syncline(bf16)"]["bound_ms"]) == (10, 20)
    assert made["syncline(bf16)"]["prediction_error"] == pytest.approx(0.2)
    unmeasured = by_name(entries, bytes_per_s=None)
    assert (unmeasured["ddp"]["wire_ms"], unmeasured["ddp"]["bound_ms"]) == (None, 20)
    assert by_name(entries[1:], bytes_per_s=1e8)["ddp"]["bound_ms"] is None


def test_losses_are_compared_at_the_last_common_step():
    made = by_name(
        [entry("ddp", [[1.0]], losses=range(10)), entry("syncline(bf16)", [[1.0]], losses=range(100, 200))],
        bytes_per_s=None,
    )
    row = made["syncline(bf16)"]
    assert (row["loss_first"], row["loss_last"], row["loss_dense"]) == (100, 107, 7)
    assert len(row["losses"]) == 100


def test_a_crashed_rival_counts_only_where_no_other_has_a_time():
    failed = {"rank": 1, "summary": "gone", "traceback": ""}
    crashed = entry("ddp(bucket_mb=5)", [[1.0]], error=failed)
    ours = entry("syncline", [[2.0]])
    both = by_name([crashed, entry("ddp", [[4.0]]), ours], bytes_per_s=None)
    assert both["syncline"]["times_faster_than"]["ddp"]["against"] == "ddp"
    assert both["ddp(bucket_mb=5)"]["status"] == "crashed"
    alone = by_name([crashed, ours], bytes_per_s=None)
    assert alone["syncline"]["times_faster_than"]["ddp"]["median"] == 0.5
    nothing = by_name([Entry("ddp", error=failed), ours], bytes_per_s=None)
    assert nothing["syncline"]["times_faster_than"] == {}


def test_the_two_timelines_send_equal_bytes():
    entries = [
        entry("ddp", [[90.0]], wire=100),
        entry("ddp-powersgd(rank=4)", [[50.0]], wire=10),
        entry("syncline", [[80.0]], wire=100),
        entry("syncline(powersgd(rank=4))", [[40.0]], wire=9.5),
        entry("syncline(powersgd(rank=4) | bf16)", [[30.0]], wire=5),
    ]
    assert pictured(rows(entries, bytes_per_s=None)) == ("ddp-powersgd(rank=4)", "syncline(powersgd(rank=4))")


def test_the_timeline_has_the_last_two_whole_steps():
    steps = [[n * 10_000_000, n * 10_000_000 + 9_000_000] for n in range(5)]
    spans = [["exchange", "x", "u", 1, 18_000_000, 22_000_000], ["forward", "f", "", 4, 40_000_000, 41_000_000]]
    spans += [["exchange", "y", "<b>", 3, 35_000_000, 45_000_000], ["step", "step", "", 2, 20_000_000, 29_000_000]]
    seen = last_two_steps(steps, spans)
    assert seen["marks"] == [0, 10, 20]
    assert seen["spans"] == [["exchange", "x", "u", 0, 2], ["exchange", "y", "<b>", 15, 20]]
    assert last_two_steps(steps[:2], spans) == {"marks": [], "spans": []}


def test_contestants_by_default():
    assert contestants("powersgd(rank=64)", buckets=[5, 25], also=["bf16"]) == (
        "local", "ddp(bucket_mb=5)", "ddp", "ddp-bf16(bucket_mb=5)", "ddp-bf16",
        "ddp-powersgd(rank=64, bucket_mb=5)", "ddp-powersgd(rank=64)",
        "syncline", "syncline(powersgd(rank=64))", "syncline(bf16)", "syncline(auto)",
    )  # fmt: skip
    assert "ddp-powersgd(rank=8)" in contestants("powersgd(8) | bf16")
    assert not any("powersgd" in name for name in contestants("topk(0.01) | int8"))

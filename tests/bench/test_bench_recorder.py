"""`bench recorder`: a quick run of real ranks, and the computation of its rows."""

import json

import pytest

from syncline.bench.recorder import rows
from syncline.bench.recorder import run as recorder
from syncline.errors import UsageError

TINY = ("--model", "mlp(hidden=16)", "--data", "synthetic(image_size=8)", "--blocks", "1", "--steps", "2")


@pytest.mark.alone
def test_a_quick_run_compares_recorded_with_unrecorded_steps_and_phases_with_wall_time(tmp_path, capsys):
    out = tmp_path / "results" / "recorder.json"
    assert recorder.main(["--device", "cpu", *TINY, "--warm-up", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [row["way"] for row in result["rows"]] == ["ddp", "syncline"]
    assert "--model=mlp(hidden=16)" in result["command"]
    for row in result["rows"]:
        assert row["way"] in shown
        assert {"step", "cpu", "thread"} == set(row["ratio"])
        assert row["ratio"]["step"]["repetitions"] == 1
        sampled = row["sampled"]
        assert sampled["every"] > 1  # steps are short
        assert sampled["steps"] == sampled["every"]
        assert sampled["ratio"]["step"]["repetitions"] == sampled["rounds"] >= 1
        assert f"1 in {sampled['every']}, by steps" in shown
        assert row["in_turn"]["ratio"]["repetitions"] == (40 if row["way"] == "ddp" else 6)
        assert 0 < row["counted_share"] < 1
        assert row["spans_per_step"] > 4
        assert set(row["partition_error"]["ranks"]) == {"0", "1"}
        # Steps are a few milliseconds here, and others use the machine.
        assert row["partition_error"]["worst"] < 0.5


def test_ratios_pair_blocks_of_a_round_and_errors_are_per_rank():
    def seen(on, off):
        times = ("step", "cpu", "thread")
        made = {"on": dict.fromkeys(times, on), "off": dict.fromkeys(times, off)}
        made |= {"sampled": dict.fromkeys(times, off), "sampled_off": dict.fromkeys(times, off)}
        return made | {"every": 4, "sampled_steps": 8, "in_turn": {"on": on, "off": off}}

    records = [{"ways": {"ddp": seen([2.0, 4.0], [1.0, 2.0])}}, {"ways": {"ddp": seen([3.0, 3.0], [3.0, 3.0])}}]
    facts = {"overhead_ns_per_step": 20_000.0, "spans_per_step": 9.0}
    traces = [{"recorder": facts, "ms": {0: 2.0, 1: 3.3}}, {"recorder": facts, "ms": {0: 4.0, 1: 3.0}}]
    row = rows.row("ddp", records, traces)
    assert row["ratio"]["step"]["median"] == pytest.approx((2.5 / 2 + 3.5 / 2.5) / 2)
    assert row["step_ms"]["off"]["median"] == 2.25
    assert {key: row["sampled"][key] for key in ("every", "steps", "rounds")} == {"every": 4, "steps": 8, "rounds": 2}
    assert row["sampled"]["ratio"]["step"]["median"] == 1.0
    turns = row["in_turn"]
    assert turns["ratio"]["median"] == row["ratio"]["step"]["median"]
    assert turns["default"]["ratio"] == pytest.approx(1 + (turns["ratio"]["median"] - 1) / 4), "one step in four"
    attached = rows.in_turn([records[0]["ways"]["ddp"]], "syncline", 4)
    assert attached["default"]["ratio"] == pytest.approx(1 + 0.75), "watched in the steps beside it, too"
    assert row["counted_share"] == pytest.approx(0.02 / 2.25)
    assert row["partition_error"]["ranks"]["0"] == {"worst": 0.0, "median": 0.0}
    assert row["partition_error"]["worst"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("sampled", "upper", "apart", "says"),
    [
        (1.009, 1.009, 0.009, []),
        (1.011, 1.009, 0.0, ["took more than 1% of the time, by blocks"]),
        (1.0, 1.011, 0.0, ["is not shown to take less than 1% of the time, by steps"]),
        (1.0, 1.0, 0.011, ["the partition is more than 1% from the wall time"]),
        (1.0, 1.0, float("nan"), ["the partition is more than 1% from the wall time"]),
    ],
)
def test_warnings_name_figures_outside_the_bounds(sampled, upper, apart, says):
    line = {"way": "ddp", "partition_error": {"worst": apart}, "in_turn": {"default": {"interval": [0.9, upper]}}}
    line["sampled"] = {"every": 3, "ratio": {"step": {"median": sampled}}}
    found = rows.warnings(line)
    assert len(found) == len(says)
    assert all(text.endswith(end) for text, end in zip(found, says, strict=True))


def test_invalid_options_are_refused_before_ranks_start():
    with pytest.raises(UsageError, match="ranks 2 or more"):
        recorder.measure(recorder.options("cpu", ranks=1))

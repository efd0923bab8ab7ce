"""`bench codecs`: every registered codec gets a row, the page is self-contained, the rows follow from the times."""

import importlib.util
import json

import pytest
import torch

from syncline import codecs
from syncline.bench.codecs import operators, run, speed, table
from syncline.bench.output import Countdown
from syncline.bench.timing import summarize
from syncline.errors import UsageError
from syncline.report.figures import tabulate, text_table
from syncline.train.rank.join import check_device

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def result():
    return speed.measure(CPU, shapes=((64, 64), (128, 128)), budget_s=0.01, error_steps=(1, 100))


def test_every_codec_has_a_row_of_every_size(result):
    rows = result["rows"]
    assert len(rows) == 2 * len(codecs.available())
    for row in rows:
        assert row["wire_ratio"] > 0
        assert row["encode_ms"]["median"] > 0
        assert row["encode_ms"]["low"] <= row["encode_ms"]["median"] <= row["encode_ms"]["high"]
        assert row["encode_of_copy"] == pytest.approx(row["copy_ms"]["median"] / row["encode_ms"]["median"])
        assert row["issue_ms"]["median"] > 0
        assert row["step_of_copy_speed"] == pytest.approx(row["step_of_copy"] * row["least_bytes"] / 2 / row["bytes"])
    assert json.loads(json.dumps(result)) == result


def test_the_fewest_bytes_of_a_step():
    n = 128 * 128
    for spec, size in {"none": 16 * n, "bf16": 12 * n, "int8": 16 * n + 2 * (n + n // 64), "tbq": 16.5 * n + 8}.items():
        assert speed.least_bytes(codecs.build(spec), (128, 128)) == size, spec


def test_feedback_makes_the_error_shrink(result):
    by_name = {row["codec"]: row["error"] for row in result["rows"]}
    for name in ("onebit", "int8", "topk", "powersgd"):
        assert by_name[name]["100"] < by_name[name]["1"], name
    assert by_name["none"] == {"1": 0, "100": 0}


def test_page_is_one_file_with_a_line_for_each_codec(result):
    page = table.page(result)
    assert "://" not in page.replace("http://www.w3.org", "")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    # A codec that does nothing would only stretch the axis.
    assert [run["label"] for run in data["runs"]] == [name for name in speed.specs() if name != "none"]
    for plot in data["plots"]:
        assert len(plot["series"]) == len(data["runs"])
        assert all(len(line["points"]) == 2 for line in plot["series"])
    assert "data-chart" not in table.page(result | {"rows": []}).partition("<script")[0]


def test_tables(result):
    text = text_table(*tabulate(table.COLUMNS, result["rows"]))
    assert len({len(line) for line in text.splitlines()[1:]}) == 1
    assert table.console_table(result).row_count == len(result["rows"])


def test_command_writes_json_and_page(tmp_path, capsys, monkeypatch):
    out = tmp_path / "made" / "bench.json"
    arguments = ["--device", "cpu", "--counts", "5000", "--budget", "0.005", "--codecs", "onebit"]
    monkeypatch.setattr(speed, "SHAPES", ((16, 16),))
    assert run.main([*arguments, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {row["codec"] for row in written["rows"]} == {"onebit"}
    assert {row["operator"] for row in written["operators"]} >= {"sign encode", "int8 decode", "topk encode"}
    assert out.with_suffix(".html").exists()
    assert "fused/plain" in capsys.readouterr().out


def test_command_measures_only_what_is_asked_for(tmp_path):
    out = tmp_path / "bench.json"
    arguments = ["--device", "cpu", "--counts", "", "--shapes", "16x16,8x32", "--budget", "0.005", "--codecs", "int8"]
    assert run.main([*arguments, "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [row["shape"] for row in written["rows"]] == [[16, 16], [8, 32]]
    assert written["operators"] == []


def test_operator_rows_follow_from_their_times():
    for row in operators.speed(CPU, 5000, budget_s=0.002):
        assert row["of_copy_time"] == pytest.approx(row["copy_ms"]["median"] / row["fused_ms"]["median"])


def test_summary_of_times():
    timing = summarize([4.0, 1.0, 2.0, 3.0, 5.0])
    assert timing == {"median": 3, "low": 2, "high": 4, "repetitions": 5, "issue": None}
    assert summarize([2.0])["median"] == 2


@pytest.mark.parametrize("name", ["codecs", "overhead", "recorder"])
def test_the_commands_in_result_files_exist(name):
    assert importlib.util.find_spec(f"syncline.bench.{name}.__main__") is not None


def test_progress_is_a_line_every_few_seconds_with_the_time_that_is_left(monkeypatch):
    now = iter([0.0, 1.0, 6.0, 8.0, 12.0, 20.0])
    monkeypatch.setattr("syncline.bench.output.time.monotonic", lambda: next(now))
    said = []
    work = Countdown(5, said.append)
    for part in range(5):
        work.part_done(f"part {part}")
    assert said == ["part 1; about 10 s left", "part 3; about 10 s left"]


def test_every_codec_and_size_is_a_part_of_the_progress(monkeypatch):
    parts = []
    monkeypatch.setattr(Countdown, "part_done", lambda self, what: parts.append(what))
    speed.measure(CPU, names=["int8", "bf16"], shapes=((64, 64),), budget_s=0.001, error_steps=(1,))
    assert parts == ["int8, tensors of 0.0164 MB", "bf16, tensors of 0.0164 MB"]


def test_a_missing_gpu_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "there is no device 'cuda' here (torch" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"unknown device 'gpu': use --device cpu or --device cuda"):
        check_device("gpu", option="--device ")

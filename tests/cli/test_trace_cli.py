"""`syncline trace export`, in this process; the run is made by the command line itself."""

import gzip
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import call

from syncline.cli.main import main
from syncline.trace import Span
from syncline.trace.clocks import Clock
from syncline.trace.export import write_chrome_trace
from syncline.trace.merge import Part
from syncline.trace.rankfile import file_name, write_part

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from chrome_checker import check

SPANS = [
    Span(0, "step", "step", "", 0, 0, 100),
    Span(0, "exchange", "all-reduce", "w", 0, 10, 90, 800),
    Span(1, "exchange", "all-reduce", "w", 0, 50, 90, 800),
]


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", "trace", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield run
    signal.signal(signal.SIGTERM, handler)


def load(path):
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if str(path).endswith(".gz") else data)


def test_a_run_is_exported_in_both_styles(tmp_path, invoke):
    model = ("--model", "mlp(hidden=8)", "--batch", "8", "--steps", "3", "--set", "train.test_samples=0")
    # In a folder of its own: what is left of a command is found by where it runs.
    (tmp_path / "job").mkdir()
    done = call("train", "--strategy", "syncline(bf16)", *model, "--nproc", "2", "--out", "run", cwd=tmp_path / "job")
    assert done.code == 0, done.err
    told = json.loads(invoke("export", "job/run", "--json").out)
    folder = tmp_path / "job" / "run" / "runs" / "syncline-bf16"
    assert Path(told["file"]) == Path("job/run/runs/syncline-bf16/trace.chrome.json.gz")
    assert (told["ranks"], told["steps"], told["notes"], told["clock_error_ns"]) == ([0, 1], [0, 2], [], 0)
    written = load(told["file"])
    assert len(written["traceEvents"]) == told["events"]
    assert len(check(written)) == told["tracks"]
    assert written == load(folder / "trace.json.gz"), "nothing is lost on the way"
    assert {"C", "X", "M"} <= {event["ph"] for event in written["traceEvents"]}
    shown = invoke("export", "job/run", "--style", "horovod", "-o", "timeline.json")
    assert (shown.code, shown.err) == (0, "")
    assert "trace: timeline.json" in shown.out
    rows = check(load("timeline.json"))
    names = {name for slices in rows.values() for _, _, name in slices}
    assert {"ALLREDUCE", "GLOO_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"} <= names
    assert sum(event["ph"] == "i" for event in load("timeline.json")) == 3


def test_files_of_ranks_are_merged_and_what_is_missing_is_said(tmp_path, invoke):
    (tmp_path / "spans").mkdir()
    write_part(Part(0, SPANS[:2], "a", Clock()), tmp_path / "spans", world_size=3)
    write_part(Part(1, SPANS[2:], "b", Clock(error=5.0)), tmp_path / "spans", world_size=3)
    done = invoke("export", "spans")
    assert done.code == 0, done.err
    assert f"note: {file_name(2)} is missing: rank 2 is left out" in done.out
    check(load("spans/trace.chrome.json.gz"))
    again = json.loads(invoke("export", "spans/trace.chrome.json.gz", "-o", "again.json", "--json").out)
    assert (again["spans"], again["arrows"], again["clock_error_ns"]) == (4, 1, 5.0)
    assert again["notes"] == [f"{file_name(2)} is missing: rank 2 is left out"]


def test_a_backend_that_is_not_known_is_said(tmp_path, invoke):
    write_chrome_trace(SPANS, tmp_path / "trace.json.gz")
    told = json.loads(invoke("export", ".", "--style", "horovod", "--json").out)
    assert told["notes"] == ["the trace does not name its backend: transfers are written as GLOO's"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("exprt", "run"), "did you mean 'export'"),
        (("export", "nowhere"), "there is no 'nowhere'"),
        (("export", "empty"), "empty holds no trace"),
        (("export", "several"), "holds the traces of 2 runs: name one, such as several/runs/a"),
        (("export", "trace.json.gz", "--style", "chrom"), "did you mean 'chrome'"),
        (("export", "trace.json.gz", "-o", "trace.json.gz"), "is the trace itself"),
        (("export", "trace.json.gz", "-o", "empty"), "is a folder"),
        (("export", "trace.json.gz", "-o", "none/there.json"), "cannot write none/there.json"),
        (("export", "text"), "is no trace"),
        (("export", "other.json"), "is no trace of torch.profiler, horovod, syncline"),
        (("export", "broken"), "no spans of ranks that can be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, invoke, args, message):
    write_chrome_trace(SPANS, tmp_path / "trace.json.gz")
    for name in ("empty", "several/runs/a", "several/runs/b", "broken"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a", "b"):
        write_chrome_trace(SPANS, tmp_path / "several" / "runs" / name / "trace.json.gz")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken" / file_name(0)).write_bytes(b"no gzip")
    done = invoke(*args)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1

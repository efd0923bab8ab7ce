"""`syncline trace export` and the other actions on bad input, in this process; a run is made by the command line."""

import gzip
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import call

from syncline.cli.main import main
from syncline.cli.output import print_json
from syncline.trace import Span, Trace
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge_ranks import Part
from syncline.trace.merge.rank_file import rank_file_name, write_rank_file

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
import diff_traces
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
    done = call(
        "train",
        "--strategy",
        "syncline(powersgd(rank=2))",
        *model,
        "--nproc",
        "2",
        "--out",
        "run",
        cwd=tmp_path / "job",
    )
    assert done.code == 0, done.err
    told = json.loads(invoke("export", "job/run", "--json").out)
    folder = tmp_path / "job" / "run" / "runs" / "syncline-powersgd-rank-2"
    assert Path(told["file"]) == Path("job/run/runs/syncline-powersgd-rank-2/trace.chrome.json.gz")
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
    write_rank_file(Part(0, SPANS[:2], "a", Clock()), tmp_path / "spans", world_size=3)
    write_rank_file(Part(1, SPANS[2:], "b", Clock(error=5.0)), tmp_path / "spans", world_size=3)
    done = invoke("export", "spans")
    assert done.code == 0, done.err
    assert f"note: {rank_file_name(2)} is missing: rank 2 is left out" in done.out
    check(load("spans/trace.chrome.json.gz"))
    again = json.loads(invoke("export", "spans/trace.chrome.json.gz", "-o", "again.json", "--json").out)
    assert (again["spans"], again["arrows"], again["clock_error_ns"]) == (4, 1, 5.0)
    assert again["notes"] == [f"{rank_file_name(2)} is missing: rank 2 is left out"]


def test_a_backend_that_is_not_known_is_said(tmp_path, invoke):
    write_chrome_trace(Trace.of(SPANS, split=False), tmp_path / "trace.json.gz")
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
        (("export", "text"), "is not a trace"),
        (("export", "other.json"), "is not a trace of torch.profiler, horovod, syncline"),
        (("export", "broken"), "no rank file that can be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, invoke, args, message):
    write_chrome_trace(Trace.of(SPANS, split=False), tmp_path / "trace.json.gz")
    for name in ("empty", "several/runs/a", "several/runs/b", "broken"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a", "b"):
        write_chrome_trace(Trace.of(SPANS, split=False), tmp_path / "several" / "runs" / name / "trace.json.gz")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken" / rank_file_name(0)).write_bytes(b"no gzip")
    done = invoke(*args)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


COMMANDS = {"analyze": (), "view": ("-o", "page.html"), "export": ("-o", "out.json")}
"""Actions that take one trace, and options so that they write beside nothing."""


@pytest.fixture
def simulate(monkeypatch, capfd, invoke):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", "simulate", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    return run


def several(folder, **options):
    """A run folder with three runs, the second without anything in its trace."""
    for name in "abc":
        (folder / "runs" / name).mkdir(parents=True)
        write_chrome_trace(
            Trace.of(diff_traces.trace(**options), split=False), folder / "runs" / name / "trace.json.gz"
        )
    (folder / "runs" / "b" / "trace.json.gz").write_bytes(b"")


def test_what_may_not_be_read_is_one_line(tmp_path, invoke, simulate, monkeypatch):
    """Whoever runs the tests may read everything, so the system's answer is made up."""
    (tmp_path / "secret").mkdir()

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("is_file", "is_dir", "iterdir"):
        monkeypatch.setattr(Path, name, refuse)
    for done in (*(invoke(action, "secret", *more) for action, more in COMMANDS.items()), simulate("secret")):
        assert done.code == 2
        assert done.err.startswith("syncline: '")
        assert done.err.endswith("Permission denied\n")
        assert len(done.err.splitlines()) == 1


def test_names_that_are_too_long_are_one_line(tmp_path, invoke, simulate):
    long = "x" * 300
    write_chrome_trace(Trace.of(diff_traces.trace(), split=False), tmp_path / "trace.json.gz")
    found = [invoke(action, long, *more) for action, more in COMMANDS.items()]
    found += [invoke(action, "trace.json.gz", "-o", long) for action in ("view", "export")]
    found += [invoke("diff", "trace.json.gz", long), simulate(long)]
    for done in found:
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert "File name too long" in done.err


def test_an_error_that_is_not_the_users_is_not_hidden(tmp_path, invoke, monkeypatch):
    def broken(*args, **kwargs):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("syncline.cli.trace.export.load", broken)
    monkeypatch.setattr(sys, "argv", ["syncline", "trace", "export", "x"])
    with pytest.raises(ConnectionResetError):
        main()


@pytest.mark.timeout(60)
def test_a_pipe_among_ranks_files_is_not_waited_for(tmp_path, invoke):
    (tmp_path / "spans").mkdir()
    os.mkfifo(tmp_path / "spans" / rank_file_name(0))
    done = invoke("analyze", "spans")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert f"{rank_file_name(0)} cannot be read (it is not a regular file)" in done.err
    write_rank_file(Part(1, SPANS[2:], "b", Clock()), tmp_path / "spans", world_size=2)
    assert (
        f"note: {rank_file_name(0)} cannot be read (it is not a regular file): rank 0 is left out"
        in invoke("export", "spans").out
    )


def test_names_in_a_trace_reach_no_terminal_as_they_are(tmp_path, invoke, simulate):
    evil = "\x1b[2J\x1b]0;evil\x07\udcff\nverdict: fine"
    about = {"strategy": evil, "world_size": 2, "notes": [evil]}
    write_chrome_trace(
        Trace.of(diff_traces.trace(units=(evil, "b")), metadata=about, split=False), tmp_path / "trace.json.gz"
    )
    found = [invoke(action, "trace.json.gz", *more) for action, more in COMMANDS.items()]
    found += [invoke("diff", "trace.json.gz", "trace.json.gz"), simulate("trace.json.gz")]
    for done in found:
        assert (done.code, done.err) == (0, "")
        assert not set("\x1b\x07\udcff") & set(done.out)
    assert "\nverdict: fine" not in found[0].out
    refused = invoke("analyze", "no\x1b[2Jwhere")
    assert (refused.code, "\x1b" in refused.err) == (2, False)


def test_one_bad_run_does_not_stop_the_others(tmp_path, invoke):
    several(tmp_path)
    done = invoke("analyze", ".")
    assert (done.code, done.err) == (0, "")
    assert "note: b is left out: " in done.out
    told = json.loads(invoke("analyze", ".", "--json").out)
    assert [row["source"] for row in told["runs"]] == ["runs/a/trace.json.gz", "runs/c/trace.json.gz"]
    assert told["notes"][0].startswith("b is left out: ")
    shown = invoke("view", ".")
    assert (shown.code, shown.err) == (0, "")
    assert "note: b is left out: " in shown.out
    text = (tmp_path / "timeline.html").read_text()
    assert "b is left out: " in text
    assert text.count('id="trace-') == 2
    for name in "ac":
        (tmp_path / "runs" / name / "trace.json.gz").write_bytes(b"")
    for action in ("analyze", "view"):
        done = invoke(action, ".")
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert "none of the 3 runs" in done.err


def test_results_of_something_else_do_not_stop_an_analysis(tmp_path, invoke):
    for place in ("out/today", "runs/ddp"):
        (tmp_path / place).mkdir(parents=True)
        write_chrome_trace(Trace.of(diff_traces.trace(), split=False), tmp_path / place / "trace.json.gz")
    (tmp_path / "results.json").write_text('{"accuracy": 0.9}')
    elsewhere, beside = (invoke("analyze", f"{place}/trace.json.gz") for place in ("out/today", "runs/ddp"))
    assert (elsewhere.code, elsewhere.err, "results" in elsewhere.out) == (0, "", False)
    assert (beside.code, beside.err) == (0, "")
    assert "note: the run's results are not used: " in beside.out


def test_json_has_no_numbers_that_json_does_not_have(capsys):
    print_json({"a": [float("inf"), float("nan"), 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5]}

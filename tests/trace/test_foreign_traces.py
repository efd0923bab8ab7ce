"""Traces of other tools: loaded, analysed and exported; their overlap against an independent computation."""

import json
import shutil
import signal
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from analysis_spans import steps
from chrome_checker import check
from trace_files import GLOO, HOROVOD, NCCL, device_work, hidden_share, host, kineto

from syncline.cli.main import main
from syncline.trace import Trace
from syncline.trace.analysis.analyze import analyze
from syncline.trace.analysis.timeline import partition
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.load import load

COMPUTE = {"forward", "backward", "update"}
MADE = [("data", 30), ("forward", 20), ("backward", 40), ("exchange", 9, "w", 100_000), ("update", 4)]


@pytest.fixture
def gloo(tmp_path):
    """A folder of ranks, as a profiler leaves it."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for path in GLOO:
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", "trace", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield run
    signal.signal(signal.SIGTERM, handler)


def microseconds(spans, lanes):
    return {time for s in spans if s.lane in lanes for time in range(s.start // 1000, s.end // 1000)}


def test_overlap_of_a_folder_of_profiles_equals_that_of_intervals(gloo):
    source = load(gloo)
    assert source.metadata.keys() == {"imported", "world_size", "nodes", "operators"}
    assert (source.metadata["world_size"], source.metadata["nodes"]) == (2, {"0": "vm", "1": "vm"})
    assert any(span.lane == "wait" for span in source.spans), "waits are split off"
    told = analyze(source)
    assert (told.steps, told.world_size, told.imported) == ((3, 4, 5), 2, "torch.profiler")
    shares = []
    for rank in (0, 1):
        mine = [span for span in source.spans if span.rank == rank]
        moving = microseconds(mine, {"exchange"})
        shares.append(len(moving & microseconds(mine, COMPUTE)) / len(moving))
    assert told.communication == pytest.approx(sum(shares) / 2, abs=0.01)
    for row in told.ranks:
        assert sum(row.breakdown_ms.values()) == pytest.approx(row.step_ms["mean"])
        lasted = microseconds([s for s in source.spans if s.rank == row.rank], {"step"})
        covered = microseconds([s for s in source.spans if s.rank == row.rank], COMPUTE) & lasted
        found = sum(row.breakdown_ms[phase] for phase in COMPUTE) * 3000
        assert found == pytest.approx(len(covered), rel=0.01)
    assert {unit.unit for unit in told.units} == {"collective 0", "collective 1", "collective 2"}
    assert told.bound.compute_ms < told.step_ms["median"]


def test_overlap_of_a_folder_of_nccl_profiles_equals_that_of_kernels(tmp_path):
    for path in NCCL:
        shutil.copy(path, tmp_path)
    source = load(tmp_path)
    assert (source.metadata["imported"], source.metadata["world_size"]) == ("torch.profiler", 2)
    assert list(source.metadata["gpu"]) == ["0", "1"]
    assert any(span.lane == "wait" for span in source.spans), "waits are split off"
    told = analyze(source)
    assert (told.steps, told.steady_first, told.world_size) == ((3, 4, 5), 3, 2)
    assert told.communication == pytest.approx(_without_waits(), rel=0.001)
    for rank in (0, 1):
        mine = [span for span in source.spans if span.rank == rank]
        lasted = {s.step: s.end - s.start for s in mine if s.lane == "step"}
        assert {step: sum(phases.values()) for step, phases in partition(mine).items()} == lasted, "to the nanosecond"
        assert sum(told.ranks[rank].breakdown_ms.values()) * 3e6 == pytest.approx(sum(lasted.values()), rel=1e-12)
    # 3 MB a step through sockets, which a small model's 0.3 ms of kernels cannot hide.
    assert told.verdict.kind == "bandwidth-bound"
    assert "3.17 MB per step in 3 messages" in told.verdict.sentence
    assert told.verdict.sentence.endswith(f" while they move, {told.communication:.0%} hidden."), "one figure, not two"
    exposed = sum(rank.breakdown_ms["exposed_exchange"] for rank in told.ranks) / 2
    assert told.verdict.recoverable_ms == pytest.approx(exposed, rel=0.1)


def _without_waits():
    """From the files: clocks set by the kernels' ends, a transfer from where the later of a pair starts on."""
    (first, first_work), (second, second_work) = map(device_work, NCCL)
    apart = median(b[1] - a[1] for a, b in zip(first, second, strict=True))
    pairs = list(zip(first, second, strict=True))
    mine = [(max(a[0], b[0] - apart), a[1]) for a, b in pairs]
    theirs = [(max(b[0], a[0] + apart), b[1]) for a, b in pairs]
    return (hidden_share(mine, first_work) + hidden_share(theirs, second_work)) / 2


def test_a_single_profile_is_one_rank(gloo):
    told = analyze(load(gloo / GLOO[1].name))
    assert [rank.rank for rank in told.ranks] == [1]
    assert told.late == ()


def test_a_horovod_timeline_names_the_late_rank_and_unknown_figures():
    source = load(HOROVOD)
    told = analyze(source)
    assert told.late[0].rank == 1
    assert told.late[0].doing is None
    # 700 us late with the second tensor, of which 70 us are under a transfer of another one.
    late = next(finding for finding in told.findings if finding.kind == "straggler")
    assert late.recoverable_ms == pytest.approx(0.63)
    assert "does not show what it was doing" in late.sentence
    # Rank 1 has no transfers in it, and is not taken to have some of no length.
    assert told.verdict.kind == "bandwidth-bound"
    assert told.verdict.recoverable_ms == pytest.approx(0.73)
    assert (told.communication, told.bound.compute_ms, told.bound.distance) == (None, None, None)
    assert any("no compute" in note for note in told.notes)


def test_ranks_without_common_collectives_are_not_compared(tmp_path):
    for rank in (0, 1):
        events = [host(f"ProfilerStep#{n}", 1000 * n, 1000 * n + 900, cat="user_annotation") for n in range(4)]
        events += [host("aten::mm", 1000 * n + 10, 1000 * n + 700) for n in range(4)]
        kineto(tmp_path / f"rank{rank}.json", events, rank=rank, world=2, host=str(rank))
    source = load(tmp_path)
    assert source.notes[-1].startswith("not all ranks' clocks could be compared")


@pytest.mark.parametrize("what", ["gloo", "horovod"])
@pytest.mark.parametrize("style", ["chrome", "horovod"])
def test_traces_of_other_tools_are_exported(what, style, gloo, invoke):
    done = invoke("export", gloo if what == "gloo" else HOROVOD, "--style", style, "-o", "out.json", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["ranks"] == [0, 1]
    check(json.loads(Path("out.json").read_text()))


def test_the_command_shows_a_verdict_first(gloo, invoke):
    done = invoke("analyze", gloo)
    assert (done.code, done.err) == (0, "")
    assert done.out.index("verdict: ") < done.out.index("ms per step, mean") < done.out.index("units by exposed time")
    for word in ("late: rank 1", "start-up:", "critical path of step 4", "bound: ", "note: ranks 0-1 ran on"):
        assert word in done.out
    told = json.loads(invoke("analyze", gloo, "--json", "--steps", "4:").out)
    assert told["steps"] == {"first": 4, "last": 5, "count": 2, "steady_first": 4, "usual": 2}
    assert told["source"] == str(gloo)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_it_fits_a_narrow_terminal(width, tmp_path, invoke, monkeypatch):
    write_chrome_trace(
        Trace.of(steps(8, MADE, MADE), metadata={"strategy": "[red]x[/red]"}), tmp_path / "trace.json.gz"
    )
    monkeypatch.setenv("COLUMNS", str(width))
    shown = invoke("analyze", "trace.json.gz").out
    tables = [line for line in shown.splitlines() if "─" in line or line.startswith(" ")]
    assert max(map(len, tables)) <= width
    assert "…" not in shown
    assert "[red]x[/red]" in shown, "names are text"
    assert "input-bound" in shown


def test_several_runs_are_summarised_and_one_can_be_chosen(tmp_path, invoke):
    for name in ("a", "b"):
        folder = tmp_path / "run" / "runs" / name
        folder.mkdir(parents=True)
        made = [*MADE[:2], ("backward", 80 if name == "b" else 40), *MADE[3:]]
        write_chrome_trace(Trace.of(steps(6, made, made), metadata={"strategy": name}), folder / "trace.json.gz")
    shown = invoke("analyze", "run").out
    assert "--run a" in shown
    assert shown.count("input-bound") == 2
    told = json.loads(invoke("analyze", "run", "--json").out)
    assert ([run["strategy"] for run in told["runs"]], told["scaling"]) == (["a", "b"], [])
    assert json.loads(invoke("analyze", "run", "--run", "b", "--json").out) == told["runs"][1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "there is no 'nowhere'"),
        (("empty",), "empty holds no trace"),
        (("text",), "is not a trace"),
        (("trace.json.gz", "--steps", "x"), "--steps takes two numbers with a colon"),
        (("trace.json.gz", "--steps", "5:5"), "holds no step"),
        (("trace.json.gz", "--steps", "99:"), "holds no steps"),
        (("trace.json.gz", "--top", "0"), "--top must be at least 1"),
        (("run", "--run", "aa"), "did you mean 'a'?"),
        (("trace.json.gz", "--run", "a"), "is one trace"),
    ],
)
def test_bad_input_is_one_line(args, message, tmp_path, invoke):
    write_chrome_trace(Trace.of(steps(4, MADE, MADE)), tmp_path / "trace.json.gz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "results.json").write_text("{}")
    (tmp_path / "text").write_text("hello")
    folder = tmp_path / "run" / "runs" / "a"
    folder.mkdir(parents=True)
    write_chrome_trace(Trace.of(steps(4, MADE, MADE)), folder / "trace.json.gz")
    done = invoke("analyze", *args)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_folder_with_one_syncline_trace_keeps_its_metadata(tmp_path):
    write_chrome_trace(
        Trace.of(steps(4, MADE, MADE), metadata={"strategy": "s", "notes": ["odd"]}),
        tmp_path / "mine.json",
    )
    source = load(tmp_path)
    assert source.metadata["strategy"] == "s"
    assert source.notes == ("odd",)

"""The table of phases while a run goes on: what it shows, what it costs, and how it looks in a terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
import time
from types import SimpleNamespace

import pytest
from command import PATHS, SYNCLINE
from forked import call
from rich.console import Console

from syncline.cli.progress import STEPS, Bars, Lines, Phases
from syncline.trace import Recorder
from syncline.train.rank import step_log
from syncline.train.rank.step_log import LIVE_PHASES, LivePhases

RUN = SimpleNamespace(strategy="ddp", workers=2, servers=0, train=SimpleNamespace(steps=40, epochs=1))


def phases(**ms):
    return dict.fromkeys(LIVE_PHASES, 0.0) | {name.replace("_", " "): value for name, value in ms.items()}


def message(step, **ranks):
    told = {int(name[1:]): row for name, row in ranks.items()}
    return {"step": step, "loss": 1.5, "epoch": 1, "step_ms": 20.0, "phases": told.get(0), "ranks": told}


def shown(table, width, *, colours=True):
    console = Console(file=io.StringIO(), width=width, force_terminal=colours, color_system="256" if colours else None)
    console.print(table)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("colours", [True, False])
def test_a_row_a_rank_that_fits(width, colours):
    seen = Phases()
    slow = phases(data=1234.5, forward=1000, backward=2100, encode=0.4, exchange_and_wait=100, update=30, other=3)
    for step in range(3):
        seen.add(message(step, r0=slow, r1=slow | {"forward": 2000.0}))
    lines = shown(seen.table(width=width, colours=colours), width, colours=colours)
    assert len(lines) == 4, lines
    assert max(map(len, lines)) <= width
    assert "exchange" in lines[0]
    assert lines[1].split()[:3] == ["ms", "per", "step"]
    assert lines[3].startswith("rank 1")
    for figure in ("5467.9", "1234.5", "2000.0", "2100.0", *(("100.0", "30.0", "3.0") if width >= 80 else ())):
        assert figure in lines[3]
    bar = lines[3].rstrip()[-1]
    assert bar in "█0" if colours else bar in "dfbexu.0"


def test_empty_phases_have_no_column_and_the_longest_step_the_longest_bar():
    seen = Phases()
    seen.add(message(0, r0=phases(forward=10.0), r1=phases(forward=5.0, exchange_and_wait=5.0)))
    table = shown(seen.table(width=100, colours=False), 100, colours=False)
    assert "encode" not in table[1]
    assert table[2].count("f") == table[3].count("f") + table[3].count("x") > 20
    assert table[3].count("f") == table[3].count("x")
    assert Phases().table(width=80, colours=True) is None


def test_the_last_steps_count():
    seen = Phases()
    for step in range(STEPS + 5):
        seen.add(message(step, r0=phases(forward=1000.0 if step < 5 else 8.0, backward=12.0)))
    assert seen.means() == {0: phases(forward=8.0, backward=12.0)}
    assert seen.words(80) == "backward 60%, forward 40%"


def test_of_many_ranks_the_mean_and_the_one_that_waits_least():
    seen = Phases()
    rows = {
        f"r{rank}": phases(forward=20.0 + (rank == 5), exchange_and_wait=9.0 - 3 * (rank == 5)) for rank in range(12)
    }
    seen.add(message(0, **rows))
    table = shown(seen.table(width=80, colours=True), 80)
    assert [line.split("  ")[0] for line in table[2:]] == ["mean", "rank 5 waits least"] or table[3].startswith(
        "rank 5"
    )
    assert len(table) == 4


def test_under_a_launcher_there_is_one_rank():
    seen = Phases()
    seen.add({"step": 0, "phases": phases(forward=1.0)})
    seen.add({"step": 1, "phases": None})
    assert list(seen.means()) == [0]


def test_lines_say_it_every_twentieth_step_if_it_fits():
    def lines(width):
        watch = Lines(Console(file=io.StringIO(), width=width))
        watch.begin(RUN)
        for step in range(40):
            watch.step(message(step, r0=phases(forward=5.0, backward=10.0, exchange_and_wait=5.0)))
        return watch.console.file.getvalue().splitlines()

    assert lines(100)[1:] == [
        "  step 1: loss 1.5000, 20.0 ms",
        "  step 20: loss 1.5000, 20.0 ms, backward 50%, forward 25%, exchange and wait 25%",
        "  step 40: loss 1.5000, 20.0 ms, backward 50%, forward 25%, exchange and wait 25%",
    ]
    assert lines(50)[2] == "  step 20: loss 1.5000, 20.0 ms, backward 50%"
    assert lines(40)[2] == "  step 20: loss 1.5000, 20.0 ms"


def test_slow_steps_are_shown_every_half_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("syncline.cli.progress.time.monotonic", lambda: now[0])
    watch = Lines(Console(file=io.StringIO(), width=100))
    watch.begin(RUN)
    for step in range(6):
        now[0] += 14.0
        watch.step(message(step, r0=phases(forward=14000)))
    lines = watch.console.file.getvalue().splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ["  step 1", "  step 4"]


def test_bars_show_the_table_while_a_run_goes_on():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    watch = Bars(console)
    watch.begin(RUN)
    watch.step(message(0, r0=phases(forward=5.0, backward=10.0), r1=phases(forward=6.0, backward=9.0)))
    watch.live.refresh()
    watch.note("something")
    assert "rank 1" in console.file.getvalue()
    watch.end(RUN, {"status": "crashed", "error": {"rank": 1, "summary": "gone"}})
    before = len(console.file.getvalue())
    watch.close()
    assert "rank 1: gone" in console.file.getvalue()[before:]
    assert "backward" not in console.file.getvalue()[before:], "the table is not left behind"


def filed(recorder, step, start, *, spans=20):
    recorder.step = step
    for n in range(spans):
        at = start + n * 1_000_000
        recorder.add("exchange" if n % 2 else "forward", "x", at, at + 900_000, unit="u" if n % 2 else "")
    recorder.add("step", "step", start, start + spans * 1_000_000)


def test_a_message_holds_the_whole_step():
    recorder = Recorder()
    filed(recorder, 0, 0)
    recorder.add("exchange", "late", 19_000_000, 26_000_000, unit="w", step=0)  # into the next step
    filed(recorder, 1, 20_000_000)
    recorder.add_blocked(39_950_000, 40_000_000)
    told = LivePhases().compute(recorder, [0, 1])
    assert list(told) == [0, 1]
    assert set(told[1]) == set(LIVE_PHASES)
    for row in told.values():
        assert sum(row.values()) == pytest.approx(20.0)
    assert told[1]["forward"] == pytest.approx(9.0)
    assert told[1]["exchange and wait"] == pytest.approx(9.0 + 0.6 + 0.05, abs=1e-3)


def test_looking_costs_less_than_its_share(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(step_log, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    spans = lambda first: clock.__setitem__(0, clock[0] + 0.0005) or []  # noqa: E731
    recorder = SimpleNamespace(spans=spans, device=SimpleNamespace(type="cpu"))
    watch, spent, looks = LivePhases(), 0.0, 0
    for step in range(2000):
        clock[0] += 0.02
        before = clock[0]
        watch.compute(recorder, [step])
        spent += clock[0] - before
        looks += clock[0] > before
    assert 200 < looks < 300
    assert spent <= step_log.LIVE_COST * clock[0] + 0.003


def test_messages_of_all_ranks_arrive(tmp_path):
    model = ("--model", "mlp(hidden=8)", "--batch", "8", "--steps", "20", "--set", "train.test_samples=0")
    done = call("train", "--strategy", "all-reduce", *model, "--nproc", "2", "--out", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert re.search(r"step 20: loss [\d.]+, [\d.]+ ms, .*\d%", done.out), done.out


def test_a_terminal_shows_the_table(tmp_path):
    columns = 80
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "RANK", "WORLD_SIZE")}
    job = ["train", "--strategy", "all-reduce", "--model", "mlp(hidden=64)", "--batch", "16", "--nproc", "2"]
    job += ["--steps", "25", "--set", "train.test_samples=0", "--out", "run"]
    process = subprocess.Popen(
        [*SYNCLINE, *job], cwd=tmp_path, stdin=child, stdout=child, stderr=child,
        env=variables | {"TERM": "xterm-256color", "PYTHONPATH": PATHS},
    )  # fmt: skip
    os.close(child)
    seen, deadline = b"", time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            more = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        seen += more
    os.close(parent)
    assert process.wait(20) == 0, seen.decode(errors="replace")[-3000:]
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", text).replace("\r", "\n")
    lines = [line for line in text.split("\n") if line.strip()]
    assert any(line.startswith("ms per step") and "forward" in line and "and wait" in line for line in lines), lines
    for rank in ("rank 0", "rank 1"):
        rows = [line for line in lines if line.startswith(rank) and re.search(r"\d\.\d", line)]
        assert rows, lines
        assert max(map(len, rows)) <= columns
    assert "report:" in text

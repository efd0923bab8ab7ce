"""`syncline trace view`: the page as a file and served, and what it says of bad input."""

import http.client
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked

from syncline.cli.main import main
from syncline.trace import Span
from syncline.trace.analysis.analyze import analyze
from syncline.trace.formats.load import load
from syncline.trace.merge.rank_file import rank_file_name

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
import trace_samples as traced

FIXTURES = Path(__file__).parents[1] / "trace" / "fixtures"


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address))
    opened = []

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", "trace", "view", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err, opened=opened)

    yield run
    signal.signal(signal.SIGTERM, handler)


def test_the_page_lies_beside_the_trace(tmp_path, invoke):
    traced.write(tmp_path, "ddp", traced.spans(), world=2)
    done = invoke(".")
    assert (done.code, done.err, done.opened) == (0, "", [])
    text = (tmp_path / "runs" / "ddp" / "timeline.html").read_text()
    assert "<title>ddp: timeline</title>" in text
    assert text.count('id="trace-') == 1
    assert invoke("runs/ddp", "-o", "one.html", "--steps", "1:2", "--open").opened == [(tmp_path / "one.html").as_uri()]
    data = re.search(r'id="trace-0">(.*?)</script>', (tmp_path / "one.html").read_text(), re.S)[1]
    assert {step for _, step, *_ in json.loads(data)["steps"]} == {1}
    traced.write(tmp_path, "ring", traced.spans(), world=2)
    assert "timeline: timeline.html" in invoke(".").out
    assert (tmp_path / "timeline.html").read_text().count('id="trace-') == 2, "all runs of the folder"


def test_chosen_steps_are_those_of_the_analysis(tmp_path, invoke):
    """The exchange and the update of a step end in the next one: they are there without the step itself."""
    made = []
    for rank in (0, 1):
        for step in range(12):
            at = step * 100 * traced.MS
            for lane, unit, begin, end in (
                ("step", "", 0, 100), ("update", "u", 40, 45), ("forward", "", 45, 60), ("backward", "", 60, 100)
            ):  # fmt: skip
                made.append(Span(rank, lane, lane, unit, step, at + begin * traced.MS, at + end * traced.MS))
            made.append(Span(rank, "exchange", "all-reduce", "u", step, at + 95 * traced.MS, at + 140 * traced.MS, 10))
    file = traced.write(tmp_path, "engine", made, world=2)
    assert invoke(file, "-o", "page.html", "--steps", "8:10").code == 0
    data = json.loads(re.search(r'id="trace-0">(.*?)</script>', (tmp_path / "page.html").read_text(), re.S)[1])
    source = load(file)
    told = analyze(source, steps=(8, 10))
    assert {step for _, step, *_ in data["steps"]} == {8, 9}
    assert [row[2:] for row in data["steps"]] == [
        [round(value, 4) for value in row["breakdown_ms"].values()] for row in told.per_step
    ]
    assert told.per_step[0]["breakdown_ms"]["exposed_exchange"] == pytest.approx(40)
    shown = sum(row[3] for row in data["spans"]["rows"])
    assert shown == 2 * (2 * 5 + 1), "the spans of two steps and the exchange of the one before"


def test_traces_of_others_are_shown(tmp_path, invoke):
    for name in ("horovod-timeline.json", "gloo-rank0.json.gz"):
        done = invoke(FIXTURES / name, "-o", "page.html")
        assert done.code == 0, done.err
        assert "timeline of" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "there is no 'nowhere'"),
        (("runs/ddp", "-o", "runs"), "is a folder"),
        (("runs/ddp", "-o", "runs/ddp/trace.json.gz"), "is the trace itself"),
        (("runs/ddp", "--serve", "-o", "x.html"), "--serve writes no file"),
        (("runs/ddp", "--port", "8000"), "--port is for --serve"),
        (("runs/ddp", "--serve", "--port", "70000"), "must be 0 to 65535"),
        (("runs/ddp", "--steps", "3"), "two numbers with a colon"),
        (("runs/ddp", "--steps", "30:"), "up to 3"),
        (("broken",), "no rank file that can be read"),
        (("text",), "text"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, invoke, args, message):
    traced.write(tmp_path, "ddp", traced.spans())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / rank_file_name(0)).write_bytes(b"no gzip")
    (tmp_path / "text").write_text("hello")
    done = invoke(*args)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_a_port_that_is_taken_is_said(tmp_path, invoke):
    traced.write(tmp_path, "ddp", traced.spans())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot serve on port {port}" in invoke("runs/ddp", "--serve", "--port", port).err


def test_it_is_served_on_loopback_until_interrupted(tmp_path):
    traced.write(tmp_path, "ddp", traced.spans())
    (tmp_path / "job").mkdir()
    command = Forked("trace", "view", tmp_path / "runs" / "ddp", "--serve", cwd=tmp_path / "job")
    try:
        command.wait_for("; Ctrl-C ends it")
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", Path(command._files[0].name).read_text())[1])

        def ask(path, *, method="GET", host="127.0.0.1"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request(method, path, headers={"Host": f"{host}:{port}"})
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer, text

        answer, text = ask("/")
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        assert "ddp: timeline" in text
        assert ask("/etc/passwd")[0].status == 404
        assert ask("/../../etc/passwd")[0].status == 404
        assert ask("/", method="POST")[0].status == 501
        assert ask("/", host="evil.example")[0].status == 403
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening
    finally:
        os.kill(command.process.pid, signal.SIGINT)
        command.finish(30)
    assert command.code == 0, command.err
    assert "ended" in command.out

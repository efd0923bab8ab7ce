"""Damaged and hostile flight-recorder dumps: one line that says what is wrong, exit code 2, and nothing is executed."""

import contextlib
import json
import os
import pickle
import pickletools
import struct
import sys
from pathlib import Path

import pytest
from flight_jobs import FLIGHT, Job
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.trace.analysis.flight import diagnose
from syncline.trace.formats import plain_pickle
from syncline.trace.formats.flight_read import dump_files, read_dumps

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from invoke import Invoke

REAL = (FLIGHT / "gloo-hang" / "comm_lib_trace_rank_0").read_bytes()


@pytest.fixture
def invoke(monkeypatch, capfd):
    return Invoke(monkeypatch, capfd)


class Shell:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _shell(protocol, folder):
    return pickle.dumps({"entries": [Shell(f"touch {folder}/executed")]}, protocol=protocol)


HOSTILE = {
    "os.system, protocol 2": lambda folder: _shell(2, folder),
    "os.system, protocol 4": lambda folder: _shell(4, folder),
    "a class": lambda _: pickle.dumps({"entries": [Path("x")]}, protocol=2),
    "INST": lambda folder: b"\x80\x02(S'touch " + str(folder).encode() + b"/executed'\nios\nsystem\n.",
    "an extension": lambda _: b"\x80\x02\x82\x01.",
    "BUILD": lambda _: b"\x80\x02}}b.",
    "a persistent id": lambda _: b"\x80\x02Px\n.",
    "a large memo": lambda _: b"\x80\x02}r\xff\xff\xff\xff.",
    "a long text that is not there": lambda _: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "an empty stack": lambda _: b"\x80\x02.",
    "cut off": lambda _: REAL[:-200],
    "bytes after its end": lambda _: REAL + b"x",
    "a list that holds itself": lambda _: b"\x80\x02]q\x00h\x00a.",
    "no entries": lambda _: pickle.dumps({"entries": 5, "version": "2.10"}, protocol=2),
    "entries of another kind": lambda _: pickle.dumps({"entries": [{}, 3]}, protocol=2),
    "JSON that is cut off": lambda _: b'{"entries": [{"collective_seq_id": 1',
    "JSON that nests": lambda _: b'{"entries": ' + b"[" * 100_000,
    "JSON of other bytes": lambda _: b'{"entries": "\xff"}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_one_line_and_exit_code_2(tmp_path, invoke, name):
    file = tmp_path / "comm_lib_trace_rank_0"
    file.write_bytes(HOSTILE[name](tmp_path))
    done = invoke("trace", "analyze", file)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert str(file) in done.err
    assert "record it again" in done.err
    assert not (tmp_path / "executed").exists()


def test_the_hostile_pickle_would_have_run(tmp_path):
    pickle.loads(_shell(2, tmp_path))
    assert (tmp_path / "executed").exists()


def test_a_damaged_dump_among_others_is_named_and_its_rank_is_not_blamed(tmp_path):
    job = Job().steps(2).call(ranks=[0, 2, 3], state="started").write(tmp_path)
    (tmp_path / "comm_lib_trace_rank_1").write_bytes(_shell(2, tmp_path))
    found = diagnose(read_dumps(dump_files(job)))
    assert any("comm_lib_trace_rank_1 is not a flight-recorder dump" in note for note in found.notes)
    assert found.culprits == ()
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("names", [("a", "b"), ("dump_1", "rank1")])
def test_files_that_do_not_say_whose_they_are(tmp_path, invoke, names):
    for name in names:
        (tmp_path / name).write_bytes(REAL)
    done = invoke("trace", "analyze", tmp_path)
    assert done.code == 2
    assert "rank" in done.err


def test_options_that_do_not_fit(tmp_path, invoke):
    done = invoke("trace", "analyze", FLIGHT / "gloo-hang", "--steps", "1:2")
    assert done.code == 2
    assert "leave out --steps" in done.err


def test_the_command_prints_the_verdict_first(invoke):
    done = invoke("trace", "analyze", FLIGHT / "gloo-hang")
    assert done.code == 0
    assert done.out.splitlines()[2].startswith("verdict: rank 2 never called all_reduce")
    assert "order of arrival is known" in " ".join(done.out.split())


def test_the_command_prints_json(invoke):
    done = invoke("trace", "analyze", FLIGHT / "gloo-hang", "--json")
    found = json.loads(done.out)
    assert (found["culprits"], found["backend"], found["world_size"]) == ([2], "gloo", 4)


def test_all_plain_values_are_read_as_pickle_writes_them():
    value = {
        "a": [1, -5, 1 << 40, 1.5, None, True, False, "text", "x" * 300],
        "b": (),
        "c": ((1,), (1, 2), (1, 2, 3, 4)),
    }
    for protocol in (2, 3, 4, 5):
        assert plain_pickle.loads(pickle.dumps(value, protocol=protocol)) == value


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changed_bytes_give_an_error_or_a_diagnosis(tmp_path_factory, data):
    changed = bytearray(REAL)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / "rank0"
    file.write_bytes(changed)
    with contextlib.suppress(UsageError):
        json.dumps(diagnose(read_dumps([file])).as_json("x"))


def test_the_opcodes_of_a_real_dump_are_few():
    assert {opcode.name for opcode, _, _ in pickletools.genops(REAL)} < plain_pickle.PLAIN

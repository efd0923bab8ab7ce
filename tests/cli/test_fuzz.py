"""Hundreds of wrong commands and mutated files, from a seed: no traceback, no hang, exit codes 0, 1 or 2.

Ranks are not started: a run whose input is accepted ends as if its first rank had crashed. `--full` runs many more.
"""

import gzip
import json
import os
import random
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from invoke import Invoke, time_limit

import report_samples
from syncline.bench import ranks as bench_ranks
from syncline.bench.codecs import speed
from syncline.cli import session
from syncline.errors import RankFailure
from syncline.train.config import Config
from syncline.train.session import local

FIXTURES = Path(__file__).parent / "fixtures" / "recorded"
TRACES = Path(__file__).parents[1] / "trace" / "fixtures"
LIMIT_S = 100.0
"""The longest time for one command on a busy machine; most of them take milliseconds."""

TRAIN = ("train", "--model", "mlp", "--nproc", "2", "--batch", "8", "--steps", "2", "--out", "out")
COMPARE = ("compare", "--strategies", "ddp,ring", "--scale", "1,2", "--model", "mlp", "--batch", "8", "--out", "out")
COMMANDS = [
    TRAIN,
    (*TRAIN, "--strategy", "syncline(powersgd(rank=4) | bf16)", "--set", "train.timeout_s=3", "--epochs", "2"),
    (*TRAIN, "--strategy", "server(servers=2)", "--seed", "3", "--checkpoint-every", "5"),
    (*TRAIN, "--strategy", 'syncline(file="plan.toml")', "--set", 'cluster.changes={20 = "100Mbit"}'),
    (*TRAIN, "--recipe", "recipe.toml", "--set", "train.optimizer='sgd(lr=0.1)'"),
    ("train", "--resume", "run", "--epochs", "9"),
    COMPARE,
    (*COMPARE, "--set", "compare.scale_batch=true", "--set", "train.batch=4"),
    ("plan", "--model", "mlp", "--nproc", "2", "--compress", "auto(int8, int4)", "--batch", "4"),
    ("plan", "run/runs/auto", "--bandwidth", "1Gbit", "--nodes", "4", "--out", "made.toml"),
    ("simulate", "run/runs/auto", "--bandwidth", "1Gbit", "--compress", "int8", "--json"),
    ("simulate", "run/runs/auto", "--sweep", "--nodes", "8"),
    ("simulate", "trace.json.gz", "--what", "no-straggler,2x,codec=int8"),
    ("report", "run", "--html", "page.html"),
    ("trace", "analyze", "trace.json.gz", "--steps", "1-3", "--json"),
    ("trace", "export", "trace.json.gz", "--out", "exported.json"),
    ("trace", "diff", "trace.json.gz", "trace.json.gz"),
    ("bench", "codecs", "--codecs", "int8", "--largest-mb", "0.00001", "--threads", "1"),
    ("bench", "overhead", "--steps", "0", "--threads", "1", "--seed", "1"),
    ("list", "codecs"),
]
SPECS = (
    "x(", "none", "powersgd(rank=1e999)", f"powersgd(rank={'9' * 5000})", "powersgd(rank=1000000000000)", "topk(nan)",
    "topk(1e-300)", "qsgd(levels=99999999999999999999)", "server(servers=1000000)", "server(part_mb=1e999)", "|",
    "hierarchical(node=0)", "hierarchical(node=10000000000)", "ddp(bucket_mb=1e999)", "ddp(bucket_mb=-1)",
    "int8 | int8", "mlp(hidden=0)", "mlp(hidden=1e999)",
    "syncline(workers=0)", "syncline(workers=1000000)", "syncline(sentinel=-1)",
    "syncline(" * 50, "syncline(auto(" + ",".join(["int8"] * 300) + "))", "warmup(int8, steps=-1)", "randomk(2)",
    "os:system('touch canary')", "subprocess:run", "hostile:net", "a:b:c", ":", "syncline(file=device)",
    "syncline(file=pipe.toml)", "server(servers=-1)", "tbq(1e400)", "syncline(compress=syncline)",
)  # fmt: skip
VALUES = (
    "", " ", "0", "-1", "1.5", "1e999", "nan", "-inf", "9" * 5000, "9" * 25, "0x" + "f" * 5000, "abc", "true", "None",
    "a" * 10_000, "\x00", "\N{SNOWMAN}", "\udcff", "\x1b[31m", "..", "/", "device", "pipe", "loop",
    "nowhere/at/all", "[" * 100_000, "{" * 3000, "[[[[[[]]]]]]", "{a = 1}", "1979-05-27", '"', "'", "=", "a=b", "a.b=1",
    "train.batch=abc", "train.batch=1e999", "train.batch=[1]", "train=1", "train.steps=" + "9" * 4500,
    "cluster.loss=nan", "cluster.latency=1e999", "compare.scale=[0]", "compare.strategies=[]", "train.seed=-1",
    "cluster.changes.5=-3", "cluster.changes.x=1Gbit", "train.timeout_s=inf",
    "train.device=tpu", "title=3", "1-", "5-2", "1,,2", ",", "1Gbit",
    "0Gbit", "1e400Gbit", "99999999999999Tbit", "2x", "0x", "infx", "codec=", "perfect-overlap,,", *SPECS,
)  # fmt: skip
WORDS = ("NaN", "1e999", "-1", "null", "9" * 400, '""', "[]", "{}", "true", "'x'", "\\u0000", "1" * 5000, "[" * 2000)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Good files of every kind, and what a hostile user may put beside them."""
    monkeypatch.chdir(tmp_path)

    def crash(*args, **kwargs):
        raise RankFailure("rank 0 failed: as planned", rank=0, summary="as planned")

    monkeypatch.setattr(local, "warm_up", lambda: None)
    monkeypatch.setattr(local, "run_ranks", crash)
    monkeypatch.setattr(local, "emulated_cluster", lambda *args, **kwargs: nullcontext((None, None)))
    monkeypatch.setattr(session, "enter_user_namespace", lambda: None)
    monkeypatch.setattr(bench_ranks, "warm_up", crash)
    monkeypatch.setattr(speed, "measure", crash)
    lay_out(tmp_path)
    return tmp_path


def lay_out(folder):
    """Write the files."""
    run = folder / "run"
    shutil.copytree(FIXTURES, run / "runs" / "auto", dirs_exist_ok=True)
    (run / "config.json").write_text(json.dumps(Config().override({"compare.strategies": ["ddp"]}).as_dict()))
    results = report_samples.results(report_samples.run(), report_samples.crashed())
    (run / "results.json").write_text(json.dumps(results))
    shutil.copy(FIXTURES / "plan.toml", folder / "plan.toml")
    (folder / "recipe.toml").write_text(
        'title = "mine"\n[train]\nbatch = 8\n[cluster]\nnodes = 0\n[compare]\nscale = []\n'
    )
    shutil.copy(
        next(TRACES.glob("syncline-0.1/**/*trace.json.gz"), TRACES / "gloo-rank0.json.gz"), folder / "trace.json.gz"
    )
    (folder / "hostile.py").write_text("open('canary', 'w').close()\nnet = 1\n")
    for name in ("pipe", "pipe.toml"):
        os.mkfifo(folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "device").symlink_to("/dev/zero")


def mutated_command(chooser):
    """A good command with some arguments replaced, dropped, doubled or added."""
    args = list(chooser.choice(COMMANDS))
    for _ in range(chooser.choice((1, 1, 1, 2))):
        place = chooser.randrange(1, len(args) + 1)
        what = chooser.choice(("replace", "replace", "replace", "drop", "insert", "set"))
        if what == "replace" and place < len(args) and not args[place].startswith("--"):
            args[place] = chooser.choice(VALUES)
        elif what == "drop" and place < len(args):
            del args[place]
        elif what == "set":
            args += ["--set", chooser.choice(VALUES)]
        else:
            args.insert(place, chooser.choice(VALUES))
    return args


def mutated_bytes(chooser, content):
    """Some bytes or words of a file changed, or its end cut off."""
    data = bytearray(content)
    for _ in range(chooser.choice((1, 1, 2, 5))):
        place = chooser.randrange(len(data) + 1)
        what = chooser.choice(("byte", "word", "number", "number", "cut", "double"))
        if what == "byte" and place < len(data):
            data[place] = chooser.randrange(256)
        elif what == "word":
            data[place:place] = chooser.choice(WORDS).encode()
        elif what == "number":
            digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
            if digits:
                place = chooser.choice(digits)
                data[place : place + 1] = chooser.choice(WORDS).encode()
        elif what == "cut":
            del data[place:]
        else:
            data[place:place] = data[place : place + 200]
    return bytes(data)


FILES = {
    "run/config.json": [("train", "--resume", "run")],
    "recipe.toml": [("compare", "--recipe", "recipe.toml", "--model", "mlp", "--nproc", "2", "--out", "out")],
    "plan.toml": [(*TRAIN, "--strategy", 'syncline(file="plan.toml")')],
    "run/results.json": [("report", "run"), ("plan", "run/runs/auto")],
    "run/runs/auto/costs.json": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto", "--bandwidth", "1Gbit")],
    "run/runs/auto/shapes.json": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto", "--json")],
    "run/runs/auto/plan.toml": [("plan", "run/runs/auto"), ("simulate", "run/runs/auto")],
    "trace.json.gz": [
        ("trace", "analyze", "trace.json.gz"),
        ("trace", "export", "trace.json.gz", "--out", "exported.json"),
        ("simulate", "trace.json.gz", "--what", "2x,no-straggler"),
    ],
}


def check(invoke, folder, args):
    """Run a command; it must end as documented."""
    with time_limit(LIMIT_S):
        done = invoke(*args)
    shown = [arg[:200] for arg in args]
    assert done.code in (0, 1, 2), (shown, done.code, done.err)
    assert "Traceback" not in done.err, (shown, done.err)
    if done.code == 2:
        lines = done.err.strip().splitlines()
        assert len(lines) == 1, (shown, done.err)
        assert lines[0].startswith("syncline: "), shown
        assert len(lines[0]) < 5000, shown
        assert lines[0].isprintable(), shown
    assert not (folder / "canary").exists(), shown
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "runs", ignore_errors=True)


def fuzz(invoke, folder, *, seed, commands, files):
    """Run so many mutated commands, and all commands on so many mutated files."""
    chooser = random.Random(seed)
    for _ in range(commands):
        check(invoke, folder, mutated_command(chooser))
    for number in range(files):
        name = chooser.choice(sorted(FILES))
        path = folder / name
        before = path.read_bytes()
        content = gzip.decompress(before) if name.endswith(".gz") and chooser.random() < 0.8 else before
        path.write_bytes(mutated_bytes(chooser, content))
        try:
            for args in FILES[name]:
                check(invoke, folder, args)
        except BaseException as error:
            (folder / "culprit").write_bytes(path.read_bytes())
            raise AssertionError(f"{name} of seed {seed}, number {number}: see {folder / 'culprit'}") from error
        path.write_bytes(before)


@pytest.fixture
def invoke(folder, monkeypatch, capfd):
    return Invoke(monkeypatch, capfd)


def test_some_mutated_commands_and_files(invoke, folder):
    fuzz(invoke, folder, seed=14, commands=150, files=30)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_many_mutated_commands_and_files(seed, invoke, folder):
    fuzz(invoke, folder, seed=seed, commands=500, files=200)

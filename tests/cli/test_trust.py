"""A file from somebody else runs no code: names in recipes, run folders, plans, costs, results and traces."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from invoke import Invoke

import report_samples
from syncline import codecs, exchange, plan, trust
from syncline.cluster.ranks import Place, run_ranks
from syncline.errors import UsageError
from syncline.train.config import Config
from syncline.train.data import load_data
from syncline.train.data.base import Need
from syncline.train.models import load_optimizer
from syncline.train.strategies import load as load_strategy
from syncline.train.workload import build

RECORDED = Path(__file__).parent / "fixtures" / "recorded"
HOSTILE = """
import subprocess
from os import system
from pathlib import Path
from shutil import rmtree
from torch import nn

Path("canary").write_text("a file ran this module")


def net():
    Path("canary").write_text("a file called this function")
    return nn.Linear(2, 2)


def number() -> int:
    Path("canary").write_text("a file called this function")


class Other:
    def __init__(self, *args, **kwargs):
        Path("canary").write_text("a file called this class")


def harmless():
    return nn.Linear(2, 2)


instance = nn.Linear(2, 2)
"""
SYSTEM = "os:system('touch canary')"


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    return Invoke(monkeypatch, capfd)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The name of a module in the current folder that leaves a file when it is imported."""
    name = f"hostile_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def assert_refused(done, tmp_path):
    assert done.code == 2, (done.out, done.err)
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert "would run code that is not Syncline's" in done.err
    assert "--trust" in done.err
    assert not (tmp_path / "canary").exists()


def _run_folder(folder, **settings):
    folder.mkdir()
    content = Config().override({key.replace("__", "."): value for key, value in settings.items()}).as_dict()
    (folder / "config.json").write_text(json.dumps(content))
    return folder


KEYS = ("train__model", "train__data", "train__optimizer", "train__freeze", "compare__strategies")


@pytest.mark.parametrize("key", KEYS)
def test_resuming_a_run_folder_runs_nothing_that_it_names(key, invoke, hostile, tmp_path):
    for number, spec in enumerate((SYSTEM, f"{hostile}:net", f"syncline(compress={hostile}:net)")):
        run = _run_folder(tmp_path / f"run{number}", **{"compare__strategies": ["ddp"], key: spec})
        assert_refused(invoke("train", "--resume", run), tmp_path)
        # A path that contains the name is not the user's word for it.
        named = shutil.copytree(run, tmp_path / f"{hostile}:net{number}")
        assert_refused(invoke("train", "--resume", named.name), tmp_path)


@pytest.mark.parametrize("verb", [("train",), ("compare",), ("plan",), ("bench", "overlap")], ids=" ".join)
def test_a_recipe_runs_nothing_that_it_names(verb, invoke, hostile, tmp_path):
    for spec in (SYSTEM, f"{hostile}:net"):
        (tmp_path / "recipe.toml").write_text(f'[train]\nmodel = "{spec}"\n')
        assert_refused(invoke(*verb, "--recipe", "recipe.toml", "--nproc", 2), tmp_path)


def test_what_the_user_repeats_or_trusts_is_used(invoke, hostile, tmp_path):
    run = _run_folder(tmp_path / "run", train__model=f"{hostile}:harmless", compare__strategies=["ddp"])
    for option in (("--trust",), ("--model", f"{hostile}:harmless"), ("--set", f"train.model={hostile}:harmless")):
        done = invoke("train", "--resume", run, *option)
        assert (done.code, "there is no checkpoint in" in done.err) == (2, True), done.err
    other = invoke("train", "--resume", run, "--model", "mlp")
    assert "there is no checkpoint" in other.err, "a name that the user replaces is not used"


def _plan_text(codec="none", exchange="allreduce"):
    unit = f'[[unit]]\nname = "a"\nparameters = ["a"]\ncodec = "{codec}"\nexchange = "{exchange}"\n'
    return f'version = 1\norder = ["a"]\n{unit}'


def test_a_plan_file_runs_nothing_that_it_names(invoke, hostile, tmp_path):
    specs = [{"codec": f"{hostile}:net"}, {"codec": f"warmup({hostile}:net, steps=2)"}]
    specs += [{"exchange": f"{hostile}:net"}, {"exchange": f"hierarchical(node=2, between={hostile}:net)"}]
    for given in specs:
        (tmp_path / "plan.toml").write_text(_plan_text(**given))
        done = invoke("train", "--strategy", 'syncline(file="plan.toml")', "--nproc", 2, "--model", "mlp")
        assert_refused(done, tmp_path)
        with pytest.raises(UsageError, match=r"syncline.plan.load\(path, trust=True\)"):
            plan.load(tmp_path / "plan.toml")
        assert len(plan.load(tmp_path / "plan.toml", trust=True).units) == 1
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_a_recorded_run_runs_nothing_that_it_names(verb, invoke, hostile, tmp_path):
    def text_of(name):
        return (RECORDED / name).read_text()

    for number, (name, old) in enumerate((("costs.json", '"bf16"'), ("plan.toml", '"terngrad"'))):
        run = shutil.copytree(RECORDED, tmp_path / f"run{number}")
        assert old in text_of(name)
        (run / name).write_text(text_of(name).replace(old, f'"{hostile}:net"'))
        assert_refused(invoke(verb, run), tmp_path)


def test_results_and_traces_run_nothing_that_they_name(invoke, hostile, tmp_path):
    results = report_samples.results(report_samples.run(), report_samples.run("ring"))
    run = tmp_path / "run"
    (run / "runs" / "ddp").mkdir(parents=True)
    for row, name in zip(results["runs"], (SYSTEM, f"{hostile}:net"), strict=True):
        row["strategy"] = name
    (run / "results.json").write_text(json.dumps(results))
    events = [{"ph": "X", "pid": 0, "tid": 1, "name": "step", "cat": "step", "ts": i * 10, "dur": 10} for i in range(3)]
    head = {"format": "syncline trace 1", "strategy": f"{hostile}:net", "world_size": 1}
    with gzip.open(run / "runs" / "ddp" / "trace.json.gz", "wt") as file:
        json.dump({"otherData": head, "traceEvents": events}, file)
    assert invoke("report", run).code == 0
    for verb in (("trace", "analyze"), ("trace", "export"), ("simulate",)):
        done = invoke(*verb, run)
        assert "Traceback" not in done.err
    assert not (tmp_path / "canary").exists()


def test_a_name_must_be_a_class_or_function_that_gives_the_right_kind(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refused(function, name, why):
        (tmp_path / "canary").unlink(missing_ok=True)
        with pytest.raises(UsageError, match=why):
            function(f"{name}('touch canary')")
        return not (tmp_path / "canary").exists()

    def own(text):
        return load_data(text, Need("images"), model="mlp", seed=0)

    def optimizer(text):
        return load_optimizer(text, [])

    everything = (build, load_strategy, optimizer, codecs.build, exchange.build, own)
    for function in everything:
        for name in ("os:system", "subprocess:run", "builtins:exec"):
            assert refused(function, name, "is a part of Python")
    build(f"{hostile}:harmless")  # imports the module
    for function in everything:
        for name in ("system", "subprocess.run", "rmtree", "instance", "Other"):
            assert refused(function, f"{hostile}:{name}", f"{hostile}:{name}'")
    for function in (build, load_strategy, optimizer):
        assert refused(function, f"{hostile}:number", "returns int: name a function that returns a")


def _trusted(place, payload, report):
    return trust.current()


def test_ranks_trust_what_their_command_does(tmp_path):
    with trust.command_line(["syncline(mine:codec)"]):
        (found,) = run_ranks(_trusted, [Place(rank=0, world_size=1)], None, logs=tmp_path)
    assert found == trust.Trust(frozenset({"mine:codec"}), imports_checked=True)
    with trust.command_line([]), pytest.raises(UsageError, match="a file names it: repeat the name"):
        codecs.build("mine:codec")

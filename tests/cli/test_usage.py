"""Bad input: one line that says what would work, exit code 2. In this process, so that torch is loaded once."""

import signal
import sys
from types import SimpleNamespace

import pytest
from command import PATHS

from syncline.cli.main import main
from syncline.cli.session import resolve


@pytest.fixture
def invoke(tmp_path, monkeypatch, capfd):
    """Call the command line in an empty folder."""
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.chdir(tmp_path)

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["syncline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=out, err=err)

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("compare", "--strategies", "dpp"), "did you mean 'ddp'"),
        (("compare", "--strategies", ""), "no strategy was named"),
        (("train", "--strategy", "ddp-powersgd(rank=0)"), "rank >= 1"),
        (("train", "--strategy", "ddp("), "cannot read 'ddp('"),
        (("compare", "--recipe", "course-vgg12"), "did you mean 'course-vgg11'"),
        (("compare", "--recipe", "missing.toml"), "cannot read the recipe missing.toml"),
        (("compare", "--set", "train.btch=3"), "did you mean 'train.batch'"),
        (("compare", "--set", "train.batch=many"), "train.batch takes a whole number"),
        (("compare", "--bandwidth", "1Gbit"), "add --nodes"),
        (("compare", "--nodes", "2", "--bandwidth", "fast"), "fast"),
        (("compare", "--nproc", "1", "--strategies", "ddp"), "at least two ranks"),
        (("compare", "--nproc", "3", "--batch", "64", "--strategies", "ddp"), "use --batch 63"),
        (("compare", "--nproc", "3", "--nodes", "2"), "do not divide over 2 nodes"),
        (("train", "--nproc", "x"), "--nproc takes a whole number; see syncline train --help"),
        (("train", "--strategy", "syncline(powersgd(rank=4)"), "',' or ')' is expected, not the end;"),
        (("train", "--recipe", "nowhere"), "vit-pretrain); a recipe of your own is a path that ends in .toml"),
        (("train", "--start", "/nowhere", "--model", "mlp"), "--start /nowhere: there is no such folder"),
        (("train", "--model", "mlp", "--data", "foo"), "unknown data set 'foo'"),
        (("compare", "--batch", "0"), "--batch must be 1 or more"),
        (("compare", "--scale", "0,2"), "a world size must be 1 or more"),
        (("compare", "--scale", "1,2", "--nproc", "4"), "leave --nproc out"),
        (("compare", "--scale", "2,3", "--set", "compare.scale_batch=true"), "multiple of the smallest"),
        (("compare", "--strategies", "server(servers=1.5)"), "servers takes a whole number, not 1.5"),
        (("compare", "--strategies", "ddp(bucket_mb=abc)"), "bucket_mb takes a number, not abc"),
        (("compare", "--seed", "99999999999999999999"), "--seed must be at most"),
        (("compare", "--set", "train.timeout_s=-1"), "positive number of seconds"),
        (("compare", "--set", "train.threads=-1"), "must be 0 or more"),
        (("train", "--strategy", ""), "a name is expected"),
        (("report", "nowhere"), "there is no 'nowhere'"),
        (("bench", "codec"), "did you mean 'codecs'"),
        (("bench", "codecs", "--codecs", "powerSGD"), "did you mean 'powersgd'"),
        (("bench", "codecs", "--device", "tpu"), "use --device cpu"),
        (("bench", "codecs", "--largest-mb", "0.001"), "leaves no size"),
        (("bench", "quality", "--steps", "0"), "--steps must be at least 1"),
        (("bench", "quality", "--tasks", "vg"), "unknown task"),
        (("bench", "quality", "--size", "huge"), "use small or full"),
        (("bench", "quality", "--bandwidth", "fast"), "is not a bandwidth"),
        (("bench", "quality", "--seeds", "a"), "--seeds takes whole numbers"),
        (("bench", "--json", "overlap"), "no such option: --json"),
        (("bench", "recorder", "--codecs", "int8"), "no such option: --codecs"),
        (("bench", "codecs", "--steps", "3"), "no such option: --steps"),
        (("trace", "view"), "missing argument"),
        (("trace",), "missing command; see syncline trace --help"),
        (("bench", "overlap", "--rounds", "0"), "at least 1 round and 3 steps"),
        (("bench", "overlap", "--seconds", "0"), "seconds of a turn must be positive"),
        (("bench", "overlap", "--nodes", "3", "--batch", "64"), "use --batch 63"),
        (("bench", "overlap", "--compress", "powersdg"), "did you mean 'powersgd'"),
        (("bench", "overlap", "--buckets", "5,many"), "sizes in MB"),
        (("bench", "overlap", "--strategies", "dpp"), "did you mean 'ddp'"),
        (("bench", "overlap", "--strategies", "ddp", "--also", "int8"), "leave --compress, --buckets and --also out"),
        (("bench", "overlap", "--strategies", "server,ddp"), "cannot take turns"),
        (("bench", "overlap", "--ablation", "--buckets", "5"), "has its own contestants"),
        (("bench", "overlap", "--ablation", "--compress", "bf16"), "use a codec that auto may or may not choose"),
        (("bench", "models", "--only", "vgg20"), "fits no cell"),
        (("bench", "models", "--size", "big"), "paper or small"),
        (("bench", "models", "--rounds", "0"), "at least 1 round"),
        (("bench", "models", "--quick", "--nodes", "4"), "has its own sizes and turns"),
        (
            ("bench", "overlap", "--set", "train.batch=abc", "--batch", "8"),
            "train.batch takes a whole number, not 'abc'",
        ),
        (("train", "--set", "train.batch=abc", "--batch", "8"), "train.batch takes a whole number, not 'abc'"),
        (("compare", "--set", "train.batch=abc", "--batch", "8"), "train.batch takes a whole number, not 'abc'"),
        (("plan", "--set", "train.batch=abc", "--batch", "8"), "train.batch takes a whole number, not 'abc'"),
        (("plan", "--set", "train.steps=-5"), "train.steps has no effect here"),
        (("plan", "--set", "train.threads=-5"), "train.threads must be 0 or more"),
        (("train", "--set", "compare.scale=[1,2]"), "use compare for several world sizes"),
        (("train", "--set", f"train.batch={'9' * 5000}"), "train.batch takes a whole number, not '999"),
        (("train", "--set", f"train.batch=0x{'f' * 100_000}"), "train.batch takes a whole number"),
        (("train", "--set", "train.batch=1e999"), "train.batch takes a whole number, not inf"),
        (("train", "--set", f"train.batch={'[' * 100_000}"), "train.batch takes a whole number, not '[[["),
        (("train", "--set", f"train.{'a' * 100_000}=1"), "unknown setting"),
        (("train", "--set", "train.timeout_s=1e999"), "below 1e7, not inf"),
        (("train", "--strategy", f"server(servers={'9' * 5000})"), "a number of 5000 digits is too large"),
        (("train", "--strategy", "server(servers=1000000)", "--nproc", "2"), "use 1 to 1022 servers"),
        (("train", "--nproc", "1000000"), "--nproc must be at most 1024"),
        (("train", "--nproc", "-1"), "--nproc must be 0 or more"),
        (("compare", "--scale", "1,1000000"), "a world size must be at most 1024"),
        (("bench", "codecs", "--threads", "0"), "--threads must be 1 to 1024, not 0"),
        (("bench", "overhead", "--threads", "1000000"), "--threads must be 1 to 1024"),
        (("bench", "overhead", "--steps", "99999999999"), "--steps must be at least 1 and below"),
        (("bench", "recorder", "--seed", "-1"), "--seed must be 0 to"),
        (("train", "--set"), "requires an argument"),
        (("report", "/dev/null"), "it is not a regular file"),
        (("bench", "overlap", "--recipe", "hipress-vgg18"), "did you mean 'hipress-vgg19'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, invoke, tmp_path):
    done = invoke(*args)
    assert done.code == 2, (done.out, done.err)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert list(tmp_path.iterdir()) == [], "a run folder was made for nothing"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "vgg12"), "did you mean 'vgg1"),
        (("--model", "faulty:nothing"), "nothing"),
        (("--model", "nowhere.at.all:make"), "nowhere"),
        (("--model", "faulty:not_a_module"), "Tensor"),
        (("--data", "shaeps"), "did you mean 'shapes'"),
        (("--data", "cifar10(root=missing)"), "missing"),
        (("--model", "mlp", "--data", "text"), "text"),
        (("--model", "mlp", "--batch", "1000000"), "larger than the data set"),
        (("--model", "mlp", "--set", "train.optimizer=sdg(lr=1)"), "did you mean 'sgd'"),
        (("--model", "mlp", "--set", "train.device=tpu"), "use --set train.device=cpu"),
    ],
)
def test_what_only_a_rank_can_see_is_one_line_and_exit_code_2_too(args, message, invoke):
    done = invoke("train", "--nproc", "2", "--steps", "1", "--out", "run", *args)
    assert done.code == 2, (done.out, done.err)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_a_mistake_leaves_an_earlier_run_where_it_was(invoke, tmp_path):
    small = ("--nproc", "2", "--steps", "2", "--batch", "4", "--set", "train.test_samples=0", "--out", "keep")
    assert invoke("train", "--model", "mlp(hidden=16)", *small).code == 0
    before = (tmp_path / "keep" / "results.json").read_text()
    assert invoke("train", "--model", "mpl", *small).code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep" / "results.json").read_text() == before


def test_out_and_html_that_cannot_be(invoke, tmp_path):
    (tmp_path / "runs").write_text("a file")
    done = invoke("train", "--nproc", "2", "--steps", "1", "--model", "mlp(hidden=16)", "--batch", "4")
    assert (done.code, "--out" in done.err) == (2, True)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    done = invoke("compare", "--recipe", "bad.toml")
    assert (done.code, "UTF-8" in done.err) == (2, True)


def test_an_explicit_setting_wins_over_a_recipe():
    config = resolve({"recipe": "course-vgg11", "settings": ["cluster.nodes=2"], "nproc": 2})
    assert (config.cluster.nodes, config.cluster.nproc) == (2, 2)
    assert resolve({"recipe": "course-vgg11", "nproc": 2}).cluster.nodes == 0
    assert resolve({"settings": ["cluster.nproc=4"], "nodes": 2}).cluster.nproc == 4


def test_help_and_version(invoke):
    assert "compare" in invoke("--help").out
    assert invoke("--version").out.startswith("syncline ")
    assert "--strategies" in invoke("compare", "--help").out
    assert invoke("compaer").code == 2


def test_doctor_says_what_is_there_and_what_is_missing(invoke):
    done = invoke("doctor")
    assert done.code == 0
    for word in ("cores", "backends", "gloo", "emulated nodes", "link shaping", "latency and loss", "29500"):
        assert word in done.out
    import json

    findings = {f["name"]: f for f in json.loads(invoke("doctor", "--json").out)["findings"]}
    assert findings["torch"]["state"] == "ok"
    assert all(f["fix"] for f in findings.values() if f["state"] == "missing")

"""`compare --launcher ray` without a cluster: the command of a rank, what a rank reports, and errors."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from syncline.cli import session
from syncline.errors import UsageError
from syncline.train.config import Config
from syncline.train.session import ray as launcher
from syncline.train.session import ray_tasks


def test_the_command_of_a_rank_has_the_same_settings() -> None:
    asked = Config().override(
        {
            "train.model": "vgg11(width=0.5)", "train.optimizer": "sgd(lr=0.1)", "train.timeout_s": 60.0,
            "cluster.nproc": 3, "cluster.changes": {"20": "100Mbit"}, "compare.scale_batch": True,
            "compare.strategies": ["ddp", "syncline(topk(0.01) | int8)"], "title": 'a "quoted" titleé',
        }
    )  # fmt: skip
    command = launcher.command_of(asked, Path("/out"))
    settings = [value for name, value in pairwise(command) if name == "--set"]
    assert session.resolve({"settings": settings}) == asked
    assert command[-3:] == ["--out", "/out", "--json"]


def test_files_of_other_ranks_are_only_their_logs(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("results.json", "runs/rank0.log", "runs/rank1.log", "runs/rank10.log"):
        (tmp_path / name).write_text(name)
    packed = {rank: launcher.names_in(ray_tasks.packed(tmp_path, rank)) for rank in (0, 1)}
    assert packed == {0: ["results.json", "runs/rank0.log", "runs/rank1.log", "runs/rank10.log"], 1: ["runs/rank1.log"]}


def test_an_interface_is_found_by_its_address() -> None:
    assert ray_tasks.interface_of("127.0.0.1") == "lo"
    assert ray_tasks.interface_of("203.0.113.9") is None


def test_unknown_launchers_and_a_missing_ray_are_errors_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="did you mean 'ray'"):
        session.session_runner(Config(), launcher="rey")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'syncline\[ray\]'"):
        launcher.run_on_ray(Config(), out=None, watcher=None)  # type: ignore[arg-type]


def test_what_a_rank_says_at_its_end() -> None:
    files: dict[int, bytes] = {}
    said = {"files": b"tar", "errors": ["syncline: unknown model 'vgg'"]}
    receive = launcher.receive
    assert receive({**said, "code": 0}, 1, files, None) is None  # type: ignore[arg-type]
    assert files == {1: b"tar"}
    wrong = receive({**said, "code": 2}, 1, files, None)  # type: ignore[arg-type]
    assert (type(wrong), str(wrong)) == (UsageError, "unknown model 'vgg'")
    failed = receive({**said, "code": 1}, 1, files, None)  # type: ignore[arg-type]
    assert str(failed) == "rank 1 ended with exit code 1: syncline: unknown model 'vgg'"

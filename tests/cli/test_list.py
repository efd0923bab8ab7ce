"""`syncline list`, and the command line without its extra packages."""

import json
import os
import subprocess
import sys

import pytest

from syncline.cli.main import main

KINDS = {
    "codecs": "powersgd",
    "exchanges": "hierarchical",
    "strategies": "ddp-bf16",
    "models": "vgg19",
    "data": "fashion-mnist",
    "optimizers": "adamw",
    "policies": "gradnorm",
    "recipes": "demo",
}


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["syncline", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_its_arguments_and_most_a_sentence(kind, monkeypatch, capsys) -> None:
    assert call(monkeypatch, "list", kind, "--json") == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)[kind]}
    assert KINDS[kind] in entries
    if kind != "optimizers":  # their names say it
        assert all(entry["summary"] for entry in entries.values())
    assert call(monkeypatch, "list", kind) == 0
    assert KINDS[kind] in capsys.readouterr().out


def test_arguments_are_written_as_in_a_spec(monkeypatch, capsys) -> None:
    call(monkeypatch, "list", "strategies", "--json")
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["strategies"]}
    assert (
        entries["ddp-powersgd"]["arguments"] == "rank=4, bucket_mb=25.0, unused=false, static_graph=false, batch=false"
    )


def test_a_misspelled_kind_names_the_nearest(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "list", "codec") == 2
    assert "did you mean 'codecs'" in capsys.readouterr().err


def test_without_a_kind_all_are_named(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "list") == 2
    assert f"syncline list {'|'.join(KINDS)}" in capsys.readouterr().err


def test_without_the_extra_packages_the_command_says_what_to_install() -> None:
    program = "import sys; sys.modules['typer'] = None; from syncline.__main__ import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ}, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == "syncline: the command line needs typer: pip install 'syncline[cli]'\n"

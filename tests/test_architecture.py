"""The folder list is the architecture: imports go one way, state has one owner, and every module says what it holds."""

import subprocess
import sys
from pathlib import Path

import pytest

import architecture

SOURCE = Path(__file__).parents[1] / "src"
EXTRAS = {"typer", "rich", "jinja2", "pyroute2"}


def _module(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREE = {_module(path): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}

# check, a tree on which it must fail, and a part of what it says there
CHECKS = {
    "cycle": (
        architecture.cycles,
        {
            "syncline.plan.a": "def f():\n    from syncline.plan import b",
            "syncline.plan.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from syncline.plan.a import C",
        },
        "syncline.plan.a -> syncline.plan.b",
    ),
    "package direction": (
        architecture.directions,
        {"syncline.codecs.a": "import syncline.engine.sync", "syncline.engine.sync": ""},
        "'codecs' may not import 'engine'",
    ),
    "room direction": (
        architecture.directions,
        {"syncline.trace.merge.a": "from syncline.trace.record import b", "syncline.trace.record.b": ""},
        "room 'merge' comes before room 'record'",
    ),
    "room cycle": (
        architecture.directions,
        {
            "syncline.report.x.a": "from syncline.report.y import a",
            "syncline.report.x.b": "",
            "syncline.report.y.a": "",
            "syncline.report.y.b": "from syncline.report.x import b",
        },
        "rooms import each other: syncline.report.x, syncline.report.y",
    ),
    "private access": (
        architecture.private_access,
        {"syncline.engine.a": "def f(sync):\n    return sync._outstanding"},
        "reads '_outstanding'",
    ),
    "private import": (
        architecture.private_access,
        {"syncline.engine.a": "from syncline.engine.b import _hidden", "syncline.engine.b": "_hidden = 1"},
        "imports '_hidden'",
    ),
    "private torch API": (
        architecture.private_torch,
        {"syncline.engine.a": "import torch\nx = torch._C._functions"},
        "put it into _compat/",
    ),
    "first line": (
        architecture.first_lines,
        {"syncline.engine.a": '"""Who came last to an exchange, and whom that let go on."""'},
        "asks instead of naming",
    ),
    "docstring": (architecture.missing_docstrings, {"syncline.engine.a": "def f(): ..."}, "syncline.engine.a: f"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_tree_is_as_designed(name):
    check, _, _ = CHECKS[name]
    assert check(TREE) == []


@pytest.mark.parametrize("name", CHECKS)
def test_the_check_can_fail(name):
    check, bad_tree, said = CHECKS[name]
    assert any(said in sentence for sentence in check(bad_tree)), check(bad_tree)


def test_source_and_docs_are_plain_english():
    root = SOURCE.parent
    docs = [root / "README.md", root / "CONTRIBUTING.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    texts = {**TREE, **{path.name: path.read_text() for path in docs}}
    assert architecture.riddles(texts) == []
    assert architecture.riddles({"a.md": "mending it would gain 3 ms"}) != []


def test_core_imports_torch_and_the_standard_library_alone():
    code = (
        "import sys\n"
        "import syncline, syncline.trace, syncline.spec, syncline.registry, syncline.train.rank.worker\n"
        "import syncline.codecs, syncline.exchange, syncline.cluster, syncline.results.file\n"
        f"print(sorted({EXTRAS!r} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_of_tests_have_names_of_their_own():
    """pytest imports a test file by its name alone: with two of one name, none of the tests runs."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []

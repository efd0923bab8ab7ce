"""The folder list is the architecture: imports go one way, and the core needs torch and the standard library alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "syncline"

# package: what it may import of ours, besides the small modules at the root
MAY_IMPORT = {
    "codecs": set(),
    "exchange": {"codecs"},
    "trace": set(),
    "sim": {"trace"},
    "plan": {"codecs", "exchange", "sim"},
    "engine": {"codecs", "exchange", "trace", "sim", "plan"},
    "pipeline": {"engine", "trace", "sim"},
    "cluster": set(),
    "report": {"trace", "sim"},
    "train": {"codecs", "exchange", "trace", "sim", "plan", "engine", "pipeline", "cluster", "report"},
    "integrations": {"engine"},
    "bench": {"codecs", "exchange", "trace", "sim", "plan", "engine", "cluster", "report", "train"},
}
EXTRAS = {"typer", "rich", "jinja2", "pyroute2", "triton"}
ROOT = {path.stem for path in SOURCE.glob("*.py")}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def _files():
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    package = path.relative_to(SOURCE).parts[0]
    if package == "cli" or path.parent == SOURCE:
        return
    assert package in MAY_IMPORT, f"'{package}' is a room that the design does not have"
    for module in _imports(path):
        parts = module.split(".")
        if parts[0] == "syncline" and len(parts) > 1 and parts[1] not in ROOT | {package}:
            assert parts[1] in MAY_IMPORT[package], f"{path.name} imports {module}"


def test_core_imports_torch_and_the_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import syncline, syncline.trace, syncline.spec, syncline.registry, syncline.train.rank.worker\n"
        "import syncline.codecs, syncline.exchange, syncline.cluster, syncline.results.file\n"
        f"print(sorted({EXTRAS - {'triton'}!r} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_and_public_name_has_a_docstring():
    missing = []
    for path in _files():
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            missing.append(str(path.relative_to(SOURCE)))
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(SOURCE)}: {node.name}")
    assert missing == []

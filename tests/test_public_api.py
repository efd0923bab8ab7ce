"""The names of `import syncline`: real types for a user's type checker, documented, and imported on first use."""

import inspect
import re
import subprocess
import sys

import pytest
from mypy import api

import syncline

USER_SCRIPT = """
import syncline
from torch import nn

reveal_type(syncline.attach)
sync = syncline.attach(nn.Linear(2, 2), compress="auto")
reveal_type(sync)
reveal_type(sync.wait())
reveal_type(syncline.trace.analyze)
syncline.attach(nn.Linear(2, 2), compres="auto")
syncline.atach(nn.Linear(2, 2))
try:
    sync.wait()
except syncline.PeerError as error:
    reveal_type(error.ranks)
"""
# Following torch's imports takes ten seconds more; its types are `Any` here.
CONFIG = """
[mypy]
strict = true
[mypy-torch.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The lines that mypy prints about a user's script, by line number of the script."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "user.py").write_text(USER_SCRIPT)
    (folder / "config").write_text(CONFIG)
    out, err, _ = api.run(
        [f"--config-file={folder / 'config'}", f"--cache-dir={folder / 'cache'}", str(folder / "user.py")]
    )
    assert not err
    lines = USER_SCRIPT.splitlines()
    found = {}
    for text in out.splitlines():
        if "user.py:" in text:
            _, number, message = text.split(":", 2)
            found.setdefault(lines[int(number) - 1].strip(), message.strip())
        else:
            assert text.startswith("Found 2 errors"), out
    return found


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "reveal_type(syncline.attach)",
            ["model:", "optimizer:", "compress: str | None", "-> syncline.engine.sync.Sync"],
        ),
        ("reveal_type(sync)", ['"syncline.engine.sync.Sync"']),
        ("reveal_type(sync.wait())", ['"None"']),
        ("reveal_type(syncline.trace.analyze)", ["trace:", "-> syncline.trace.analysis.analyze.Analysis"]),
        ('syncline.attach(nn.Linear(2, 2), compres="auto")', ["error:", 'did you mean "compress"?']),
        ("syncline.atach(nn.Linear(2, 2))", ["error:", 'maybe "attach"?']),
        ("reveal_type(error.ranks)", ['"tuple[int, ...]"']),
    ],
)
def test_mypy_sees_the_real_types_in_a_users_script(checked, line, parts):
    for part in parts:
        assert part in checked[line]


def test_every_public_name_exists_is_listed_and_has_a_docstring():
    assert [name for name in dir(syncline) if not name.startswith("__")] == sorted(syncline.__all__)
    assert "__version__" in dir(syncline)
    for name in syncline.__all__:
        assert inspect.getdoc(getattr(syncline, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'atach'"):
        _ = syncline.atach


def test_every_option_of_attach_is_documented():
    text = inspect.getdoc(syncline.attach)
    for name in inspect.signature(syncline.attach).parameters:
        assert re.search(rf"^ *{name}: ", text, re.MULTILINE), name


def test_neither_the_import_nor_a_help_page_imports_torch():
    code = (
        "import sys, syncline\n"
        "from typer.testing import CliRunner\n"
        "from syncline.cli.main import app\n"
        "for verb in ['', 'train', 'compare', 'plan', 'trace', 'simulate', 'bench', 'bench overlap', 'doctor']:\n"
        "    done = CliRunner().invoke(app, [*verb.split(), '--help'])\n"
        "    assert done.exit_code == 0 and 'Usage' in done.output, (verb, done.output)\n"
        "    assert 'torch' not in sys.modules, verb\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

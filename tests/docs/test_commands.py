"""All commands of README and docs, on two cores and inside 8 GB: `make test-all`, or `pytest tests/docs --full`.

With `--record benchmarks/results/documented-commands.json` the time and the peak memory of each command are kept.
"""

import json
import os
import re
from pathlib import Path

import pytest
from documented import blocks, pages
from process_tree import Measured
from quick import MOST_BYTES, expected, shortened, why_not_run

pytestmark = [pytest.mark.full, pytest.mark.namespaces]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in pages() if any(b.commands for b in blocks(p))])
def test_all_commands_run_on_two_cores_with_8_gb(page, prepared, capsys, request):
    folder = prepared(page)
    rows = []
    for block in blocks(page):
        for command in block.commands:
            if why_not_run(command):
                continue
            load = os.getloadavg()[0]
            done = Measured(shortened(command), cwd=folder).finish(timeout=900)
            code, pattern = expected(command)
            with capsys.disabled():
                print(f"\n{done.seconds:6.1f} s {done.peak_bytes / 1e6:6.0f} MB  {block.place}  {shortened(command)}")
            assert done.code == code, f"{block.place}: {command}: {done.out} {done.err}"
            assert re.search(pattern, done.out + done.err), f"{block.place}: {command}: {done.out} {done.err}"
            assert done.peak_bytes < MOST_BYTES, f"{block.place}: {command} needs {done.peak_bytes / 1e9:.1f} GB"
            assert done.left() == []
            ran = {"command": command, "ran": shortened(command), "exit_code": code}
            rows.append(ran | {"seconds": round(done.seconds, 1), "peak_bytes": done.peak_bytes, "load_before": load})
            if record := request.config.getoption("--record"):
                _write(Path(record), page, rows)


def _write(file, page, rows):
    """Replace the rows of a page: a long pass can be made in pieces."""
    known = json.loads(file.read_text()) if file.exists() else {}
    found = {name: known[name] for name in pages() if name in known} | {page: rows}
    file.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


@pytest.mark.timeout(300)
def test_the_program_with_nodes_runs(prepared):
    folder = prepared("docs/cluster.md")
    (text,) = [block.text for block in blocks("docs/cluster.md") if block.language == "python"]
    (folder / "nodes.py").write_text(text)
    done = Measured("python nodes.py", cwd=folder).finish()
    assert done.code == 0, done.err
    assert "sum 4.0" in done.out

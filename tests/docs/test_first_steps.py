"""A person follows docs/first-steps.md from an empty folder to a report, a trace and a codec, in 15 minutes."""

import re
import time

import clean_environment
import pytest
from documented import ROOT, blocks, changed
from quick import expected
from test_install import run

PAGE = "docs/first-steps.md"
WORDS_PER_MINUTE = 200
"""A slow reader of technical text."""
MADE = {
    "syncline compare": ["first/report.html", "first/results.json"],
    "torchrun": ["syncline-trace/trace.json.gz"],
    "syncline trace view": ["syncline-trace/timeline.html"],
    "syncline bench codecs": ["runs/bench-codecs/codecs.html"],
    "syncline train": ["mine/report.html"],
}
"""The files that a command leaves."""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_from_an_empty_folder_to_report_trace_and_codec(tmp_path):
    programs = clean_environment.make(tmp_path / "environment")
    folder = tmp_path / "empty"
    folder.mkdir()
    began = time.monotonic()
    (install,) = [block for block in blocks("README.md") if "pip install" in block.text]
    for command in install.commands:
        done = run(f"{command} --quiet", programs=programs, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    said = script = ""
    for block in blocks(PAGE):
        if block.file:
            script = block.file
            (folder / script).write_text(block.text)
        elif block.language == "diff":
            (folder / script).write_text(changed((folder / script).read_text(), block.text))
        elif block.language == "text":
            pattern = re.escape(block.text).replace(re.escape("..."), ".*")
            assert re.search(pattern, said), f"{block.place}: not what the command before it says:\n{said}"
        for command in block.commands:
            if "my_codec" in command and not (folder / "my_codec.py").exists():
                (codec,) = [b for b in blocks("docs/write-a-compressor.md") if b.file == "my_codec.py"]
                (folder / codec.file).write_text(codec.text)
            done = run(command, programs=programs, cwd=folder)
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{block.place}: {command}: {said}"
            assert re.search(expected(command)[1], said), f"{block.place}: {command}: {said}"
            for start, files in MADE.items():
                if command.startswith(start):
                    assert all((folder / name).is_file() for name in files), f"{block.place}: {list(folder.iterdir())}"
    machine = time.monotonic() - began
    words = sum(len((ROOT / page).read_text().split()) for page in ("README.md", PAGE, "docs/write-a-compressor.md"))
    total = machine + 60 * words / WORDS_PER_MINUTE
    print(f"{machine:.0f} s of machine time, {words} words, {total / 60:.1f} minutes in all")
    assert total < 15 * 60

"""A person follows docs/first-steps.md from an empty folder to a report, a trace and a codec, in 15 minutes."""

import re
import time

import clean_environment
import pytest
from documented import ROOT, blocks, changed, output_pattern
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
def test_from_an_empty_folder_to_report_trace_and_codec(tmp_path, wheel):
    programs = clean_environment.make(tmp_path / "environment")
    folder = tmp_path / "empty"
    folder.mkdir()
    began = time.monotonic()
    # What the README's second line does in a clone, with the wheel.
    done = run(f"pip install --quiet torch && pip install --quiet '{wheel}[cli]'", programs=programs, cwd=folder)
    assert done.returncode == 0, done.stderr
    said = script = ""
    unchecked = []
    for block in blocks(PAGE):
        if block.file:
            script = block.file
            (folder / script).write_text(block.text)
        elif block.language == "diff":
            (folder / script).write_text(changed((folder / script).read_text(), block.text))
        elif block.language == "text":
            shown = re.search(output_pattern(block.text), said)
            assert shown, f"{block.place}: not what the commands before it print:\n{said}"
            unchecked = []
        elif block.language == "sh":
            assert not unchecked, f"{unchecked}: the page does not show what they print"
            said, unchecked = "", block.commands
        for command in block.commands:
            if "my_codec" in command and not (folder / "my_codec.py").exists():
                (codec,) = [b for b in blocks("docs/write-a-compressor.md") if b.file == "my_codec.py"]
                (folder / codec.file).write_text(codec.text)
            done = run(command, programs=programs, cwd=folder)
            printed = done.stdout + done.stderr
            said += printed
            assert done.returncode == 0, f"{block.place}: {command}: {printed}"
            assert re.search(expected(command)[1], printed), f"{block.place}: {command}: {printed}"
            for start, files in MADE.items():
                if command.startswith(start):
                    assert all((folder / name).is_file() for name in files), f"{block.place}: {list(folder.iterdir())}"
    assert not unchecked, f"{unchecked}: the page does not show what they print"
    machine = time.monotonic() - began
    words = sum(len((ROOT / page).read_text().split()) for page in ("README.md", PAGE, "docs/write-a-compressor.md"))
    total = machine + 60 * words / WORDS_PER_MINUTE
    print(f"{machine:.0f} s of machine time, {words} words, {total / 60:.1f} minutes in all")
    assert total < 15 * 60

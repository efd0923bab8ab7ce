"""Files: written atomically, and an error names the file, also on a full disk."""

import errno
import os

import pytest
import torch

from syncline.files import write_text, writing


def test_a_full_disk_is_an_error_with_the_name_of_the_file():
    for write in (lambda file: file.write(b"x" * 100_000), lambda file: torch.save(torch.zeros(100_000), file)):
        with (
            pytest.raises(OSError, match=r"No space left on device: 'run/rank0.pt'") as caught,
            writing("run/rank0.pt"),
            open("/dev/full", "wb") as file,  # noqa: PTH123
        ):
            write(file)
        assert caught.value.errno == errno.ENOSPC


def test_other_errors_pass_unchanged():
    with pytest.raises(RuntimeError, match=r"^mine$"), writing("file"):
        raise RuntimeError("mine")
    with pytest.raises(KeyError), writing("file"):
        raise KeyError("mine")


def test_an_error_names_the_target_and_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "results.json"
    write_text("old", target)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"results\.json") as caught:
        write_text("new", target)
    assert caught.value.filename == str(target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

"""Atomic writing of text files: a reader sees the old content or the new one, never half of it."""

import os
import tempfile
from pathlib import Path


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Replace the content of `path` atomically, through a temporary file beside it. Creates missing folders."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp makes it private, but colleagues read plans and reports
        os.replace(temporary, target)  # noqa: PTH105 - the atomic move, by its own name
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

"""Downloads of data sets, only on request: one file, checked and moved into place; ranks of a machine share it."""

import fcntl
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from syncline.errors import UsageError

_CHUNK = 1 << 20
_MAX_BYTES = 1 << 30


def cache_folder() -> Path:
    """The default folder for data: `$XDG_CACHE_HOME/syncline`, else `~/.cache/syncline`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "syncline"


def fetch(url: str, target: Path, *, sha256: str, timeout: float = 30) -> None:
    """Download `url` to `target` unless it is there; a failure or a wrong checksum is a `UsageError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        # Several ranks call this at once: the first downloads, the others wait and find the file.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _download(url, target, sha256, timeout)


def _download(url: str, target: Path, sha256: str, timeout: float) -> None:
    digest, size = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.") as partial:
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:  # noqa: S310 (our own https address)
                while chunk := answer.read(_CHUNK):
                    size += len(chunk)
                    if size > _MAX_BYTES:
                        raise UsageError(f"{url} sends more than {_MAX_BYTES >> 30} GiB: not what was expected")
                    digest.update(chunk)
                    partial.write(chunk)
        except (urllib.error.URLError, OSError) as error:
            raise UsageError(
                f"cannot download {url} ({error}): fetch it where there is a network, and put it at {target}"
            ) from error
        if digest.hexdigest() != sha256:
            raise UsageError(f"{url} has the SHA-256 {digest.hexdigest()}, not {sha256}: it was deleted")
        partial.flush()
        # The temporary name goes away with the block; a link of the finished file stays, in one step.
        os.link(partial.name, target)

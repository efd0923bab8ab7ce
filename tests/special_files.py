"""Things in the place of a file that are not regular files: a pipe, a folder, a loop of links, a device, a socket."""

import os
import socket
from pathlib import Path


def put(kind: str, path: Path) -> None:
    """Make something at `path` that is not a regular file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # the path of a socket is short

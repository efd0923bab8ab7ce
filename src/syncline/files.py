"""Reading and writing files. Only regular files are read; a written file is replaced as a whole; errors name the file.

A pipe, a device, a socket or a folder in the place of a file is an `OSError` at once: opening it could block for ever.
"""

import errno
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""The largest file that is read as a whole."""
_MOST_LEVELS = 64
_WHOLE_NUMBERS = range(-(1 << 63), 1 << 63)

Pathname = str | os.PathLike[str]


def open_regular(path: Pathname) -> BufferedReader:
    """Open a file for reading bytes; `OSError` for everything that is not a regular file, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return os.fdopen(_regular(descriptor, path), "rb")


def open_log(path: Pathname, *, append: bool) -> int:
    """A descriptor for writing a log; `OSError` if something that is not a regular file, or a link, has its name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = _regular(os.open(path, flags | (os.O_APPEND if append else 0), 0o666), path)
    if not append:
        os.ftruncate(descriptor, 0)
    return descriptor


def real_path(path: Pathname) -> Path:
    """The absolute path without symbolic links; unlike `Path.resolve`, a loop of links is not an error here."""
    return Path(os.path.realpath(path))


def read_text(path: Pathname, *, encoding: str = "utf-8") -> str:
    """The text of a regular file; `OSError`, or `UnicodeDecodeError` for other bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(path))
        return file.read().decode(encoding)


def read_json(path: Pathname) -> Any:
    """The content of a JSON file; `OSError` if it cannot be read, `ValueError` if it is not JSON."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` for everything else, too deep nesting and too large integers included."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; `ValueError` for everything else, too deep nesting and too large integers included."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[Any] = [table]
    for _ in range(_MOST_LEVELS):
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        if any(type(item) is int and item not in _WHOLE_NUMBERS for item in level):
            raise ValueError("a whole number has more than 64 bits")
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return table
    raise ValueError(f"it is nested more than {_MOST_LEVELS} deep")


def reason(error: Exception) -> str:
    """Why a file could not be read, as the end of a sentence: `No such file or directory`."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    text = getattr(error, "strerror", None) or str(error)
    return (text.splitlines() or [type(error).__name__])[0]


def write_text(text: str, path: Pathname) -> None:
    """Replace the content of `path` atomically, through a temporary file beside it. Creates missing folders."""
    target = Path(path)
    check_target(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with writing(target):
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


def check_target(path: Pathname) -> None:
    """Raise `OSError` if a file written here would replace a pipe, a device (`/dev/null`) or a socket."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


@contextmanager
def writing(path: Pathname) -> Iterator[None]:
    """An operating-system error in this block names `path`: a full disk is noticed by open files, which do not.

    `torch.save` hides such an error behind one of its own.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        if found is None or found.errno is None:
            raise
        raise OSError(found.errno, found.strerror, os.fspath(path)) from error


def _regular(descriptor: int, path: Pathname) -> int:
    """The descriptor, if its file is a regular one; else it is closed and `OSError` raised."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def _whole_number(digits: str) -> int:
    # The conversion of very long ones takes time, and Python refuses it.
    if len(digits) > 20 or int(digits) not in _WHOLE_NUMBERS:
        raise ValueError("a whole number has more than 64 bits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_whole_number)

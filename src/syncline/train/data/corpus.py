"""Text to token ids: the words of a file or a folder, and a vocabulary of the most frequent ones."""

import os
import re
import sysconfig
from collections import Counter
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import UsageError

PADDING, UNKNOWN, START, END, MASK = range(5)
SPECIAL = 5

_WORD = re.compile(r"\w+|[^\w\s]|\n")
_SKIPPED = {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo"}


Corpus = dict[str, Tensor]
"""Token ids by group (a top-level file or folder), in order of the groups' names."""


# One process builds a workload more than once (a comparison runs several strategies): the text is the same.
@lru_cache(maxsize=2)
def read_corpus(path: str | None, *, tokens: str, vocabulary: int, megabytes: float) -> Corpus:
    """Read up to `megabytes` of text; `tokens` is `words` or `bytes`. Ids stay below `vocabulary`."""
    if tokens not in ("words", "bytes"):
        raise UsageError(f"text(tokens={tokens}): words or bytes")
    if megabytes <= 0 or vocabulary < SPECIAL + 1:
        raise UsageError(f"text({megabytes=}, {vocabulary=}): more than 0 MB and more than {SPECIAL} words")
    if tokens == "bytes" and vocabulary < SPECIAL + 256:
        raise UsageError(f"text(tokens=bytes) needs a model of {SPECIAL + 256} words or more, not {vocabulary}")
    texts = _read(path, round(megabytes * 1_000_000))
    if tokens == "bytes":
        return {name: _bytes(text) for name, text in texts.items()}
    words = {name: _WORD.findall(text) for name, text in texts.items()}
    counts = Counter(chain.from_iterable(words.values()))
    # By frequency, then by the alphabet: the same numbers on every rank and in every process.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - SPECIAL]
    number = {word: place for place, word in enumerate(ranked, start=SPECIAL)}
    return {
        name: torch.tensor([number.get(word, UNKNOWN) for word in group], dtype=torch.int64, device="cpu")
        for name, group in words.items()
        if group
    }


def _bytes(text: str) -> Tensor:
    raw = bytearray(text.encode("utf-8", errors="replace"))
    return torch.frombuffer(raw, dtype=torch.uint8).long() + SPECIAL


def _read(path: str | None, limit: int) -> dict[str, str]:
    """Group -> text, files in the order of their paths, until the limit."""
    root = Path(path).expanduser() if path else Path(sysconfig.get_paths()["stdlib"])
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = _files(root, ".py" if path is None else "")
    else:
        raise UsageError(f"text: there is no file or folder {root}: give path=FILE or path=FOLDER")
    parts: dict[str, list[str]] = {}
    left = limit
    for file in files:
        text = _text(file, left)
        if text:
            group = file.name if file == root else file.relative_to(root).parts[0]
            parts.setdefault(group, []).append(text)
            left -= len(text)
        if left <= 0:
            break
    if not parts:
        raise UsageError(f"text: {root} has no readable text: give path=FILE or path=FOLDER")
    return {group: "\n".join(texts) for group, texts in parts.items()}


def _files(root: Path, suffix: str) -> list[Path]:
    """Files below `root` in the order of their paths; hidden, test and foreign folders are not entered."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).parts)


def _text(file: Path, limit: int) -> str:
    try:
        with file.open("rb") as opened:
            raw = opened.read(limit)
    except OSError as error:
        raise UsageError(f"text: {file} cannot be read: {error}") from error
    # Binary files have zero bytes, text does not.
    return "" if b"\0" in raw else raw.decode("utf-8", errors="replace").replace("\r\n", "\n")

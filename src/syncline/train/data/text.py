"""Text from any file or folder, as token ids of its most frequent words or of its bytes.

It is cut into windows for the model's task; one window in ten is held out for tests.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need, data
from syncline.train.data.text_tasks import SPECIAL, TASKS, UNKNOWN, Windows

_HELD_OUT = 10
WORD = re.compile(r"\w+|[^\w\s]|\n")
"""A word, a sign or the end of a line."""
_SKIPPED = {"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "turtledemo"}


Corpus = dict[str, Tensor]
"""Token ids by group (a top-level file or folder), in order of the groups' names."""


@data("text", tasks=tuple(TASKS))
def text(
    need: Need, *, seed: int, path: str | None = None, seq: int | None = None, tokens: str = "words",
    megabytes: float = 3.0, classes: int = 8,
) -> Data:  # fmt: skip
    """Text of a file or folder (default: this Python's own library), as `words` or `bytes`, `seq` tokens per sample.

    The classification task has `classes` classes: top-level files or folders.
    """
    window, make_batch = TASKS[need.task]
    length = need.sequence if seq is None else seq
    width = window(length)
    if not 8 <= length <= 65_536:
        raise UsageError(f"text(seq={length}): 8 to 65536 tokens")
    corpus = _read_corpus(path, tokens=tokens, vocabulary=need.vocabulary, megabytes=megabytes)
    if need.task == "text-classes":
        corpus = _largest(corpus, classes, width)
    splits = []
    for held_out in (False, True):
        stream, starts, labels = _cut(corpus, width, held_out=held_out, by_group=need.task == "text-classes")
        if not len(starts):
            raise UsageError(
                f"text: {len(stream)} tokens are too few for windows of {width}: give a longer text, a smaller seq"
            )
        splits.append(Windows(stream, starts, labels, width, need.vocabulary, seed, held_out, make_batch))
    number = classes if need.task == "text-classes" else 0
    return Data(splits[0], splits[1], samples="sequences", classes=number, sequence=length)


def _largest(corpus: Corpus, classes: int, width: int) -> Corpus:
    """The largest groups, all cut to one length, so that classes are equally frequent."""
    by_size = sorted(corpus, key=lambda name: (-len(corpus[name]), name))[:classes]
    if classes < 2 or len(by_size) < classes or len(corpus[by_size[-1]]) < _HELD_OUT * width:
        raise UsageError(
            f"text(classes={classes}): the classes are top-level files or folders; this text has"
            f" {len(corpus)}, and each class needs {_HELD_OUT * width} tokens: give a folder with more, or"
            " fewer classes (at least 2)"
        )
    shortest = len(corpus[by_size[-1]])
    return {name: corpus[name][:shortest] for name in sorted(by_size)}


def _cut(corpus: Corpus, width: int, *, held_out: bool, by_group: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(stream, window starts, window labels): every tenth window is held out, the others are trained on."""
    pieces = list(corpus.values()) if by_group else [torch.cat(list(corpus.values()))]
    starts, labels, offset = [], [], 0
    for label, piece in enumerate(pieces):
        number = torch.arange(len(piece) // width, device="cpu")
        number = number[(number % _HELD_OUT == _HELD_OUT - 1) == held_out]
        starts.append(offset + number * width)
        labels.append(torch.full_like(number, label))
        offset += len(piece)
    return torch.cat(pieces), torch.cat(starts), torch.cat(labels)


# One process builds a workload more than once (a comparison runs several strategies): the text is the same.
@lru_cache(maxsize=2)
def _read_corpus(path: str | None, *, tokens: str, vocabulary: int, megabytes: float) -> Corpus:
    """Read up to `megabytes` of text; `tokens` is `words` or `bytes`. Ids stay below `vocabulary`."""
    if tokens not in ("words", "bytes"):
        raise UsageError(f"text(tokens={tokens}): words or bytes")
    if megabytes <= 0 or vocabulary < SPECIAL + 1:
        raise UsageError(f"text({megabytes=}, {vocabulary=}): more than 0 MB and more than {SPECIAL} words")
    if tokens == "bytes" and vocabulary < SPECIAL + 256:
        raise UsageError(f"text(tokens=bytes) needs a model of {SPECIAL + 256} words or more, not {vocabulary}")
    texts = read_texts(path, round(megabytes * 1_000_000))
    if tokens == "bytes":
        raw = {name: bytearray(text.encode("utf-8", errors="replace")) for name, text in texts.items()}
        return {name: torch.frombuffer(body, dtype=torch.uint8).long() + SPECIAL for name, body in raw.items()}
    number = number_words(texts.values(), vocabulary)
    words = {name: WORD.findall(text) for name, text in texts.items()}
    return {
        name: torch.tensor([number.get(word, UNKNOWN) for word in group], dtype=torch.int64, device="cpu")
        for name, group in words.items()
        if group
    }


def number_words(texts: Iterable[str], vocabulary: int) -> dict[str, int]:
    """The token ids of the most frequent words, below `vocabulary`; the same in every process."""
    counts = Counter(chain.from_iterable(map(WORD.findall, texts)))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - SPECIAL]
    return {word: place for place, word in enumerate(ranked, start=SPECIAL)}


def read_texts(path: str | None, limit: int) -> dict[str, str]:
    """Group -> text, files in the order of their paths, until the limit of bytes."""
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

"""Text from any file, cut into windows for the model's task; one window in ten is held out for tests."""

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need, data
from syncline.train.data.corpus import Corpus, read_corpus
from syncline.train.data.text_tasks import TASKS, Windows

_HELD_OUT = 10


@data("text", tasks=tuple(TASKS))
def text(
    need: Need, *, seed: int, path: str | None = None, seq: int | None = None, tokens: str = "words",
    megabytes: float = 3.0, classes: int = 8,
) -> Data:  # fmt: skip
    """A file or folder (default: this Python's own library), as `words` or `bytes`, `seq` tokens per sample.

    The classification task has `classes` classes: top-level files or folders.
    """
    window, make_batch = TASKS[need.task]
    length = need.sequence if seq is None else seq
    width = window(length)
    if not 8 <= length <= 65_536:
        raise UsageError(f"text(seq={length}): 8 to 65536 tokens")
    corpus = read_corpus(path, tokens=tokens, vocabulary=need.vocabulary, megabytes=megabytes)
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

"""Text from any file, cut into windows for the model's task; one window in ten is held out for tests."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.errors import UsageError
from syncline.train.data import text_tasks
from syncline.train.data.base import Batch, Data, Need, data
from syncline.train.data.corpus import Corpus, read_corpus

_HELD_OUT = 10


@dataclass(frozen=True)
class Windows:
    """Windows of a token stream; `task(self, indices, epoch)` makes a batch of them."""

    stream: Tensor
    starts: Tensor
    labels: Tensor
    width: int
    vocabulary: int
    seed: int
    held_out: bool
    task: Callable[["Windows", Tensor, int], Batch] = field(repr=False)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`; masks and questions vary with the epoch, in training."""
        return self.task(self, indices, 0 if self.held_out else epoch)

    def tokens(self, indices: Tensor) -> Tensor:
        """The raw windows, [n, width]."""
        return self.stream[self.starts[indices].unsqueeze(1) + torch.arange(self.width, device="cpu")]


@data("text", tasks=tuple(text_tasks.TASKS))
def text(
    need: Need, *, seed: int, path: str | None = None, seq: int | None = None, tokens: str = "words",
    megabytes: float = 3.0, classes: int = 8,
) -> Data:  # fmt: skip
    """A file or folder (default: this Python's own library), as `words` or `bytes`, `seq` tokens per sample.

    The classification task has `classes` classes: top-level files or folders.
    """
    task = text_tasks.TASKS[need.task]
    length = need.sequence if seq is None else seq
    width = task.window(length)
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
        splits.append(Windows(stream, starts, labels, width, need.vocabulary, seed, held_out, task.batch))
    return Data(
        name="text",
        task=need.task,
        train=splits[0],
        test=splits[1],
        samples="sequences",
        classes=classes if need.task == "text-classes" else 0,
        sequence=length,
    )


def _largest(corpus: Corpus, classes: int, width: int) -> Corpus:
    """The largest groups, all cut to one length, so that classes are equally frequent."""
    by_size = sorted(corpus.groups, key=lambda name: (-len(corpus.groups[name]), name))[:classes]
    if classes < 2 or len(by_size) < classes or len(corpus.groups[by_size[-1]]) < _HELD_OUT * width:
        raise UsageError(
            f"text(classes={classes}): the classes are top-level files or folders; this text has"
            f" {len(corpus.groups)}, and each class needs {_HELD_OUT * width} tokens: give a folder with more, or"
            " fewer classes (at least 2)"
        )
    shortest = len(corpus.groups[by_size[-1]])
    return Corpus({name: corpus.groups[name][:shortest] for name in sorted(by_size)})


def _cut(corpus: Corpus, width: int, *, held_out: bool, by_group: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(stream, window starts, window labels): every tenth window is held out, the others are trained on."""
    pieces = list(corpus.groups.values()) if by_group else [corpus.stream]
    starts, labels, offset = [], [], 0
    for label, piece in enumerate(pieces):
        number = torch.arange(len(piece) // width, device="cpu")
        number = number[(number % _HELD_OUT == _HELD_OUT - 1) == held_out]
        starts.append(offset + number * width)
        labels.append(torch.full_like(number, label))
        offset += len(piece)
    return torch.cat(pieces), torch.cat(starts), torch.cat(labels)

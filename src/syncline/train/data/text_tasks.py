"""Training tasks on windows of text: next word, masked words, origin, question answering, translation.

All choices (masks, questions, lengths) are functions of (seed, epoch, the window's index).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from syncline.train.data.base import Batch
from syncline.train.data.corpus import END, MASK, PADDING, SPECIAL, START
from syncline.train.data.counter import bits, uniform

_NOT_ASKED = -100
_MASKED = 0.15
_LONGEST_ANSWER = 8


class _Windows(Protocol):
    @property
    def vocabulary(self) -> int: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def seed(self) -> int: ...
    @property
    def held_out(self) -> bool: ...
    def __len__(self) -> int: ...
    def tokens(self, indices: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class TextTask:
    """`window(seq)` is the number of text tokens in a sample of `seq` tokens; `batch` makes the tensors."""

    window: Callable[[int], int]
    batch: Callable[..., Batch]


def _stream(windows: _Windows, epoch: int, draw: int) -> int:
    return 1024 + 8 * (2 * epoch + windows.held_out) + draw


def _frame(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`[START] a [END] b [END]`, and the segment (0, then 1) of every token."""
    n = len(parts[0])
    tokens, segments = [torch.full((n, 1), START, device="cpu")], [torch.zeros(n, 1, dtype=torch.int64, device="cpu")]
    for segment, part in enumerate(parts):
        tokens += [part, torch.full((n, 1), END, device="cpu")]
        segments.append(torch.full((n, part.shape[1] + 1), segment, device="cpu"))
    return torch.cat(tokens, dim=1), torch.cat(segments, dim=1)


def _language_model(windows: _Windows, indices: Tensor, epoch: int) -> Batch:
    del epoch
    tokens = windows.tokens(indices)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _origin(windows: _Windows, indices: Tensor, epoch: int) -> Batch:
    """The group of the text that a window comes from."""
    del epoch
    return *_frame([windows.tokens(indices)]), windows.labels[indices]


def _pretraining(windows: _Windows, indices: Tensor, epoch: int) -> Batch:
    """Masked words, and whether the second half is the first's continuation or from elsewhere (half of them)."""
    own = windows.tokens(indices)
    half = own.shape[1] // 2
    draws = bits(windows.seed, _stream(windows, epoch, 0), indices, 2)
    swapped = draws[:, 0] % 2
    elsewhere = windows.tokens(draws[:, 1] % len(windows))[:, half:]
    second = torch.where(swapped.unsqueeze(1) == 1, elsewhere, own[:, half:])
    tokens, segments = _frame([own[:, :half], second])
    # Exactly 15% of every sample's words, so that equal shards average to the whole batch's loss.
    chance = uniform(windows.seed, _stream(windows, epoch, 1), indices, tokens.shape[1])
    chance = chance.masked_fill((tokens == START) | (tokens == END), 2.0)
    chosen = chance.argsort(dim=1, stable=True)[:, : max(1, round(_MASKED * 2 * half))]
    targets = torch.full_like(tokens, _NOT_ASKED).scatter(1, chosen, tokens.gather(1, chosen))
    # Of the chosen words 80% are masked, 10% become any other word, 10% stay.
    fate = uniform(windows.seed, _stream(windows, epoch, 2), indices, chosen.shape[1])
    other = bits(windows.seed, _stream(windows, epoch, 3), indices, chosen.shape[1])
    other = SPECIAL + other % (windows.vocabulary - SPECIAL)
    words = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, other, tokens.gather(1, chosen)))
    return tokens.scatter(1, chosen, words), segments, targets, swapped


def _question(windows: _Windows, indices: Tensor, epoch: int) -> Batch:
    """A passage; the question is the first and last word of a span in it, the answer its start and end."""
    passage = windows.tokens(indices)
    n, length = passage.shape
    once = ((passage.unsqueeze(2) == passage.unsqueeze(1)).sum(2) == 1) & (passage >= SPECIAL)
    # Words that occur once can be asked for; the first word, where there is none.
    askable = once | ((~once.any(1, keepdim=True)) & (torch.arange(length, device="cpu") == 0))
    rank = uniform(windows.seed, _stream(windows, epoch, 4), indices, length)
    start = rank.masked_fill(~askable, -1.0).argmax(1)
    ahead = torch.arange(length, device="cpu") - start.unsqueeze(1)
    near = askable & (ahead >= 0) & (ahead < _LONGEST_ANSWER)
    end = uniform(windows.seed, _stream(windows, epoch, 5), indices, length).masked_fill(~near, -1.0).argmax(1)
    row = torch.arange(n, device="cpu")
    question = torch.stack((passage[row, start], passage[row, end]), dim=1)
    tokens, segments = _frame([question, passage])
    offset = 1 + 2 + 1
    return tokens, segments, start + offset, end + offset


def _translation(windows: _Windows, indices: Tensor, epoch: int) -> Batch:
    """Translation into an invented language: each word is replaced by a fixed other one, neighbours are swapped."""
    del epoch
    source = windows.tokens(indices)
    n, most = source.shape
    # Lengths from half to full, even, so that padding occurs and every word has its neighbour.
    shorter = bits(windows.seed, _stream(windows, 0, 6), indices, 1) % (most // 4 + 1)
    kept = torch.arange(most, device="cpu") < most - 2 * shorter
    words = windows.vocabulary - SPECIAL
    foreign = torch.where(source < SPECIAL, source, SPECIAL + (source - SPECIAL + words // 2) % words)
    foreign = foreign.unflatten(1, (-1, 2)).flip(2).flatten(1).masked_fill(~kept, PADDING)
    edge = torch.full((n, 1), PADDING, device="cpu")
    shifted = torch.cat((torch.full((n, 1), START, device="cpu"), foreign), dim=1)
    target = torch.cat((foreign, edge), dim=1).scatter(1, kept.sum(1, keepdim=True), END)
    return source.masked_fill(~kept, PADDING), shifted, target


TASKS: dict[str, TextTask] = {
    "lm": TextTask(lambda seq: seq + 1, _language_model),
    "text-classes": TextTask(lambda seq: seq - 2, _origin),
    "pretraining": TextTask(lambda seq: 2 * ((seq - 3) // 2), _pretraining),
    "qa": TextTask(lambda seq: seq - 5, _question),
    # The target has one token more than the source: its end.
    "translation": TextTask(lambda seq: 2 * ((seq - 1) // 2), _translation),
}

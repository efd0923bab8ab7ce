"""Training tasks on windows of text: next word, masked words, origin, question answering, translation.

All choices (masks, questions, lengths) are functions of (seed, epoch, the window's index).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncline.train.data.base import Batch
from syncline.train.data.counter import bits, uniform

PADDING, UNKNOWN, START, END, MASK = range(5)
SPECIAL = 5
_NOT_ASKED = -100
_MASKED = 0.15
_LONGEST_ANSWER = 8


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

    @property
    def varies(self) -> bool:
        """Whether samples differ between epochs: masks and questions are drawn again."""
        return not self.held_out and self.task in (_pretraining, _question)

    def batch(self, indices: Tensor, *, epoch: int = 0) -> Batch:
        """The samples at `indices`; masks and questions vary with the epoch, in training."""
        return self.task(self, indices, 0 if self.held_out else epoch)

    def random_stream(self, epoch: int, draw: int) -> int:
        """The stream of random numbers for one kind of choice in an epoch."""
        return 1024 + 8 * (2 * epoch + self.held_out) + draw

    def tokens(self, indices: Tensor) -> Tensor:
        """The raw windows, [n, width]."""
        return self.stream[self.starts[indices].unsqueeze(1) + torch.arange(self.width, device="cpu")]


def _frame(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`[START] a [END] b [END]`, and the segment (0, then 1) of every token."""
    n = len(parts[0])
    tokens, segments = [torch.full((n, 1), START, device="cpu")], [torch.zeros(n, 1, dtype=torch.int64, device="cpu")]
    for segment, part in enumerate(parts):
        tokens += [part, torch.full((n, 1), END, device="cpu")]
        segments.append(torch.full((n, part.shape[1] + 1), segment, device="cpu"))
    return torch.cat(tokens, dim=1), torch.cat(segments, dim=1)


def _language_model(windows: Windows, indices: Tensor, epoch: int) -> Batch:
    tokens = windows.tokens(indices)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _origin(windows: Windows, indices: Tensor, epoch: int) -> Batch:
    """The group of the text that a window comes from."""
    return *_frame([windows.tokens(indices)]), windows.labels[indices]


def _pretraining(windows: Windows, indices: Tensor, epoch: int) -> Batch:
    """Masked words, and whether the second half is the first's continuation or from elsewhere (half of them)."""
    own = windows.tokens(indices)
    half = own.shape[1] // 2
    draws = bits(windows.seed, windows.random_stream(epoch, 0), indices, 2)
    swapped = draws[:, 0] % 2
    elsewhere = windows.tokens(draws[:, 1] % len(windows))[:, half:]
    second = torch.where(swapped.unsqueeze(1) == 1, elsewhere, own[:, half:])
    tokens, segments = _frame([own[:, :half], second])
    # Exactly 15% of every sample's words, so that equal shards average to the whole batch's loss.
    chance = uniform(windows.seed, windows.random_stream(epoch, 1), indices, tokens.shape[1])
    chance = chance.masked_fill((tokens == START) | (tokens == END), 2.0)
    chosen = chance.argsort(dim=1, stable=True)[:, : max(1, round(_MASKED * 2 * half))]
    targets = torch.full_like(tokens, _NOT_ASKED).scatter(1, chosen, tokens.gather(1, chosen))
    # Of the chosen words 80% are masked, 10% become any other word, 10% stay.
    fate = uniform(windows.seed, windows.random_stream(epoch, 2), indices, chosen.shape[1])
    other = bits(windows.seed, windows.random_stream(epoch, 3), indices, chosen.shape[1])
    other = SPECIAL + other % (windows.vocabulary - SPECIAL)
    words = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, other, tokens.gather(1, chosen)))
    return tokens.scatter(1, chosen, words), segments, targets, swapped


def _question(windows: Windows, indices: Tensor, epoch: int) -> Batch:
    """A passage; the question is the first and last word of a span in it, the answer its start and end."""
    passage = windows.tokens(indices)
    n, length = passage.shape
    once = ((passage.unsqueeze(2) == passage.unsqueeze(1)).sum(2) == 1) & (passage >= SPECIAL)
    # Words that occur once can be asked for; the first word, where there is none.
    askable = once | ((~once.any(1, keepdim=True)) & (torch.arange(length, device="cpu") == 0))
    rank = uniform(windows.seed, windows.random_stream(epoch, 4), indices, length)
    start = rank.masked_fill(~askable, -1.0).argmax(1)
    ahead = torch.arange(length, device="cpu") - start.unsqueeze(1)
    near = askable & (ahead >= 0) & (ahead < _LONGEST_ANSWER)
    end = uniform(windows.seed, windows.random_stream(epoch, 5), indices, length).masked_fill(~near, -1.0).argmax(1)
    row = torch.arange(n, device="cpu")
    question = torch.stack((passage[row, start], passage[row, end]), dim=1)
    tokens, segments = _frame([question, passage])
    offset = 1 + 2 + 1
    return tokens, segments, start + offset, end + offset


def _translation(windows: Windows, indices: Tensor, epoch: int) -> Batch:
    """Translation into an invented language: each word is replaced by a fixed other one, neighbours are swapped."""
    source = windows.tokens(indices)
    n, most = source.shape
    # Lengths from half to full, even, so that padding occurs and every word has its neighbour.
    shorter = bits(windows.seed, windows.random_stream(0, 6), indices, 1) % (most // 4 + 1)
    kept = torch.arange(most, device="cpu") < most - 2 * shorter
    words = windows.vocabulary - SPECIAL
    foreign = torch.where(source < SPECIAL, source, SPECIAL + (source - SPECIAL + words // 2) % words)
    foreign = foreign.unflatten(1, (-1, 2)).flip(2).flatten(1).masked_fill(~kept, PADDING)
    edge = torch.full((n, 1), PADDING, device="cpu")
    shifted = torch.cat((torch.full((n, 1), START, device="cpu"), foreign), dim=1)
    target = torch.cat((foreign, edge), dim=1).scatter(1, kept.sum(1, keepdim=True), END)
    return source.masked_fill(~kept, PADDING), shifted, target


# Task -> (the number of text tokens in a sample of `seq` tokens, how a batch is made).
TASKS: dict[str, tuple[Callable[[int], int], Callable[[Windows, Tensor, int], Batch]]] = {
    "lm": (lambda seq: seq + 1, _language_model),
    "text-classes": (lambda seq: seq - 2, _origin),
    "pretraining": (lambda seq: 2 * ((seq - 3) // 2), _pretraining),
    "qa": (lambda seq: seq - 5, _question),
    # The target has one token more than the source: its end.
    "translation": (lambda seq: 2 * ((seq - 1) // 2), _translation),
}

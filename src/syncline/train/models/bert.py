"""BERT as published, from tiny to base, with a head for classification, question answering, or pretraining."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.pipeline.blocks import Part, Split
from syncline.train.data.base import Data, Need
from syncline.train.models.attention import attend, visible
from syncline.train.models.base import MODELS, Blueprint, Built, Task, choose, one_phase, right_class, token_accuracy

_NOT_ASKED = -100


@dataclass(frozen=True)
class BertSize:
    """The sizes of an encoder; `sequence` is the default length of its samples."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int
    dropout: float


# Small sizes train without dropout, so that every strategy computes the same losses.
SIZES = {
    "tiny": BertSize(64, 2, 2, 2048, 128, 48, 0.0),
    "mini": BertSize(256, 4, 4, 8192, 512, 64, 0.0),
    "small": BertSize(512, 4, 8, 30522, 512, 128, 0.1),
    "base": BertSize(768, 12, 12, 30522, 512, 128, 0.1),
}


class Layer(nn.Module):
    """One post-norm encoder layer: 16 parameter tensors."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        width = size.width
        self.heads, self.rate = size.heads, size.dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The layer's output, [batch, length, width]."""
        return self.feed_forward(*self.attention(x, mask))[0]

    def attention(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The first sublayer: its output, and the mask for the next one."""
        rate = self.rate if self.training else 0.0
        mixed = attend(self.query(x), self.key(x), self.value(x), heads=self.heads, mask=mask > 0, dropout=rate)
        return self.norm1(x + F.dropout(self.mix(mixed), rate)), mask

    def feed_forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The second sublayer: its output, and the mask for the next one."""
        rate = self.rate if self.training else 0.0
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), rate)), mask

    def split(self) -> tuple[Part, Part]:
        """Both sublayers as modules."""
        return (
            Part(self.attention, self.query, self.key, self.value, self.mix, self.norm1),
            Part(self.feed_forward, self.up, self.down, self.norm2),
        )


class Encoder(nn.Module):
    """Embeddings of words, positions and segments, and the layers."""

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        self.size = size
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.segments = nn.Embedding(2, size.width)
        self.norm = nn.LayerNorm(size.width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Hidden states, [batch, length, width]; token 0 is padding."""
        x, mask = self.embed(tokens, segments)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def embed(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the first layer, and the mask that hides padding: 0 there, else 1.

        It is not boolean, because stages of a pipeline can send only floats to each other with torch 2.11.
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.words(tokens) + self.positions(place) + self.segments(segments)
        mask = visible(tokens, padding=0).to(x.dtype)
        # The mode of a part, not of the whole encoder: frozen embeddings are in evaluation mode while layers train.
        return F.dropout(self.norm(x), self.size.dropout, self.norm.training), mask

    def split(self, head: Part, **about: Any) -> Split:
        """Embeddings, the sublayers of each layer, and a head that takes (hidden states, mask)."""
        embedding = Part(self.embed, self.words, self.positions, self.segments, self.norm)
        layers = [layer.split() for layer in self.layers if isinstance(layer, Layer)]
        return Split([embedding], layers, [head], inputs=2, **about)


class Classification(Task):
    """A text's class from the first token, through the pooler."""

    def __init__(self, encoder: Encoder, data: Data) -> None:
        super().__init__()
        width = encoder.size.width
        self.encoder = encoder
        self.pooler = nn.Linear(width, width)
        self.classes = nn.Linear(width, data.classes)

    def logits(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.encoder(tokens, segments))

    def head(self, hidden: Tensor, *_: Tensor) -> Tensor:
        """Class scores from the hidden states."""
        pooled = F.dropout(torch.tanh(self.pooler(hidden[:, 0])), self.encoder.size.dropout, self.training)
        scores: Tensor = self.classes(pooled)
        return scores

    def split(self) -> Split:
        """Embeddings, sublayers, and the pooler with the classes."""
        head = Part(self.head, self.pooler, self.classes)
        return self.encoder.split(head, loss=F.cross_entropy, correct=right_class)

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return F.cross_entropy(self.logits(tokens, segments), labels)

    def correct(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        """Texts put in the right class."""
        return right_class(self.logits(tokens, segments), labels)


class QuestionAnswering(Task):
    """Where the answer starts and ends, scored at every token; no pooler."""

    def __init__(self, encoder: Encoder, data: Data) -> None:
        super().__init__()
        self.encoder = encoder
        self.span = nn.Linear(encoder.size.width, 2)

    def logits(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Scores of every token as the start, and as the end: [batch, length, 2]."""
        return self.head(self.encoder(tokens, segments))

    def head(self, hidden: Tensor, *_: Tensor) -> Tensor:
        """The scores from the hidden states."""
        scores: Tensor = self.span(hidden)
        return scores

    def forward(self, tokens: Tensor, segments: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The mean of both cross-entropies."""
        return _span_loss(self.logits(tokens, segments), start, end)

    def correct(self, tokens: Tensor, segments: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, int]:
        """Exact matches: both ends right."""
        return _exact_matches(self.logits(tokens, segments), start, end)

    def split(self) -> Split:
        """Embeddings, sublayers, and the scores of the span."""
        return self.encoder.split(Part(self.head, self.span), loss=_span_loss, correct=_exact_matches)


def _span_loss(scores: Tensor, start: Tensor, end: Tensor) -> Tensor:
    first, last = scores.unbind(-1)
    return (F.cross_entropy(first, start) + F.cross_entropy(last, end)) / 2


def _exact_matches(scores: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, int]:
    first, last = scores.unbind(-1)
    return ((first.argmax(1) == start) & (last.argmax(1) == end)).sum(), len(scores)


class Pretraining(Task):
    """Masked words, with the word embedding as output weights, and whether the second half follows the first."""

    def __init__(self, encoder: Encoder, data: Data) -> None:
        super().__init__()
        width = encoder.size.width
        self.encoder = encoder
        self.pooler = nn.Linear(width, width)
        self.follows = nn.Linear(width, 2)
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(encoder.size.vocabulary))

    def words(self, hidden: Tensor) -> Tensor:
        """Scores of every word of the vocabulary."""
        hidden = self.norm(F.gelu(self.transform(hidden)))
        return F.linear(hidden, self.encoder.words.weight, self.bias)

    def forward(self, tokens: Tensor, segments: Tensor, targets: Tensor, random_next: Tensor) -> Tensor:
        """The sum of both losses; only masked places are scored."""
        hidden = self.encoder(tokens, segments)
        asked = targets != _NOT_ASKED
        words = F.cross_entropy(self.words(hidden[asked]), targets[asked])
        follows = self.follows(torch.tanh(self.pooler(hidden[:, 0])))
        return words + F.cross_entropy(follows, random_next)

    def correct(self, tokens: Tensor, segments: Tensor, targets: Tensor, random_next: Tensor) -> tuple[Tensor, int]:
        """Masked words that were guessed."""
        hidden = self.encoder(tokens, segments)
        return token_accuracy(self.words(hidden), targets, ignore=_NOT_ASKED)


# Head -> (the task that its data must have, its module).
HEADS: dict[str, tuple[str, Callable[[Encoder, Data], Task]]] = {
    "classification": ("text-classes", Classification),
    "qa": ("qa", QuestionAnswering),
    "pretraining": ("pretraining", Pretraining),
}


@MODELS.register("bert")
def bert(
    *, size: str = "tiny", head: str = "classification", dropout: float | None = None, layers: int | None = None
) -> Blueprint:
    """BERT of size tiny, mini, small or base, with head classification, qa (start and end of a span) or pretraining."""
    given = {"layers": layers, "dropout": dropout}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    chosen = replace(choose("size", size, SIZES), **changes)
    task, make = choose("head", head, HEADS)
    if not 1 <= chosen.layers <= 96 or not 0 <= chosen.dropout < 1:
        raise UsageError(f"bert({layers=}, {dropout=}): 1 to 96 layers, dropout from 0 to below 1")

    def build(data: Data) -> Built:
        if data.sequence > chosen.positions:
            raise UsageError(
                f"bert(size={size}) reads at most {chosen.positions} tokens, the data has {data.sequence}:"
                f" give the data seq={chosen.positions} or less"
            )
        built = make(Encoder(chosen), data)
        for part in built.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear):
                nn.init.zeros_(part.bias)
        return one_phase(built, optimizer=f"adamw(lr={0.0001 if size == 'base' else 0.001})")

    need = Need(task, vocabulary=chosen.vocabulary, sequence=chosen.sequence)
    return Blueprint(need, "text", build)

"""GPT-2: a pre-norm decoder with learned positions, and the word embedding as output weights."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.pipeline.blocks import Part, Split
from syncline.train.data.base import Data, Need
from syncline.train.models.attention import AttentionSublayer, FeedForwardSublayer
from syncline.train.models.base import MODELS, Blueprint, Built, Task, choose, one_phase, token_accuracy

_UNKNOWN = 0


@dataclass(frozen=True)
class _Size:
    width: int
    layers: int
    heads: int
    vocabulary: int
    positions: int
    sequence: int
    dropout: float


# `tiny` trains without dropout, so that every strategy computes the same losses.
_SIZES = {"tiny": _Size(64, 2, 4, 2048, 128, 32, 0.0), "small": _Size(768, 12, 12, 50257, 1024, 256, 0.1)}


class Gpt2(Task):
    """The next token from those before it."""

    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList()
        for _ in range(size.layers):
            self.layers.append(AttentionSublayer(size.width, size.heads, dropout=size.dropout))
            activation = nn.GELU(approximate="tanh")
            mlp = FeedForwardSublayer(size.width, 4 * size.width, activation=activation, dropout=size.dropout)
            self.layers.append(mlp)
        self.norm = nn.LayerNorm(size.width)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of every word at every place."""
        x = self._embed(tokens)
        for layer in self.layers:
            x = layer(x, causal=True) if isinstance(layer, AttentionSublayer) else layer(x)
        return self._score(self.norm(x))

    def _embed(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.words(tokens) + self.positions(place))
        return x

    def _score(self, x: Tensor) -> Tensor:
        return F.linear(x, self.words.weight)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The mean cross-entropy of the next tokens."""
        return _loss(self.logits(tokens), following)

    def correct(self, tokens: Tensor, following: Tensor) -> tuple[Tensor, int]:
        """Next tokens guessed."""
        return token_accuracy(self.logits(tokens), following, ignore=_UNKNOWN)

    def split(self) -> Split:
        """Embedding, attention and MLP of each layer, norm, and the scores: these share the embedding's weights."""
        embedding = Part(self._embed, self.words, self.positions, self.dropout)
        pairs = zip(self.layers[::2], self.layers[1::2], strict=True)
        blocks = [(Part(partial(attention, causal=True), attention), mlp) for attention, mlp in pairs]
        correct = partial(token_accuracy, ignore=_UNKNOWN)
        return Split([embedding], blocks, [self.norm, Part(self._score, self.words)], loss=_loss, correct=correct)


def _loss(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


@MODELS.register("gpt2")
def gpt2(*, size: str = "tiny") -> Blueprint:
    """GPT-2: `small` as published (12 layers of 768, 50,257 words, 124.4 M parameters), `tiny` for a CPU."""
    chosen = choose("size", size, _SIZES)

    def build(data: Data) -> Built:
        if not 2 <= data.sequence <= chosen.positions:
            raise UsageError(f"gpt2(size={size}) needs sequences of 2 to {chosen.positions} tokens: set seq")
        return one_phase(Gpt2(chosen), optimizer=f"adamw(lr={0.0006 if size == 'small' else 0.002})")

    need = Need("lm", vocabulary=chosen.vocabulary, sequence=chosen.sequence)
    return Blueprint(need, "text", build)

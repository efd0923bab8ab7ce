"""BERT's encoder as published (separate query, key and value), in sizes from tiny to base."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.train.models.attention import attend, visible


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
        rate = self.rate if self.training else 0.0
        mixed = attend(self.query(x), self.key(x), self.value(x), heads=self.heads, mask=mask, dropout=rate)
        x = self.norm1(x + F.dropout(self.mix(mixed), rate))
        out: Tensor = self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), rate))
        return out


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
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.words(tokens) + self.positions(place) + self.segments(segments)
        x = F.dropout(self.norm(x), self.size.dropout, self.training)
        mask = visible(tokens, padding=0)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def initialise(module: nn.Module) -> None:
    """BERT's initialisation: normal weights of deviation 0.02, no biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)

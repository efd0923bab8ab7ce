"""Multi-head attention and the pre-norm sublayers of the transformer models."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head attention with one fused projection for query, key and value (four parameter tensors)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.inside = nn.Linear(width, 3 * width)
        self.outside = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.inside.weight)
        nn.init.zeros_(self.inside.bias)
        nn.init.zeros_(self.outside.bias)

    def forward(
        self, x: Tensor, *, memory: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Attend from `x` to itself, or to `memory`; `mask` is true where a key may be looked at."""
        width = x.shape[-1]
        if memory is None:
            query, key, value = self.inside(x).chunk(3, dim=-1)
        else:
            weight, bias = self.inside.weight, self.inside.bias
            query = F.linear(x, weight[:width], bias[:width])
            key, value = F.linear(memory, weight[width:], bias[width:]).chunk(2, dim=-1)
        mixed = attend(query, key, value, heads=self.heads, mask=mask, causal=causal)
        out: Tensor = self.outside(mixed)
        return out


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, heads: int, mask: Tensor | None = None, causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention of [batch, length, width] tensors, split over `heads`."""

    def split(x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return parts

    mixed = F.scaled_dot_product_attention(
        split(query), split(key), split(value), attn_mask=mask, is_causal=causal, dropout_p=dropout
    )
    return mixed.transpose(1, 2).flatten(2)


class AttentionSublayer(nn.Module):
    """`x + attention(norm(x))`: one unit of a pre-norm transformer."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, *, memory: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """The sublayer's output, [batch, length, width]."""
        mixed = self.attention(self.norm(x), memory=memory, mask=mask, causal=causal)
        out: Tensor = x + self.dropout(mixed)
        return out


class FeedForwardSublayer(nn.Module):
    """`x + mlp(norm(x))`: the other unit."""

    def __init__(self, width: int, hidden: int, *, activation: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), activation, nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        for module in self.mlp:
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The sublayer's output, [batch, length, width]."""
        out: Tensor = x + self.mlp(self.norm(x))
        return out


def visible(tokens: Tensor, *, padding: int) -> Tensor:
    """The attention mask that hides padding, [batch, 1, 1, length]."""
    return (tokens != padding)[:, None, None, :]


def sinusoids(length: int, width: int, *, like: Tensor) -> Tensor:
    """The fixed position signal of the original transformer, [length, width]."""
    position = torch.arange(length, device=like.device, dtype=torch.float32).unsqueeze(1)
    rate = 10_000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = position * rate
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).to(like.dtype)

"""The transformer of machine translation (encoder and decoder, one shared embedding), and a language model of it."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.pipeline.blocks import Part, Split
from syncline.train.data.base import Data, Need
from syncline.train.models.attention import AttentionSublayer, FeedForwardSublayer, sinusoids, visible
from syncline.train.models.base import MODELS, Blueprint, Built, Task, choose, one_phase, token_accuracy

_PADDING = 0


@dataclass(frozen=True)
class _Size:
    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    dropout: float


# `tiny` trains without dropout, so that every strategy computes the same losses.
_SIZES = {"tiny": _Size(64, 2, 4, 128, 2048, 32, 0.0), "base": _Size(512, 6, 8, 2048, 33708, 64, 0.1)}


class _Layer(nn.Module):
    """Self-attention, for a decoder attention to the memory, and the feed-forward sublayer."""

    def __init__(self, size: _Size, *, cross: bool) -> None:
        super().__init__()
        self.own = AttentionSublayer(size.width, size.heads, dropout=size.dropout)
        self.cross = AttentionSublayer(size.width, size.heads, dropout=size.dropout) if cross else None
        self.mlp = FeedForwardSublayer(size.width, size.hidden, activation=nn.ReLU(), dropout=size.dropout)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False, memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x = self.own(x, mask=mask, causal=causal)
        if self.cross is not None:
            x = self.cross(x, memory=memory, mask=memory_mask)
        out: Tensor = self.mlp(x)
        return out


class _Embedding(nn.Module):
    """Word vectors and position signal going in; the same word vectors as output weights."""

    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.dropout = nn.Dropout(size.dropout)
        nn.init.normal_(self.words.weight, std=size.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.words(tokens)
        length, width = vectors.shape[1:]
        out: Tensor = self.dropout(vectors * width**0.5 + sinusoids(length, width, like=vectors))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.words.weight)


class _LanguageModel(Task):
    """Decoder layers alone: the next token from those before it."""

    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.embedding = _Embedding(size)
        self.layers = nn.ModuleList(_Layer(size, cross=False) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.embedding.logits(self.norm(x))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        return _next_token_loss(self.logits(tokens), following)

    def correct(self, tokens: Tensor, following: Tensor) -> tuple[Tensor, int]:
        return token_accuracy(self.logits(tokens), following, ignore=_PADDING)

    def split(self) -> Split:
        """Embedding, attention and MLP of each layer, norm, and the scores: these share the embedding's weights."""
        layers = [layer for layer in self.layers if isinstance(layer, _Layer)]
        blocks = [(Part(partial(layer.own, causal=True), layer.own), layer.mlp) for layer in layers]
        head = Part(self.embedding.logits, self.embedding.words)
        correct = partial(token_accuracy, ignore=_PADDING)
        return Split([self.embedding], blocks, [self.norm, head], loss=_next_token_loss, correct=correct)


def _next_token_loss(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


class _Translation(Task):
    """Encoder and decoder; label smoothing 0.1 as published."""

    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.embedding = _Embedding(size)
        self.encoder = nn.ModuleList(_Layer(size, cross=False) for _ in range(size.layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.decoder = nn.ModuleList(_Layer(size, cross=True) for _ in range(size.layers))
        self.decoder_norm = nn.LayerNorm(size.width)

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        mask = visible(source, padding=_PADDING)
        memory = self.embedding(source)
        for layer in self.encoder:
            memory = layer(memory, mask=mask)
        memory = self.encoder_norm(memory)
        x = self.embedding(target)
        for layer in self.decoder:
            # Padding comes after a target's words, where a causal decoder never looks from them.
            x = layer(x, causal=True, memory=memory, memory_mask=mask)
        return self.embedding.logits(self.decoder_norm(x))

    def forward(self, source: Tensor, shifted: Tensor, target: Tensor) -> Tensor:
        scores = self.logits(source, shifted).transpose(1, 2)
        losses = F.cross_entropy(scores, target, ignore_index=_PADDING, label_smoothing=0.1, reduction="none")
        # The mean of the sentences' means: equal shards then average to the whole batch's loss exactly.
        return (losses.sum(1) / (target != _PADDING).sum(1)).mean()

    def correct(self, source: Tensor, shifted: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return token_accuracy(self.logits(source, shifted), target, ignore=_PADDING)


_TASKS: dict[str, type[_LanguageModel] | type[_Translation]] = {"translation": _Translation, "lm": _LanguageModel}


@MODELS.register("transformer")
def transformer(*, size: str = "tiny", task: str = "translation") -> Blueprint:
    """Encoder and decoder, `base` as published (6+6 layers of 512, 33,708 words); task `translation` or `lm`."""
    chosen = choose("size", size, _SIZES)
    kind = choose("task", task, _TASKS)

    def build(data: Data) -> Built:
        if data.sequence < 2:
            raise UsageError(f"transformer needs sequences of 2 tokens or more, not {data.sequence}")
        rate = 0.0003 if size == "base" else 0.002
        return one_phase(kind(chosen), optimizer=f"adam(lr={rate}, beta2=0.98, eps=1e-09)")

    need = Need(task, vocabulary=chosen.vocabulary, sequence=chosen.sequence)
    return Blueprint(need, "text", build)

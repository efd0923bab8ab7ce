"""BERT with a head for classification, question answering, or pretraining (masked words and next sentence)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from syncline.errors import UsageError
from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, Built, Task, choose, one_phase, token_accuracy
from syncline.train.models.bert_encoder import SIZES, Encoder, initialise

_NOT_ASKED = -100


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
        first = self.encoder(tokens, segments)[:, 0]
        pooled = F.dropout(torch.tanh(self.pooler(first)), self.encoder.size.dropout, self.training)
        scores: Tensor = self.classes(pooled)
        return scores

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        return F.cross_entropy(self.logits(tokens, segments), labels)

    def correct(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        """Texts put in the right class."""
        return (self.logits(tokens, segments).argmax(1) == labels).sum(), len(labels)


class QuestionAnswering(Task):
    """Where the answer starts and ends, scored at every token; no pooler."""

    def __init__(self, encoder: Encoder, data: Data) -> None:
        super().__init__()
        self.encoder = encoder
        self.span = nn.Linear(encoder.size.width, 2)

    def logits(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of every token as the start, and as the end."""
        start, end = self.span(self.encoder(tokens, segments)).unbind(-1)
        return start, end

    def forward(self, tokens: Tensor, segments: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The mean of both cross-entropies."""
        first, last = self.logits(tokens, segments)
        return (F.cross_entropy(first, start) + F.cross_entropy(last, end)) / 2

    def correct(  # type: ignore[override]
        self, tokens: Tensor, segments: Tensor, start: Tensor, end: Tensor
    ) -> tuple[Tensor, int]:
        """Exact matches: both ends right."""
        first, last = self.logits(tokens, segments)
        return ((first.argmax(1) == start) & (last.argmax(1) == end)).sum(), len(tokens)


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

    def correct(  # type: ignore[override]
        self, tokens: Tensor, segments: Tensor, targets: Tensor, random_next: Tensor
    ) -> tuple[Tensor, int]:
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
    """Sizes tiny, mini, small, base; heads classification, qa (start and end of a span), pretraining."""
    chosen = choose("size", size, SIZES)
    task, make = choose("head", head, HEADS)
    if layers is not None:
        chosen = replace(chosen, layers=layers)
    if dropout is not None:
        chosen = replace(chosen, dropout=dropout)
    if not 1 <= chosen.layers <= 96 or not 0 <= chosen.dropout < 1:
        raise UsageError(f"bert({layers=}, {dropout=}): 1 to 96 layers, dropout from 0 to below 1")

    def build(data: Data) -> Built:
        if data.sequence > chosen.positions:
            raise UsageError(
                f"bert(size={size}) reads at most {chosen.positions} tokens, the data has {data.sequence}:"
                f" give the data seq={chosen.positions} or less"
            )
        built = make(Encoder(chosen), data)
        initialise(built)
        return one_phase(built, optimizer=f"adamw(lr={0.0001 if size == 'base' else 0.001})")

    need = Need(task, vocabulary=chosen.vocabulary, sequence=chosen.sequence)
    return Blueprint(need, "text", build)

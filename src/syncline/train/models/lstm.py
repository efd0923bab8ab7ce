"""A two-layer LSTM language model, with the word embedding as output weights."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.train.data.base import Data, Need
from syncline.train.models.base import MODELS, Blueprint, Built, Task, choose, one_phase, token_accuracy


@dataclass(frozen=True)
class _Size:
    width: int
    vocabulary: int
    sequence: int
    dropout: float


# `tiny` trains without dropout, so that every strategy computes the same losses.
_SIZES = {"tiny": _Size(96, 2048, 32, 0.0), "paper": _Size(1500, 33278, 35, 0.65)}


class LanguageModel(Task):
    """The next token from those before it. Every window starts from a zero state: samples are independent."""

    def __init__(self, size: _Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, num_layers=2, batch_first=True, dropout=size.dropout)
        self.output = nn.Linear(size.width, size.vocabulary)
        self.output.weight = self.words.weight
        self.dropout = nn.Dropout(size.dropout)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of every word at every place."""
        hidden, _ = self.lstm(self.dropout(self.words(tokens)))
        scores: Tensor = self.output(self.dropout(hidden))
        return scores

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The mean cross-entropy of the next tokens."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), following.flatten())

    def correct(self, tokens: Tensor, following: Tensor) -> tuple[Tensor, int]:
        """Next tokens guessed."""
        return token_accuracy(self.logits(tokens), following, ignore=0)


@MODELS.register("lstm")
def lstm(*, size: str = "tiny") -> Blueprint:
    """An LSTM language model. `paper`: 33,278 words, 1500 units, two layers; `tiny` for a CPU."""
    chosen = choose("size", size, _SIZES)

    def build(data: Data) -> Built:
        return one_phase(LanguageModel(chosen), optimizer=f"adam(lr={0.0005 if size == 'paper' else 0.01})")

    need = Need("lm", vocabulary=chosen.vocabulary, sequence=chosen.sequence)
    return Blueprint(need, "text", build)

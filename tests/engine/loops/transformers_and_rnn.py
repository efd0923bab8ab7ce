"""Loops of transformers and recurrent networks, whose modules read their children's parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loops.models import Gpt
from loops.table import plain, row, train
from loops.ways import Run


@row(core=True, optimizer="adamw")
def gpt_tied_head(run: Run) -> None:
    model = Gpt()
    optimizer = run.optimizer(model.parameters(), lr=2e-3)
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        tokens = run.tokens(step)
        logits = net(tokens[:, :-1])
        run.noted(F.cross_entropy(logits.reshape(-1, 64), tokens[:, 1:].reshape(-1))).backward()
        optimizer.step()
        optimizer.zero_grad()


class Bert(nn.Module):
    """Masked tokens: embeddings with positions and types, two encoder layers, a pooler, a tied head with a bias."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(64, width), nn.Embedding(9, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, 2)
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.encoder(self.norm(self.words(tokens) + self.positions(at) + self.types(torch.zeros_like(tokens))))
        return F.linear(h, self.words.weight, self.bias), self.next(self.pooler(h[:, 0]).tanh())


@row(optimizer="adamw")
def bert_with_two_losses(run: Run) -> None:
    model = Bert()
    # The gradient of the keys' biases is nothing but rounding, which Adam blows up to full steps with its usual eps.
    optimizer = run.optimizer(model.parameters(), eps=1e-4)
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        tokens = run.tokens(step)
        words, following = net(tokens)
        loss = F.cross_entropy(words.reshape(-1, 64), tokens.reshape(-1)) + F.cross_entropy(following, tokens[:, 0] % 2)
        run.noted(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


class Encoder(nn.Module):
    """torch's encoder, whose evaluation runs one fused operation over its children's parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True), nn.Linear(32, 10)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.encoder(x.view(-1, 2, 16), src_key_padding_mask=mask)
        out: Tensor = self.last(h.reshape(-1, 32))
        return out


@row(core=True)
def transformer_encoder(run: Run) -> None:
    _, optimizer, net = plain(run, Encoder)
    train(run, optimizer, net)


def _evaluated(run: Run, *, masked: bool) -> None:
    model, optimizer, net = plain(run, Encoder)

    def evaluate(step: int) -> None:
        model.eval()
        x = run.batch(step, 9)[0]
        mask = torch.zeros(8, 2, dtype=torch.bool, device=x.device)
        mask[0, 1] = True
        with torch.no_grad():
            # With a mask, padded tokens are dropped: the inside of it is a nested tensor.
            run.read(model.encoder(x.view(-1, 2, 16), src_key_padding_mask=mask) if masked else model(x))
        model.train()

    train(run, optimizer, net, after=evaluate)


@row()
def transformer_encoder_evaluated_on_its_fast_path(run: Run) -> None:
    _evaluated(run, masked=False)


@row()
def transformer_encoder_evaluated_with_nested_tensors(run: Run) -> None:
    _evaluated(run, masked=True)


@row(optimizer="adamw")
def transformer_with_a_decoder(run: Run) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
            self.last = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            parts = x.view(-1, 2, 16)
            out: Tensor = self.last(self.both(parts, parts.flip(1)).reshape(-1, 32))
            return out

    _, optimizer, net = plain(run, Both)
    train(run, optimizer, net)


@row()
def multihead_attention(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            parts = x.view(-1, 2, 16)
            h, _ = self.attention(parts, parts, parts, need_weights=False)
            out: Tensor = self.last(h.reshape(-1, 32))
            return out

    model, optimizer, net = plain(run, Attention)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            run.read(model.eval()(run.batch(step, 9)[0]))
        model.train()

    train(run, optimizer, net, after=evaluate)


class Recurrent(nn.Module):
    """A recurrent module over four parts of the input."""

    def __init__(self, kind: type[nn.RNNBase], **options: int | bool) -> None:
        super().__init__()
        self.rnn = kind(8, 12, batch_first=True, **options)
        self.last = nn.Linear(12 * (2 if options.get("bidirectional") else 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x.view(-1, 4, 8))
        out: Tensor = self.last(h[:, -1])
        return out


@row()
def rnn(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: Recurrent(nn.RNN))
    train(run, optimizer, net)


@row(core=True, optimizer="adamw")
def lstm_of_two_layers(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: Recurrent(nn.LSTM, num_layers=2))
    train(run, optimizer, net)


@row()
def gru_in_both_directions(run: Run) -> None:
    _, optimizer, net = plain(run, lambda: Recurrent(nn.GRU, bidirectional=True))
    train(run, optimizer, net)


@row()
def lstm_with_packed_sequences(run: Run) -> None:
    class Packed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.tensor([4, 4, 3, 3, 2, 2, 1, 1])
            packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 4, 8), lengths, batch_first=True)
            _, (h, _) = self.rnn(packed)
            out: Tensor = self.last(h[-1])
            return out

    _, optimizer, net = plain(run, lambda: Packed(nn.LSTM))
    train(run, optimizer, net)


@row()
def recurrent_cell_in_a_loop(run: Run) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.last = nn.GRUCell(8, 12), nn.Linear(12, 10)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), 12)
            for part in x.split(8, dim=1):
                h = self.cell(part, h)
            out: Tensor = self.last(h)
            return out

    _, optimizer, net = plain(run, Cells)
    train(run, optimizer, net)


@row(optimizer="adamw")
def truncated_backpropagation_through_time(run: Run) -> None:
    """The hidden state goes from batch to batch, detached."""
    model = nn.GRU(8, 10, batch_first=True)
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    hidden = None
    for step in range(run.steps):
        x, y = run.batch(step)
        out, hidden = net(x.view(-1, 4, 8), hidden)
        run.noted(F.mse_loss(out[:, -1], y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        hidden = hidden.detach()


@row()
def generation_between_steps(run: Run) -> None:
    """Sampling by argmax right after a step, token by token."""
    model = Gpt()
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    for step in range(run.steps):
        tokens = run.tokens(step)
        run.noted(F.cross_entropy(net(tokens[:, :-1]).reshape(-1, 64), tokens[:, 1:].reshape(-1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            made = tokens[:1, :8]
            for _ in range(2):
                made = torch.cat([made[:, 1:], model(made)[:, -1:].argmax(-1)], dim=1)
        run.read(made)

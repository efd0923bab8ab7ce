"""A small model with whatever makes pipelines difficult: BatchNorm, dropout, tied weights, buffers, several outputs."""

import torch
from torch import nn
from torch.nn import functional as F

from syncline.pipeline.blocks import Blocks, Part, Split


class Block(nn.Module):
    def __init__(self, width, norm, dropout):
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    """An embedding, `depth` blocks and a head; `mask` is a buffer of the model itself that is not saved."""

    def __init__(self, depth=5, width=8, *, norm=False, dropout=0.0, tied=False, outputs=1):
        super().__init__()
        self.embedding = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width, norm, dropout) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.linspace(0.5, 1.0, width), persistent=False)
        self.outputs = outputs
        if tied:
            self.head.weight = self.embedding.weight

    def _scores(self, x):
        scores = self.head(x * self.mask)
        return scores if self.outputs == 1 else tuple(scores * n for n in range(1, self.outputs + 1))

    def _loss(self, scores, labels):
        return F.cross_entropy(scores if self.outputs == 1 else sum(scores), labels)

    def _correct(self, scores, labels):
        return ((scores if self.outputs == 1 else sum(scores)).argmax(1) == labels).sum(), len(labels)

    def split(self):
        blocks = [(block,) for block in self.blocks]
        return Split([self.embedding], blocks, [Part(self._scores, self.head)], loss=self._loss, correct=self._correct)

    def forward(self, x, labels):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self._loss(self._scores(x), labels)


def made(width=8, *, lr=0.05, **options):
    """(blocks, optimizer with momentum, data) in double precision, the same in every process."""
    torch.manual_seed(0)
    model = Net(width=width, **options).double()
    data = torch.randn(100, width, dtype=torch.float64), torch.randint(0, width, (100,))
    return Blocks.of(model), torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), data


def train(step, optimizer, data, batches):
    """Losses of steps on these global batches, given as ranges; `step(batch, samples)` runs both passes."""
    losses = []
    for batch in batches:
        losses.append(float(step(data, torch.arange(batch.start, batch.stop))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def piped(pipe):
    """A step of a pipeline."""

    def step(data, samples):
        mine = samples[list(pipe.share(len(samples)))]
        return pipe.train_batch(tuple(part[mine] for part in data), total=len(samples), ids=mine)

    return step


def plain(model):
    """A step of one process."""

    def step(data, samples):
        loss = model(*(part[samples] for part in data))
        loss.backward()
        return loss.detach()

    return step

"""A rank of a small training run under a strategy, with a delay in some of its steps; its spans come back."""

import time

import torch

from syncline.trace import Recorder, Span
from syncline.trace.merge.merge_ranks import Part, merge
from syncline.train.strategies import Context, load

_LAYERS = 4


def train(rank, world, strategy, delays, late):
    """A step for each of `delays` (seconds, in the forward pass of rank `late`).

    Forward and backward sleep, so that neither cores nor neighbours decide how long they take.
    """
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(_LAYERS)))
    recorder = Recorder(rank=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    synchroniser = load(strategy).attach(model, Context(rank=rank, workers=world, recorder=recorder), optimizer)
    optimizer = synchroniser.optimizer or optimizer
    extra = [0.0]
    for layer in model:
        layer.register_forward_hook(lambda *_: time.sleep(0.003))
        layer.register_full_backward_hook(lambda *_: time.sleep(0.005))
    model[0].register_forward_hook(lambda *_: time.sleep(extra[0]))
    batch = torch.randn(8, 128, requires_grad=True)
    for step, delay in enumerate(delays):
        extra[0] = delay if rank == late else 0.0
        recorder.step = step
        begin = recorder.mark("step")
        optimizer.zero_grad(set_to_none=True)
        with recorder.span("data"):
            time.sleep(0.001)
        with recorder.span("forward"):
            loss = synchroniser.module(batch).square().mean()
        synchroniser.backward(loss)
        synchroniser.synchronise()
        with recorder.span("update"):
            optimizer.step()
        recorder.add("step", "step", begin, recorder.mark("step"))
    synchroniser.finish()
    synchroniser.close()
    return [(s.lane, s.name, s.unit, s.step, s.start, s.end, s.bytes) for s in recorder.spans()]


def merged(rows):
    """The ranks' spans on one clock, waits split."""
    return merge([Part(rank, [Span(rank, *row) for row in mine], "here") for rank, mine in enumerate(rows)]).spans

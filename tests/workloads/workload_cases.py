"""The workloads of these tests, in sizes that a test can afford, and plain training steps."""

import torch

from syncline.train.workload import Workload, load_optimizer

# (model, data) small enough for a test; one line for each model and head.
TINY = [
    ("mlp(hidden=16)", "shapes"),
    ("vgg11(width=0.0625)", "shapes"),
    ("vgg19(width=0.03125)", "shapes"),
    ("resnet50(width=0.0625)", "shapes"),
    ("vit(layers=1)", "shapes"),
    ("bert(head=classification)", "text(megabytes=0.3, classes=2)"),
    ("bert(head=qa)", "text(megabytes=0.1)"),
    ("bert(head=pretraining)", "text(megabytes=0.1)"),
    ("transformer(task=translation)", "text(megabytes=0.1)"),
    ("transformer(task=lm)", "text(megabytes=0.1)"),
    ("lstm", "text(megabytes=0.1, tokens=bytes)"),
    ("gpt2", "text(megabytes=0.1)"),
    ("ugatit-light(width=2)", "unpaired"),
]


def train(workload: Workload, *, steps: int, batch: int = 4) -> list[list[float]]:
    """Plain steps on the same batch, as the loop does them; the losses of every phase."""
    optimizers = [load_optimizer(phase.optimizer, phase.module.parameters()) for phase in workload.phases]
    samples = workload.train.batch(torch.arange(batch))
    losses = []
    for _ in range(steps):
        losses.append([])
        for phase, optimizer in zip(workload.phases, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = phase.module(*samples)
            assert loss.shape == ()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses

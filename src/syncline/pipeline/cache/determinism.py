"""A test whether layers give each sample the same output every time: dropout and batch statistics do not."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from syncline.pipeline.cache.entry import State, equal_bits, nearly_equal, select, tensors_of


@torch.no_grad()
def find_randomness(
    layers: Sequence[nn.Module], compute: Callable[[State], State], inputs: State, output: State
) -> str:
    """Why the activations of `inputs` cannot be cached, as the end of a sentence; empty where they can.

    The batch is computed again with other random numbers, and half of it alone. Random states and buffers stay as they
    were.
    """
    buffers = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    device = tensors_of(inputs)[0].device
    half = torch.arange((len(tensors_of(inputs)[0]) + 1) // 2)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0x5EED)
        again = compute(inputs)
        part = compute(select(inputs, half))
    changed = any(not torch.equal(buffer, before) for buffer, before in buffers)
    for buffer, before in buffers:
        buffer.copy_(before)
    if not equal_bits(again, output):
        return f"the frozen layers are random{_training(layers)}"
    if changed or not nearly_equal(part, select(output, half)):
        return f"the frozen layers mix the samples of a batch{_training(layers)}"
    return ""


def _training(layers: Sequence[nn.Module]) -> str:
    number = sum(layer.training for layer in layers)
    return f" ({number} of {len(layers)} are in training mode: call eval() on them)" if number else ""

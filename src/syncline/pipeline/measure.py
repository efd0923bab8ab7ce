"""Inputs of a pipeline's predictions: seconds and bytes of sublayers, the network, and the bytes of a codec."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import codecs, exchange
from syncline.engine.tuning.device_clock import DeviceClock
from syncline.engine.tuning.probe_link import link_samples
from syncline.pipeline.blocks import Blocks, as_values
from syncline.pipeline.mesh import message_device
from syncline.pipeline.predict import DENSE, SublayerTime, Time, Wire
from syncline.plan.auto_spec import parse_auto
from syncline.sim import Network, fit

_SURE = "bf16"
"""What `compress="auto"` can send on every job."""


def measure_sublayers(blocks: Blocks, batch: Sequence[Tensor], *, repeats: int = 3) -> list[SublayerTime]:
    """Time each sublayer on a batch and on a quarter of it, and fit a line. Needs the whole model on this rank.

    Gradients of parameters, random state and the modules' modes stay as they are.
    """
    rows = len(batch[0])
    few = max(1, rows // 4)
    with torch.random.fork_rng(devices=[blocks_device(blocks)] if blocks_device(blocks).type == "cuda" else []):
        large = _measure(blocks, batch, rows, repeats)
        small = _measure(blocks, batch, few, repeats) if few < rows else large
    out = []
    for (f1, b1, gradient, output), (f0, b0, _, _) in zip(large, small, strict=True):
        out.append(SublayerTime(_line(f0, f1, few, rows), _line(b0, b1, few, rows), gradient, output / rows))
    return out


def measure_network(group: dist.ProcessGroup, device: torch.device) -> Network:
    """Latency and bandwidth of sums over a group, whose ranks all call it; the same on each of them."""
    ranks, on = dist.get_world_size(group), message_device(device, group)
    samples = torch.tensor(link_samples(exchange.Link("allreduce", group), on, ranks=ranks), dtype=torch.float64)
    samples = samples.to(on)
    dist.all_reduce(samples, group=group)
    # A rank sends 2 (N - 1) / N bytes for each byte that is summed.
    sums = [(sent / (2 * (ranks - 1)), seconds / ranks) for sent, seconds in samples.tolist()]
    return fit(sums, exchange="allreduce", nodes=ranks)


def wire_of(parameters: Sequence[Tensor], compress: Any, carrier: Any = None) -> Wire:
    """How gradients of these parameters are exchanged by a codec; `auto` sends as many bytes as BF16 or fewer.

    `carrier`: the exchange that the user asks for.
    """
    if compress is None:
        return replace(DENSE, exchange=str(carrier)) if carrier else DENSE
    codec = codecs.build(_SURE if parse_auto(str(compress)) else compress)
    values = sum(p.numel() for p in parameters)
    shapes = [tuple(p.shape) for p in parameters] if codec.view == "matrix" else [(values,)]
    sent = sum(codec.wire_bytes(shape, parameters[0].dtype) for shape in shapes)
    dense = values * parameters[0].element_size()
    return Wire(str(carrier or exchange.legal(codec)[0]), sent / max(1, dense))


def blocks_device(blocks: Blocks) -> torch.device:
    """The device of the model."""
    return next(blocks.model.parameters()).device


def _line(small: float, large: float, few: int, rows: int) -> Time:
    """Through both measurements, with a slope and a start that are not negative."""
    slope = max(0.0, (large - small) / (rows - few)) if rows > few else large / rows
    return Time(max(0.0, large - slope * rows), slope)


def _measure(blocks: Blocks, batch: Sequence[Tensor], rows: int, repeats: int) -> list[tuple[float, float, int, float]]:
    clock = DeviceClock(blocks_device(blocks))
    values = tuple(tensor[:rows] for tensor in batch[: blocks.inputs])
    out = []
    for sublayer in blocks.cut():
        parameters = [p for p in sublayer.module.parameters() if p.is_floating_point()]
        passes = [_passes(clock, sublayer.module, parameters, values) for _ in range(repeats + 1)][1:]
        forward, backward = (median(times) for times in zip(*[(f, b) for f, b, _ in passes], strict=True))
        values = passes[-1][2]
        size = sum(value.numel() * value.element_size() for value in values)
        out.append((forward, backward, sum(p.numel() * p.element_size() for p in parameters), float(size)))
    return out


def _passes(
    clock: DeviceClock, module: nn.Module, parameters: Sequence[Tensor], values: tuple[Tensor, ...]
) -> tuple[float, float, tuple[Tensor, ...]]:
    """Seconds of both passes, as if everything trained, and the outputs."""
    given = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in values)
    trained = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    try:
        start = clock.mark()
        outputs = as_values(module(*given))
        middle = clock.mark()
        wanted = [t for t in (*given, *parameters) if t.requires_grad]
        ends = [o for o in outputs if o.requires_grad]
        torch.autograd.grad(ends, wanted, [torch.ones_like(o) for o in ends], allow_unused=True)
        end = clock.mark()
    finally:
        for p, was in zip(parameters, trained, strict=True):
            p.requires_grad_(was)
    return clock.seconds(start, middle), clock.seconds(middle, end), tuple(o.detach() for o in outputs)

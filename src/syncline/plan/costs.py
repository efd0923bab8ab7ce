"""Costs of a training job as measured: compute, link, codecs, updates and host, in seconds and bytes.

`Costs` is plain data that `costs.json` holds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from syncline.errors import UsageError
from syncline.files import read_json, reason
from syncline.trust import check_file

VERSION = 1
_OVER = " over "


@dataclass(frozen=True)
class Curve:
    """Seconds as a line over the number of values: a fixed part and a part for each value."""

    fixed: float = 0.0
    each: float = 0.0

    def __call__(self, values: float) -> float:
        """Seconds for this many values; 0 for none."""
        return self.fixed + self.each * values if values else 0.0

    @staticmethod
    def through(points: Sequence[tuple[float, float]]) -> "Curve":
        """The line of least squares through (values, seconds), neither part below zero."""
        if not points:
            return Curve()
        count = len(points)
        mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        each = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
        each = max(0.0, each)
        fixed = mean_y - each * mean_x
        if fixed < 0:
            weight = sum(x * x for x, _ in points)
            return Curve(0.0, max(0.0, sum(x * y for x, y in points) / weight) if weight else 0.0)
        return Curve(fixed, each)


@dataclass(frozen=True)
class CodecCost:
    """Seconds of codec work by number of values: encode, all work between rounds, decode.

    Measured over the codec's default exchange; over an all-gather, `decode` holds the payloads of all ranks.
    """

    encode: Curve = field(default_factory=Curve)
    between: Curve = field(default_factory=Curve)
    decode: Curve = field(default_factory=Curve)
    issue: float = field(default=0.0, kw_only=True)
    """Host seconds to issue all of it to a GPU, for any size."""


@dataclass(frozen=True)
class Host:
    """Host seconds of the thread that issues work to a GPU; all 0 on a CPU."""

    passes: float = 0.0
    """A step without exchanges and updates."""
    launch: float = 0.0
    """Each launch, beside its codec's `issue`."""
    update: float = 0.0
    """Each unit's update."""


@dataclass(frozen=True)
class LinkCost:
    """Measured latency and bandwidth of a link, for one collective at a time."""

    latency: float
    """Seconds that a collective takes in addition to the time of its bytes."""
    bytes_per_s: float
    """Bytes that are sent over it in a second while as many are received."""


@dataclass(frozen=True)
class Costs:
    """Everything that a plan's step time is predicted from, measured on the job itself."""

    world: int
    forward: float
    backward: float
    touched: Mapping[str, float]
    """By parameter: when the forward pass first uses it, from its start, waits left out."""
    complete: Mapping[str, float]
    """By parameter: when its gradient is complete, from the backward pass's start, waits left out."""
    link: LinkCost
    """Of a node to the others; its ranks share it."""
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    """By spec, measured without a network."""
    update: Curve = field(default_factory=Curve)
    data: float = 0.0
    lanes: int = 4
    contention: float = 0.0
    """Seconds of other compute that one second of concurrent codec work costs."""
    drag: float = 0.0
    """Seconds of compute that one second of network traffic costs."""
    carried: Mapping[str, CodecCost] = field(default_factory=dict)
    """By `over(spec, exchange)`, measured over the exchange itself while the ranks computed; preferred to `codecs`."""
    host: Host = field(default_factory=Host)
    node: int = 1
    """Ranks that share a node and its link; 1 if all ranks are on one node."""
    inside: LinkCost | None = None
    """Of a rank to the others of its node; None if it is alone there."""

    def __post_init__(self) -> None:
        times = (self.forward, self.backward, self.data, self.link.latency)
        if min(self.world, self.node) < 1 or not self.link.bytes_per_s > 0 or not min(times) >= 0:
            raise UsageError(
                f"world={self.world}, node={self.node}, bytes_per_s={self.link.bytes_per_s}, a time of {min(times)} s:"
                " use 1 or more, 1 or more, more than 0, and 0 or more"
            )

    @property
    def specs(self) -> list[str]:
        """The codecs that were measured."""
        return list(dict.fromkeys([*self.codecs, *(name.rpartition(_OVER)[0] for name in self.carried)]))

    def to_json(self) -> str:
        """As text, for a run folder."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n"


def over(codec: str, exchange: str) -> str:
    """The name of a codec on an exchange, in `Costs.carried`."""
    return f"{codec}{_OVER}{exchange}"


def load_costs(path: Path) -> Costs:
    """Read what `Costs.to_json` wrote."""
    try:
        table = read_json(path)
        if table.get("version") != VERSION:
            raise UsageError(f"{path} does not hold costs of version {VERSION}: measure again with syncline plan")
        found = costs_of(table)
        for name in (*found.codecs, *found.carried):
            check_file(name, source=str(path), fix="repeat it with --compress, or use --trust if you trust the file")
        return found
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} does not hold costs: {error}") from None


def costs_of(content: Any) -> Costs:
    """The costs in a parsed JSON text; various errors if there are none."""
    table = dict(content)
    if table.pop("version") != VERSION:
        raise ValueError(f"these are not costs of version {VERSION}")
    table.pop("tail", None)  # earlier versions wrote it, always 0
    table["link"] = LinkCost(**table["link"])
    table["update"] = Curve(**table["update"])
    table["inside"] = None if table.get("inside") is None else LinkCost(**table["inside"])
    table["host"] = Host(**table.get("host", {}))
    for kind in ("codecs", "carried"):
        table[kind] = {name: _codec(stages) for name, stages in table.get(kind, {}).items()}
    return Costs(**table)


def _codec(stages: Mapping[str, Any]) -> CodecCost:
    curves = {stage: Curve(**line) for stage, line in stages.items() if stage != "issue"}
    return CodecCost(**curves, issue=float(stages.get("issue", 0.0)))

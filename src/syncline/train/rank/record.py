"""`RankRecord`: the report of one rank at the end of a run, and its JSON form."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from syncline.trace import Span
from syncline.trace.merge.clocks import Clock
from syncline.train.checkpoint.history import History
from syncline.train.rank.network_counters import NetworkBytes
from syncline.train.strategies import Traffic


@dataclass(frozen=True)
class RankRecord:
    """Everything that the session needs from one rank to write results and trace."""

    rank: int
    node: int
    host: str
    host_id: str
    """Ranks with the same text read the same clock (`clocks.host_id`)."""
    cores: int
    backend: str
    startup_ms: dict[str, float]
    phases: int
    """Phases of the workload: optimizer steps per training step."""
    synchronised_bytes: int
    theory: Traffic
    spans: list[Span]
    spans_dropped: int
    first_complete_step: int
    """The first step whose spans are all there."""
    cpu_times: list[list[int]]
    """Rows of step, nanoseconds of CPU time, nanoseconds of scheduling delay."""
    recording_cost: dict[str, Any]
    history: History | None = None
    """None for an aggregator."""
    network: NetworkBytes | None = None
    """Measured bytes per step; None if they are not counted."""
    clock: Clock | None = None
    """None for a rank that is alone."""
    prediction_ms: float | None = None
    buffer_divergence: float = 0.0

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["spans"] = [span.to_row() for span in self.spans]
        return json.dumps(plain, default=asdict)

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankRecord":
        """The record that `to_json` wrote."""
        plain = json.loads(text)
        plain["spans"] = [Span.from_row(plain["rank"], row) for row in plain["spans"]]
        nested = {"theory": Traffic, "history": History, "network": NetworkBytes, "clock": Clock}
        return cls(**plain | {key: kind(**plain[key]) for key, kind in nested.items() if plain[key] is not None})

"""`RankRecord`: the report of one rank at the end of a run, and its JSON form."""

import json
from dataclasses import asdict, dataclass, field

from syncline.trace import Span
from syncline.trace.merge.clocks import Clock
from syncline.trace.merge.merge_ranks import Part
from syncline.train.checkpoint.history import History
from syncline.train.rank.network_counters import NetworkBytes
from syncline.train.strategies import Traffic


@dataclass(frozen=True)
class RankRecord:
    """Everything that the session needs from one rank to write results and trace."""

    part: Part
    """Its spans, its clock and other facts for the trace."""
    node: int
    host: str
    backend: str
    startup_ms: dict[str, float]
    phases: int
    """Phases of the workload: optimizer steps per training step."""
    synchronised_bytes: float
    """Bytes of the gradients that this rank averaged in a step, the mean of all."""
    theory: Traffic | None
    """The strategy's formula; None where there is none."""
    spans_dropped: int
    first_complete_step: int
    """The first step whose spans are all there."""
    history: History | None = None
    """None for an aggregator."""
    network: NetworkBytes | None = None
    """Measured bytes per step; None if they are not counted."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the results."""
    prediction_ms: float | None = None
    peak_memory_bytes: int | None = None
    """The peak of this rank above what its process had before the model; None for an aggregator."""
    train_accuracy: float | None = None
    """On some training samples, at the end."""
    buffer_divergence: float = 0.0

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        part = vars(self.part) | {"spans": [span.to_row() for span in self.part.spans]}
        return json.dumps(vars(self) | {"part": part}, default=asdict)

    @classmethod
    def from_json(cls, text: str | bytes) -> "RankRecord":
        """The record that `to_json` wrote."""
        plain = json.loads(text)
        part = plain["part"]
        part["spans"] = [Span.from_row(part["rank"], row) for row in part["spans"]]
        part["clock"] = None if part["clock"] is None else Clock(**part["clock"])
        nested = {"part": Part, "theory": Traffic, "history": History, "network": NetworkBytes}
        return cls(**plain | {key: kind(**plain[key]) for key, kind in nested.items() if plain[key] is not None})

"""`TuningReport`: the cost of tuning a job, and the time that its plan saves in every step."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TuningReport:
    """Seconds. `before`: a step with DDP's buckets; 0 where none was timed. `after`: a step with the plan in use."""

    cost: float = 0.0
    """Probes and planning, and how much longer steps took that were profiled or tried other plans."""
    steps: int = 0
    """Steps until the plan was found."""
    before: float = 0.0
    after: float = 0.0
    recall: float = 0.0
    """Looking for the plan of an earlier run, in `attach`."""
    remembered: bool = False
    """Whether the plan is that of an earlier run."""

    def spent(self, seconds: float) -> "TuningReport":
        """After more seconds of probes or planning."""
        return replace(self, cost=self.cost + max(0.0, seconds))

    def __str__(self) -> str:
        """One sentence.

        >>> print(TuningReport(cost=0.5, steps=14, before=0.9, after=0.4))
        tuning took 0.50 s in 14 steps; a step takes 400.0 ms instead of 900.0 ms with DDP's buckets
        >>> print(TuningReport(before=0.3, after=0.3, remembered=True))
        the plan of an earlier run is used; there a step took 300.0 ms, as with DDP's buckets
        >>> print(TuningReport())
        no plan was chosen yet
        """
        if not self.after:
            return "no plan was chosen yet"
        text = f"tuning took {self.cost:.2f} s in {self.steps} steps; a step takes {self.after * 1e3:.1f} ms"
        if self.remembered:
            text = f"the plan of an earlier run is used; there a step took {self.after * 1e3:.1f} ms"
        if not self.before:
            return text
        if abs(self.after - self.before) < 0.01 * self.before:
            return f"{text}{',' if self.remembered else ''} as with DDP's buckets"
        return f"{text} instead of {self.before * 1e3:.1f} ms with DDP's buckets"

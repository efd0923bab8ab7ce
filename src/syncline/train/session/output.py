"""The output of a session: a row of `results.json` and a trace for every run, saved as soon as the run ends."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import syncline
from syncline.cluster.nodes import Cluster
from syncline.errors import RankFailure
from syncline.files import reason
from syncline.results.schema import SCHEMA, LinkChange, Results
from syncline.trace.formats.chrome_write import write_chrome_trace
from syncline.trace.formats.load import TRACE
from syncline.trace.merge.merge_ranks import Trace, merge
from syncline.train.checkpoint.files import read_steps, remove_unfinished
from syncline.train.checkpoint.resume import Resume
from syncline.train.config import CHECKPOINTS, Config, run_of
from syncline.train.rank.record import RankRecord
from syncline.train.rank.worker import RunSpec
from syncline.train.session.assemble import assemble, with_payback
from syncline.train.session.link_changes import in_words, parse_changes
from syncline.train.session.machine import busy_share, environment
from syncline.train.session.run_folder import RunFolder

_BUSY = 0.2


class Watcher(Protocol):
    """Gets the progress of a session; the CLI shows it as a progress bar or as plain lines."""

    def note(self, text: str) -> None: ...
    def begin(self, run: RunSpec) -> None: ...
    def step(self, message: dict[str, Any]) -> None: ...
    def log(self, line: str) -> None: ...
    def end(self, run: RunSpec, result: dict[str, Any]) -> None: ...


class SessionOutput:
    """The run folder and the results of a session. Every finished run is saved at once, so that none can be lost."""

    def __init__(
        self,
        config: Config,
        *,
        out: Path | None,
        watcher: Watcher,
        cluster: Cluster | None = None,
        note: str | None = None,
        resume: Resume | None = None,
    ) -> None:
        self._watcher = watcher
        self._several_sizes = len(config.compare.scale) > 1
        earlier = None if resume is None else run_of(resume.checkpoint)
        self.folder = RunFolder(earlier or out, label=config.train.model, reopen=earlier is not None)
        facts = environment()
        self.folder.describe(config, facts)
        changes = parse_changes(config) if cluster is not None else []
        warnings = [note] if note else []
        if changes:
            warnings.append(f"the links change during each run: {', '.join(map(in_words, changes))}")
        warnings += resume.warnings if resume else ()
        busy = busy_share()
        if busy > _BUSY:
            warnings.append(
                f"other programs use {busy:.0%} of this machine: times are longer than they should be, and vary more"
            )
        self.results: Results = {
            "schema": SCHEMA,
            "syncline": syncline.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "title": config.title or f"{config.train.model}: {', '.join(config.compare.strategies)}",
            "config": config.as_dict(),
            "environment": facts,
            "network": {
                "emulated": cluster is not None,
                "nodes": config.cluster.nodes if cluster is not None else 1,
                "bandwidth": cluster.bandwidth if cluster is not None else None,
                "note": note,
            },
            "warnings": warnings,
            "runs": [],
        }
        if changes:
            self.results["network"]["changes"] = changes
        if not self.folder.reopened:
            self.folder.save(self.results)
        for text in warnings:
            watcher.note(text)

    def begin(self, run: RunSpec) -> Path:
        """A run starts; returns the folder of its logs."""
        self._watcher.begin(run)
        return self.folder.strategy(run.strategy, world_size=run.workers, several=self._several_sizes)

    def end(
        self,
        run: RunSpec,
        folder: Path,
        ended: Sequence[RankRecord] | RankFailure,
        *,
        nodes: int,
        link_changes: list[LinkChange] | None = None,
    ) -> None:
        """Add a run to the results, from its ranks' records or its failure, and save them."""
        trace = None
        if isinstance(ended, RankFailure):
            row = _crashed_row(run, ended, folder)
            with suppress(OSError):
                remove_unfinished(self.folder.path / CHECKPOINTS)
        else:
            network = self.results["network"]
            # Links that changed do not have one bandwidth.
            trace = _merged(run, ended, folder, bandwidth=None if "changes" in network else network["bandwidth"])
            row = assemble(run.strategy, ended, trace.spans, batch=run.train.batch, nodes=min(nodes, run.workers))
            trace = replace(trace, spans=with_payback(trace.spans, row.get("restructurings", [])))
            for note in ended[0].notes:
                self._warn(note)
            dropped = sum(record.spans_dropped for record in ended)
            if dropped:
                self.results["warnings"].append(
                    f"{run.strategy}: the recorder was full, its trace and shares lack {dropped} early spans"
                )
            try:
                write_chrome_trace(trace, trace.path)
            except OSError as error:  # the figures of the run are worth more than its trace
                self._warn(f"{run.strategy}: the trace cannot be written to {trace.path}: {reason(error)}")
                trace = None
        if link_changes is not None:
            row["link_changes"] = link_changes
        self.results["runs"].append(row)  # type: ignore[arg-type]
        try:
            self.folder.save(self.results, new_trace=trace)
        finally:
            self._watcher.end(run, row)  # what cannot be saved is at least shown

    def _warn(self, text: str) -> None:
        self.results["warnings"].append(text)
        self._watcher.note(text)

    def discard_if_empty(self) -> None:
        """Undo everything if no run has ended: the folder is removed, an earlier run moves back."""
        if not self.results["runs"]:
            self.folder.discard()


def _merged(run: RunSpec, records: Sequence[RankRecord], folder: Path, *, bandwidth: int | None) -> Trace:
    trace = replace(merge([record.part for record in records]), path=folder / TRACE)
    metadata = {"strategy": run.strategy, "world_size": run.workers, "backend": records[0].backend}
    optional = {"prediction_ms": records[0].prediction_ms, "bandwidth": bandwidth}
    known = {key: value for key, value in optional.items() if value is not None}
    return replace(trace, metadata={**metadata, "notes": trace.notes, **trace.metadata, **known})


def _crashed_row(run: RunSpec, failure: RankFailure, folder: Path) -> dict[str, Any]:
    """The row of a run that failed, with the steps that rank 0 had logged."""
    row: dict[str, Any] = {
        "strategy": run.strategy,
        "status": "crashed",
        "error": vars(failure),
        "world_size": run.workers,
        "servers": run.servers,
        "batch": run.train.batch,
    }
    with suppress(OSError, ValueError):
        steps, _ = read_steps(folder / "rank0.steps.jsonl")
        row["loss"] = [step["loss"] for step in steps]
        row["step_ms_series"] = [step["step_ms"] for step in steps]
    return row

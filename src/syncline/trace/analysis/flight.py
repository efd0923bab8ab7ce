"""Diagnosis of flight-recorder dumps: ranks that are missing in a hang, mismatched collectives, stragglers."""

from collections.abc import Mapping
from dataclasses import dataclass

from syncline.trace.analysis.flight_arrivals import ArrivalOrder, Arrivals, arrivals, straggler
from syncline.trace.analysis.flight_calls import FlightFinding, GroupCalls, group_calls, ranks_text, world_size
from syncline.trace.analysis.flight_hang import hangs
from syncline.trace.analysis.flight_mismatch import first_mismatch
from syncline.trace.formats.flight_read import Call, Dumps
from syncline.wording import plural

_GLOO = (
    "Gloo records when a rank called a collective and whether it returned, not when data moved: only the order of"
    " arrival is known, and no sends and receives"
)
_GROUPS = "these dumps do not name the ranks of groups: a rank that called nothing in a group is not missed there"


@dataclass(frozen=True)
class FlightDiagnosis:
    """What the dumps of a job show; `findings` with the most likely cause first."""

    world: int
    ranks: tuple[int, ...]
    backend: str
    findings: tuple[FlightFinding, ...]
    last_calls: Mapping[int, Call]
    """By rank: the first call that is not finished, else the last one."""
    arrivals: tuple[Arrivals, ...]
    compared: int
    notes: tuple[str, ...]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks of the first finding."""
        return self.findings[0].ranks if self.findings else ()

    @property
    def sentence(self) -> str:
        """The verdict."""
        if self.findings:
            return self.findings[0].sentence
        if len(self.ranks) == 1:
            return "there is one dump: compare all ranks"
        if not self.compared:
            return "nothing hangs, and the dumps hold no collectives of several ranks that could be compared"
        found = f"all {plural(self.compared, 'collective')} that can be compared were called in the same way"
        return f"no rank is missing or late: {found}"

    def as_json(self, source: str) -> dict[str, object]:
        """As `syncline trace analyze --json` prints it."""
        calls = {
            str(rank): {
                "op": call.op, "sequence": call.sequence, "group": call.group, "done": call.done,
                "frames": [str(frame) for frame in call.user_frames],
            }
            for rank, call in self.last_calls.items()
        }  # fmt: skip
        return {
            "source": source, "format": "flight recorder", "backend": self.backend, "world_size": self.world,
            "ranks": list(self.ranks), "verdict": self.sentence, "culprits": list(self.culprits),
            "findings": [finding.as_json() for finding in self.findings], "last_calls": calls,
            "arrivals": [row.as_json() for row in self.arrivals], "notes": list(self.notes),
        }  # fmt: skip


def diagnose(dumps: Dumps) -> FlightDiagnosis:
    """Find mismatched collectives, ranks that others wait for, and late ranks."""
    groups = group_calls(dumps)
    found = [mismatch for group in groups if (mismatch := first_mismatch(group))]
    found += hangs(groups, unreadable=dumps.unreadable)
    order = arrivals(groups)
    if not any(finding.ranks for finding in found) and (late := straggler(groups, order)):
        found.insert(0, late)
    backend = "+".join(sorted({dump.backend for dump in dumps.by_rank.values() if dump.backend}))
    return FlightDiagnosis(
        world=world_size(dumps),
        ranks=tuple(dumps.by_rank),
        backend=backend,
        findings=tuple(found),
        last_calls={r: call for r, d in dumps.by_rank.items() if (call := _last(d.calls)) is not None},
        arrivals=order.rows,
        compared=order.compared,
        notes=(*dumps.notes, *_clock_notes(order), *_notes(dumps, groups, backend)),
    )


def _last(calls: tuple[Call, ...]) -> Call | None:
    """The call that a rank is in: the first one that is not finished, else the last one."""
    return next((call for call in calls if not call.done), calls[-1] if calls else None)


def _clock_notes(order: ArrivalOrder) -> list[str]:
    return [
        f"the clock of {ranks_text(row.ranks)} is about {row.median_ms:.3g} ms ahead of the others: it is no straggler"
        for row in order.clocks_apart
    ]


def _notes(dumps: Dumps, groups: list[GroupCalls], backend: str) -> list[str]:
    notes = []
    absent = [r for r in range(world_size(dumps)) if r not in dumps.by_rank and r not in dumps.unreadable]
    if absent:
        notes.append(f"{ranks_text(absent)} of {world_size(dumps)} left no dump here")
    if "gloo" in backend:
        notes.append(_GLOO)
    if not all(group.members_known for group in groups):
        notes.append(_GROUPS)
    if any(dump.full for dump in dumps.by_rank.values()):
        notes.append("older calls were overwritten: TORCH_FR_BUFFER_SIZE sets how many are kept")
    if dumps.by_rank and not any(call.frames for dump in dumps.by_rank.values() for call in dump.calls):
        notes.append("these dumps hold no stacks: those in pickle format show where in the code a call was made")
    return notes

"""The strategy `syncline`: our engine, dense, with a codec such as `syncline(int8)`, or planned by `syncline(auto)`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline import codecs, exchange, plan
from syncline.engine import Sync, attach, metrics
from syncline.engine.attach import FULL
from syncline.engine.tuning.drift import WINDOW
from syncline.engine.tuning.tuner import PROFILED, TUNED, WARM_UP
from syncline.errors import UsageError, short, unknown
from syncline.files import write_text
from syncline.plan.auto_spec import parse_auto
from syncline.plan.run_files import COSTS, ERRORS, PLAN, SHAPES, shapes_text
from syncline.results.schema import AT_MOST
from syncline.spec import Call, show
from syncline.train.strategies.base import Context, Strategy, Synchroniser, Traffic, ring_traffic, strategy
from syncline.train.strategies.pipeline import Piped
from syncline.train.strategies.schedules import SCHEDULES


class _Attached(Synchroniser):
    warm_up_steps = WARM_UP + PROFILED  # the last one measures the link
    steady_after = TUNED + WINDOW + 2  # drift is checked for the first time one window after the plan

    def __init__(self, module: nn.Module, context: Context, sync: Sync, *, barrier: bool = False) -> None:
        """`barrier`: every forward pass begins when all updates are done."""
        super().__init__(module, context)
        self.sync, self.freeze, self._barrier = sync, sync.freeze, barrier
        if sync.auto is None:  # nothing is tuned
            self.warm_up_steps, self.steady_after = Synchroniser.warm_up_steps, Synchroniser.steady_after

    def forward(self, batch: tuple[Tensor, ...], *, samples: Tensor, view: int) -> Tensor:
        if self._barrier:
            self.sync.wait()
        return super().forward(batch, samples=samples, view=view)

    def state_dict(self) -> dict[str, Tensor]:
        return self.sync.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sync.load_state_dict(state)

    def finish(self) -> None:
        self.sync.wait()

    def close(self) -> None:
        self.sync.close()


def keep_plans(synchronisers: Sequence[Synchroniser], folder: Path, *, strategy: str) -> None:
    """Save the plans in use, their costs and shapes to the strategy's folder; those of a second phase as `plan-2`."""
    for number, sync in enumerate(_syncs(synchronisers), start=1):
        plan_file, costs, shapes, errors = (folder / _numbered(name, number) for name in (PLAN, COSTS, SHAPES, ERRORS))
        plan.save(sync.plan, plan_file)
        auto = getattr(sync, "auto", None)  # one rank alone has nothing to plan
        # If the codec was given, others were not measured: there is nothing to choose from later.
        if auto is not None and auto.allowed is not None and auto.costs is not None:
            live = auto.shapes
            about = {"strategy": strategy, "device": sync.device.type, "planned_at": auto.planned_at[-1]}
            write_text(shapes_text(live, frozen=[s for s in sync.shapes if s not in live], **about), shapes)
            write_text(auto.costs.to_json(), costs)
            if auto.errors is not None:
                write_text(auto.errors.to_json(), errors)


def plan_facts(synchronisers: Sequence[Synchroniser]) -> list[dict[str, Any]]:
    """For each attached phase the plan in use: its prediction, exchanges, and the units and bytes of each codec."""
    facts = []
    for sync in _syncs(synchronisers):
        sizes = {shape.name: shape.values * shape.dtype.itemsize for shape in sync.shapes}
        by_codec: dict[str, dict[str, int]] = {}
        for unit in sync.plan.units:
            entry = by_codec.setdefault(unit.codec, {"units": 0, "gradient_bytes": 0})
            entry["units"] += 1
            entry["gradient_bytes"] += sum(sizes[name] for name in unit.parameters)
        choice = None if sync.auto is None else sync.auto.choice
        facts.append(
            {
                "hash": sync.plan.hash,
                "launches": len(sync.plan.order),
                "codecs": by_codec,
                "exchanges": sorted({unit.exchange for unit in sync.plan.units}),
                "predicted_ms": None if choice is None else choice.step * 1e3,
                "why": "" if choice is None else choice.why,
                "costs": None if sync.auto is None or sync.auto.costs is None else asdict(sync.auto.costs),
            }
        )
    return facts


def predicted_ms(synchronisers: Sequence[Synchroniser]) -> float | None:
    """The step time that the plan in use predicts; None without a plan, or with several models and plans."""
    syncs = _syncs(synchronisers)
    if len(syncs) != 1:
        return None
    return metrics.predicted_ms(syncs[0].plan, syncs[0].auto)


def _syncs(synchronisers: Sequence[Synchroniser]) -> list[Sync]:
    return [synchroniser.sync for synchroniser in synchronisers if isinstance(synchroniser, _Attached)]


def _numbered(name: str, number: int) -> str:
    stem, _, kind = name.partition(".")
    return name if number == 1 else f"{stem}-{number}.{kind}"


@strategy("syncline")
class Syncline(Strategy):
    """`attach(model, optimizer)`. `compress` names a codec, `carrier` an exchange, `file` a plan file.

    `tune=full` measures network, codecs and layers at once, for `syncline plan` and `simulate`. `schedule=fifo` and
    others switch parts of the engine off, for ablations.
    """

    freezes = pipelines = True

    def __init__(
        self,
        compress: Any = None,
        carrier: Any = None,
        file: str = "",
        sentinel: int = 100,
        workers: int = 3,
        tune: Any = True,
        schedule: str = "",
    ) -> None:
        self.auto = parse_auto(_text(compress)) is not None
        self.compress = _text(compress) or "none"
        if self.auto and carrier is not None:
            raise UsageError(f"syncline({self.compress}) chooses exchanges itself: leave carrier out, or name a codec")
        # It is not known what auto will choose: dense is assumed.
        self.codec = codecs.build("none" if self.auto else self.compress)
        self.carrier = exchange.check(self.codec, _text(carrier) or exchange.legal(self.codec)[0])
        self.plan, self.sentinel, self.workers = file, sentinel, workers
        if workers < 1:
            raise UsageError(f"workers={workers}: the number of launches in flight must be 1 or more")
        if tune not in (True, False, FULL):
            raise UsageError(f"tune={short(tune)}: use true, false or {FULL}, which measures the job at once")
        self.tune = tune
        if sentinel < 0:
            raise UsageError(f"sentinel={sentinel}: a number of steps, 0 for never")
        if schedule and schedule not in SCHEDULES:
            raise unknown("schedule", schedule, SCHEDULES)
        if schedule and (file or (self.auto and not SCHEDULES[schedule].planned)):
            raise UsageError(f"schedule={schedule} makes its own plan: name a codec, and leave auto and file out")
        self.schedule = SCHEDULES.get(schedule)
        used = [self.carrier]
        if file:
            if compress is not None or carrier is not None:
                raise UsageError("a plan file names codecs and exchanges itself: leave them out")
            used = [exchange.build(unit.exchange) for unit in plan.load(Path(file)).units]
        options = dict(used[0].options) if used else {}
        self.servers = options.get("servers", 1) if options.get("dedicated") else 0
        # Checkpoints hold the state of ranks that train, and a pipeline has no rank to spare.
        self.resumable = self.pipelines = not self.servers
        dense = str(self.codec) == "none" and self.carrier.text == "allreduce"
        self.formula = f"2(N-1)/N*S{AT_MOST}" if self.auto else "2(N-1)/N*S" if dense else "the codec's bytes"

    def _options(self) -> dict[str, Any]:
        """Options of `attach`."""
        chosen: dict[str, Any] = {"compress": str(self.codec), "exchange": str(self.carrier)}
        if self.auto:
            chosen = {"compress": self.compress}
        if self.plan:
            chosen = {"plan": Path(self.plan)}
        return chosen | {"sentinel": self.sentinel, "workers": self.workers, "tune": self.tune}

    def attach(self, module: nn.Module, context: Context, optimizer: Optimizer | None = None) -> Synchroniser:
        chosen, schedule = self._options(), self.schedule
        if schedule is not None:
            made = schedule.plan(module, compress=str(self.codec), exchange=str(self.carrier))
            if made is not None:
                chosen = {key: value for key, value in chosen.items() if key not in ("compress", "exchange")}
                chosen["plan"] = made
            if not schedule.overlap:
                chosen["workers"] = 1
        if context.shrink.needs_pipeline:
            assert optimizer is not None
            if schedule is not None:
                raise UsageError("a schedule is for whole models: leave schedule out, or --pipe and --cache")
            return Piped(module, context, optimizer, **chosen)
        sync = attach(
            module,
            optimizer,
            process_group=None if self.servers else context.group,
            recorder=context.recorder,
            freeze=context.shrink.freeze or None,
            **chosen,
        )
        if schedule is not None:
            schedule.start(sync)
        return _Attached(module, context, sync, barrier=schedule is not None)

    def serve(self, modules: Sequence[nn.Module], context: Context, *, steps: int) -> None:
        syncs = [attach(module, recorder=context.recorder, **self._options()) for module in modules]
        try:
            for step in range(steps):
                context.recorder.step = step
                for sync in syncs:
                    sync.serve(1)
        finally:
            for sync in syncs:
                sync.close()

    def traffic(self, shapes: Sequence[torch.Size], element: int, *, rank: int, workers: int) -> Traffic:
        if workers == 1:
            return Traffic(0, 0, 0)
        dtype = {2: torch.bfloat16, 8: torch.float64}.get(element, torch.float32)
        sent = sum(self.codec.wire_bytes(shape, dtype, workers + self.servers, self.carrier) for shape in shapes)
        if self.carrier.text == "allreduce":
            return ring_traffic(sent * workers / (2 * (workers - 1)), workers)
        return Traffic(sent, sent, sent)


def _text(value: Any) -> str:
    """The codec as text: the spec parser gives calls for a codec with arguments, and None for `none`."""
    if isinstance(value, tuple) and all(isinstance(call, Call) for call in value):
        return show(value)
    if value is None or isinstance(value, str):
        return value or ""
    raise UsageError(f"syncline({value}): a codec is expected, such as syncline(powersgd(rank=4) | bf16)")

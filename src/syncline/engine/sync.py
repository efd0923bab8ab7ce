"""The engine: gradients leave as they become ready, parameters are updated as they come back, touches wait.

A step, as the engine sees it:

    a parameter's gradient is accumulated     its unit counts down
    a unit is complete                        its launches may go, in the plan's order
    backward ends                             who did not take part is found out; buffers are sent
    p.grad is touched                         wait for that unit's exchange
    optimizer.step()                          states are committed; each unit is updated as its gradients arrive
    a parameter is touched                    wait for its update
"""

import atexit
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline import codecs, exchange
from syncline._compat import after_backward, in_nested_backward
from syncline.engine import pending
from syncline.engine.auto import Auto, allowed_codecs
from syncline.engine.buffers import Arriving
from syncline.engine.cells import Where, cells_of, rounds_of
from syncline.engine.compiled import Compiled
from syncline.engine.groups import Groups, flattened, parent_group, spread, timeout_of
from syncline.engine.profile import Profile
from syncline.engine.sentinel import Sentinel
from syncline.engine.stepping import Stepper
from syncline.engine.threads import Threads
from syncline.engine.units import Slot, UnitRun
from syncline.engine.watch import Watched
from syncline.errors import UsageError
from syncline.plan import Plan, Shape, default_plan
from syncline.plan import load as load_plan
from syncline.trace import Recorder

_log = logging.getLogger("syncline")
STEP_KEY = "syncline.step"


class _Exchanged:
    """The ticket of a gradient between backward and step."""

    def __init__(self, sync: "Sync", unit: UnitRun) -> None:
        self._sync, self._unit = sync, unit

    def wait(self) -> None:
        self._sync._gradient_touched()
        self._unit.exchanged.wait()

    def settled(self) -> bool:
        done: bool = self._unit.exchanged.settled()
        return done


class Sync:
    """What `attach` returns: the engine of one model. `wait`, `no_sync`, `state_dict` and `close` are for you."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        compress: str | None,
        plan: Plan | str | Path | None,
        exchange: str | None,
        process_group: Any,
        buffers: bool,
        update: str | None,
        timeout: float | None,
        sentinel: int,
        recorder: Recorder | None,
        seed: int,
        workers: int,
        tune: bool,
    ) -> None:
        self.model = model
        parent = parent_group(process_group)
        self.groups = Groups(parent, timeout_of(parent, timeout))
        self.rank, self.world = self.groups.rank, self.groups.world
        self.seed, self.step = seed, 0
        self._named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
        if not self._named:
            raise UsageError("the model has no floating-point parameters: there is nothing to train")
        self.device = _one_device([p for _, p in self._named])
        self.recorder = recorder or Recorder(rank=self.rank, device=self.device, enabled=False)
        self.shapes = [Shape(n, tuple(p.shape), p.dtype) for n, p in self._named]
        allowed = allowed_codecs(compress) if compress is not None else None
        compress = None if allowed is not None else compress
        self.plan = _plan(plan, self.shapes, compress=compress, exchange=exchange, world=self.world)
        self._open = self._outstanding = self._queued = self._syncing = False
        self._said: set[str] = set()
        self._stepping = self._closed = self._exchanged = False
        self._buffers = [b for b in model.buffers() if b.numel()] if buffers else []
        self._buffers_sent: Any = None
        self._usage: Any = None
        self._parked: dict[str, dict[str, Tensor]] = {}
        self._units: list[UnitRun] = []
        self._slots = [Slot(n, p, i, p.detach()) for i, (n, p) in enumerate(self._named)]
        self._active: list[bool] = []
        self.sentinel = sentinel
        self._sentinel = Sentinel(self)
        self._stepper = Stepper(self, update)
        self.auto: Auto | None = None
        self._profile: Profile | None = None
        if self.world == 1:
            return
        self._syncing = True
        self._held: list[UnitRun] = []
        self.auto = Auto(self, allowed) if allowed is not None or (tune and plan is None) else None
        self._executor: Any = None
        self._compiled: Any = None
        self._watched = Watched(self)
        try:
            self._start(optimizers, workers)
        except BaseException as error:
            self._let_go(error)
            raise
        _open_syncs.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # again, so that it comes before what ends the heartbeats

    # -- what users call

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes in this context exchange nothing."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def wait(self) -> None:
        """Return when everything in flight is done: gradients averaged, parameters updated, buffers there."""
        if self.world == 1 or self._closed:
            return
        self._finish_backward()
        self._settle()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's codec state, `"<parameter>.<key>"` to plain tensors, and the step; save one a rank."""
        self.wait()
        flat = {f"{n}.{k}": t.clone() for n, s in self._states().items() for k, t in s.items()}
        return {**flat, STEP_KEY: torch.tensor(self.step)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`; any plan will do. For another world size, see `codecs.reshard`."""
        self.wait()
        flat = {name: tensor for name, tensor in state.items() if name != STEP_KEY}
        states = codecs.unflatten(flat)
        known = {slot.name: slot for slot in self._slots}
        if odd := sorted(set(states) - set(known)):
            raise UsageError(f"the state has '{odd[0]}', which the model has not: is it of another model?")
        for name, tensors in states.items():
            error = tensors.get("error")
            if error is not None and error.numel() != known[name].parameter.numel():
                raise UsageError(
                    f"the residual of '{name}' has {error.numel()} values and the parameter another number"
                )
        self.step = int(state.get(STEP_KEY, torch.tensor(0)))
        self._parked = {n: {k: t.to(self.device) for k, t in s.items()} for n, s in states.items()}
        if self.world > 1:
            self._build(carry=False)

    def replan(self, plan: Plan) -> None:
        """Go on with another plan; all ranks call this between the same two steps. State is carried over by name."""
        plan.check(self.shapes, world=max(2, self.world))
        if self.world == 1:
            self.plan = plan
            return
        self.wait()
        with self._watched.communicating("replan"):
            self.groups.agree(plan.hash, "plans")
            self.plan = plan
            self._open_groups()
        self._build()

    def close(self) -> None:
        """Finish what is in flight, give model and optimizers back as they were, end all threads."""
        self._close(sys.exc_info()[1])

    def _close(self, reason: BaseException | None, *, leave: bool = False) -> None:
        """`reason`: the error with which the user's code ends; `leave` what is in flight."""
        if self._closed or self.world == 1:
            self._closed = True
            return
        if reason is not None and (leave or self._open):
            # Half a backward pass cannot be finished. The others learn why before they see that it fails.
            self._watched.farewell(reason)
            self._executor.fail(reason)
        try:
            if self._executor.failure is None:
                self.wait()
        finally:
            self._let_go(reason)
            if self._executor.failure is None:
                self.groups.close()

    def _let_go(self, reason: BaseException | None) -> None:
        self._closed = True
        for slot in self._slots:
            for hook in slot.hooks:
                hook.remove()
            pending.release(slot.parameter)
            if slot.grad is not None:
                pending.release(slot.grad)
        for buffer in self._buffers:
            pending.release(buffer)
        self._stepper.restore()
        if self._compiled is not None:
            self._compiled.close()
        self._watched.close(reason)
        if self._executor is not None:
            self._executor.close()
        _open_syncs.discard(self)

    # -- set-up

    def _start(self, optimizers: Sequence[torch.optim.Optimizer], workers: int) -> None:
        # Plans first: with different ones the ranks would make different groups.
        with self._watched.communicating("attach"):
            self.groups.open(0)
            self._agree()
            self._open_groups()
            self._executor = self._make_executor(workers)
            with torch.no_grad():
                self.groups.broadcast([p for _, p in self._named] + list(self.model.buffers()))
        self._build()
        for slot in self._slots:
            self._hook(slot)
        for optimizer in optimizers:
            self._stepper.adopt(optimizer)
        self._compiled = Compiled(self)

    def _open_groups(self) -> None:
        # One more than the rounds, for the buffers: a group's collectives come in one order.
        shapes = {s.name: s.shape for s in self.shapes}
        rounds = 1
        for row in self.plan.units:
            parts = cells_of(
                codecs.build(row.codec), row.parameters, [shapes[n] for n in row.parameters], row.partitions
            )
            rounds = max(rounds, *(rounds_of(cells)[0] for cells in parts))
        self.groups.open(rounds + 1)
        with self.here():
            # In one order on every rank: with NCCL, connecting communicates.
            self._links = {
                text: [exchange.connect(text, group) for group in self.groups.rounds[:-1]]
                for text in sorted({row.exchange for row in self.plan.units})
            }

    def here(self) -> AbstractContextManager[Any]:
        """The model's device as the current one: a user need not have set it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _make_executor(self, workers: int) -> Any:
        if self.device.type == "cuda":
            from syncline.engine.streams import Streams

            return Streams(self.recorder, self.device, watched=self._watched)
        return Threads(self.recorder, workers=workers, watched=self._watched, cut=self.groups.cut)

    def _agree(self) -> None:
        description = "\n".join(f"{s.name} {s.shape} {s.dtype}" for s in self.shapes)
        self.groups.agree(description, "the models' parameters")
        self.groups.agree(self.plan.hash, "plans")
        tuned = None if self.auto is None else self.auto.allowed or "order"
        options = f"{self.seed} {self.sentinel} {len(self._buffers)} {tuned}"
        self.groups.agree(options, "attach's seed, sentinel, buffers, tune or auto")

    def _hook(self, slot: Slot) -> None:
        if slot.hooks or not slot.parameter.requires_grad:
            return
        slot.hooks.append(slot.parameter.register_hook(lambda _, s=slot: self._before_gradient(s)))
        slot.hooks.append(slot.parameter.register_post_accumulate_grad_hook(lambda _, s=slot: self._on_gradient(s)))

    def _states(self) -> dict[str, dict[str, Tensor]]:
        states: dict[str, dict[str, Tensor]] = {n: dict(s) for n, s in self._parked.items()}
        shapes = {s.name: s.shape for s in self.shapes}
        pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        for unit in self._units:
            for launch in unit.launches:
                for cell in launch.cells:
                    for name, key, first, tensor in cell.dump():
                        pieces.setdefault((name, key), []).append((first, tensor))
        for (name, key), parts in pieces.items():
            if len(parts) == 1:
                states.setdefault(name, {})[key] = parts[0][1]
            else:
                whole = torch.cat([t.reshape(-1) for _, t in sorted(parts, key=lambda part: part[0])])
                states.setdefault(name, {})[key] = whole.view(shapes[name])
        return states

    def _build(self, *, carry: bool = True) -> None:
        """Units of the parameters that train now; what the others have kept waits for them."""
        states = self._states() if carry else self._parked
        self._active = [slot.parameter.requires_grad for slot in self._slots]
        by_name = {slot.name: slot for slot in self._slots}
        # A unit that stays as it is keeps what its last exchange left until a step commits it.
        before = {unit.row: unit for unit in self._units} if carry else {}
        self._units = []
        for slot in self._slots:
            slot.unit = None
        live: set[str] = set()
        for row in self.plan.units:
            slots = [by_name[name] for name in row.parameters if by_name[name].parameter.requires_grad]
            if not slots:
                continue
            live |= {slot.name for slot in slots}
            old = before.get(row)
            if old is not None and old.slots == slots:
                self._units.append(old.again())
                continue
            self._units.append(UnitRun(row, slots, self._links))
            for launch in self._units[-1].launches:
                for cell in launch.cells:
                    cell.load(states)
        self._parked = {name: tensors for name, tensors in states.items() if name not in live}
        units = {unit.row.name: unit for unit in self._units}
        self._order = [units[name].launches[part] for name, part in self.plan.order if name in units]

    # -- backward

    def _before_gradient(self, slot: Slot) -> None:
        """A gradient is about to be accumulated: what the last pass has in flight must have landed."""
        if self._open and slot.fired:
            self._finish_backward()
        if self._outstanding:
            self._settle()

    def _on_gradient(self, slot: Slot) -> None:
        if not self._syncing or self._closed:
            return
        if not self._open:
            self._begin()
        if not self._queued:
            self._queued = True
            after_backward(self._backward_ended)
        unit = slot.unit
        if unit is None:
            return
        if slot.fired:
            raise RuntimeError(
                f"the gradient of '{slot.name}' was accumulated twice in one backward pass: a shared parameter under"
                " reentrant checkpointing? Use torch.utils.checkpoint(..., use_reentrant=False)"
            )
        slot.fired = True
        if self._profile is not None:
            self._profile.complete(slot)
        unit.missing -= 1
        if not unit.missing:
            self._go(unit)

    def _begin(self) -> None:
        if self._outstanding:
            self._settle()
        if self._executor.failure is not None:
            raise self._executor.failure
        if [slot.parameter.requires_grad for slot in self._slots] != self._active:
            self._changed()
        self._watched.doing = f"step {self.step}: backward"
        self._open = True
        where = Where(self.step, self.rank, self.world, self.seed)
        measure = self._sentinel.due(self.step + 1)
        for unit in self._units:
            unit.begin()
            unit.exchanged = self._executor.promise()
            for launch in unit.launches:
                launch.where, launch.measure = where, measure and bool(unit.codec.feedback)
        self._executor.begin(self._order)

    def _changed(self) -> None:
        """Parameters were frozen or set free since the last pass; every rank must have done the same."""
        for slot in self._slots:
            self._hook(slot)
        trained = [slot.name for slot in self._slots if slot.parameter.requires_grad]
        with self._watched.communicating("the list of trained parameters"):
            self.groups.agree("\n".join(trained), "the parameters that require gradients")
        self._build()

    def _go(self, unit: UnitRun) -> None:
        """A unit's gradients are complete."""
        ticket = _Exchanged(self, unit)
        again = unit.fresh
        for slot in unit.slots:
            grad = slot.parameter.grad
            if grad is None:
                # Unused on all ranks: nothing of it is kept, but every rank sends the same.
                unit.grads.append(torch.zeros_like(slot.alias))
                unit.targets.append(None)
                continue
            if grad.layout != torch.strided:
                raise UsageError(f"the gradient of '{slot.name}' is sparse: build its embedding with sparse=False")
            again = again and grad is slot.grad
            slot.grad = grad
            unit.grads.append(grad.detach())
            unit.targets.append(grad)
        for launch in unit.launches:
            launch.chain = again
        unit.fresh = True
        for grad in unit.targets:
            if grad is not None:
                pending.mark(grad, ticket)
        if self._profile is None:
            self._executor.ready(unit)
        else:
            self._held.append(unit)

    def _backward_ended(self) -> None:
        self._queued = False
        if not in_nested_backward():
            self._finish_backward()

    def _finish_backward(self) -> None:
        """Units that wait for gradients which will not come are sent with zeros for them."""
        if not self._open:
            return
        self._queued = False
        slots = [slot for unit in self._units for slot in unit.slots]
        used = torch.tensor([slot.fired or slot.parameter.grad is not None for slot in slots], dtype=torch.int32)
        self._usage = dist.all_reduce(used, group=self.groups.control, async_op=True), used
        if not all(slot.fired for slot in slots):
            self._watched.doing = f"step {self.step}: waiting for the ranks to say which parameters they used"
            with self._watched.communicating("the list of used parameters"):
                self._usage[0].wait()
            for slot, count in zip(slots, used.tolist(), strict=True):
                assert slot.unit is not None
                if slot.parameter.grad is None and (count or slot.unit.codec.feedback):
                    slot.parameter.grad = torch.zeros_like(slot.alias)
            for unit in self._units:
                if unit.missing:
                    unit.missing = 0
                    self._go(unit)
        if self._profile is not None:
            self._profile.note("ended")
            for unit in self._held:
                self._executor.ready(unit)
            self._held = []
        self._open, self._outstanding, self._exchanged = False, True, True
        if self._buffers:
            self._send_buffers()
        self._watched.doing = f"step {self.step}: after backward"

    def _send_buffers(self) -> None:
        # Anew each time, for a module may have put others in their place. Through `data`, with a version of its own: a
        # graph that is still to run may have saved them.
        self._buffers = [b for b in self.model.buffers() if b.numel()]
        buffers, group = self._buffers, self.groups.rounds[-1]
        plain = [b.data for b in buffers]

        def work() -> None:
            begin = self.recorder.mark("exchange")
            for flat, members in flattened(plain):
                dist.broadcast(flat, src=self.groups.ranks[0], group=group)
                if self.rank:
                    spread(flat, members)
            self.recorder.add("exchange", "broadcast", begin, self.recorder.mark("exchange"), unit="buffers")

        if self.device.type == "cpu":
            # At once, and not behind gradients: the first layers of the next forward need them.
            self._buffers_sent = Arriving(self, plain, group)
        else:
            self._buffers_sent = self._executor.after(None, work)
        marked = [pending.mark(b, self._buffers_sent) for b in buffers]
        if not all(marked):
            self._buffers_sent.wait()

    def _gradient_touched(self) -> None:
        """Somebody reads a gradient between backward and step."""
        if self._open:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "a hook read .grad of a parameter that is being exchanged: register it before syncline.attach"
                )
            self._finish_backward()
        if not self._stepping:
            self.say("gradients are read between backward and step (clipping, scaling, logging): they are waited for")

    def _settle_gradients(self) -> None:
        for unit in self._units:
            unit.exchanged.wait()

    def _settle(self) -> None:
        """Wait for all that is in flight, and give every tensor its own class back."""
        for unit in self._units:
            if unit.exchanged is not None:
                unit.exchanged.wait()
            for promise in unit.updated:
                promise.wait()
        self._stepper.wait()
        if self._buffers_sent is not None:
            self._buffers_sent.wait()
        if self._usage is not None:
            with self._watched.communicating("the list of used parameters"):
                self._usage[0].wait()
            self._usage = None
        for slot in self._slots:
            pending.release(slot.parameter)
            if slot.grad is not None:
                pending.release(slot.grad)
        for buffer in self._buffers:
            pending.release(buffer)
        for unit in self._units:
            unit.drop()
        self._buffers_sent = None
        self._outstanding = False

    def _stepped(self) -> None:
        """An optimizer has stepped, or has scheduled its updates."""
        counted, self._exchanged = self._exchanged, False
        self.step += counted
        self._sentinel.stepped(counted=counted)
        if self.auto is not None and counted:
            self.auto.stepped()
        self._watched.doing = f"step {self.step}: forward"
        if self._compiled.outside:
            self.say("the model runs inside compiled code: every step waits for its updates")
            self.wait()

    def say(self, text: str) -> None:
        """A remark for the user, once, by rank 0."""
        if text not in self._said:
            self._said.add(text)
            if self.rank == 0:
                _log.warning("syncline: %s", text)


_open_syncs: "weakref.WeakSet[Sync]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A script that ends without `close` still gets its last update, and leaves no thread in torch's way."""
    reason = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for sync in list(_open_syncs):
        try:
            sync._close(reason, leave=True)
        except Exception as error:
            _log.warning("syncline: at exit: %s", error)


def _one_device(parameters: Sequence[Tensor]) -> torch.device:
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): attach each part by itself"
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the model is on '{device}': move it to a CPU or CUDA device before attach")
    if any(type(p).__name__ == "DTensor" or hasattr(p, "_local_tensor") for p in parameters):
        raise UsageError("the model has DTensor parameters (FSDP, tensor parallel): attach works on plain replicas")
    return device


def _plan(plan: Any, shapes: Sequence[Shape], *, compress: str | None, exchange: str | None, world: int) -> Plan:
    if plan is None:
        made = default_plan(shapes, compress=compress, exchange=exchange)
    elif compress is not None or exchange is not None:
        raise UsageError("a plan names codecs and exchanges itself: leave compress and exchange out")
    else:
        made = plan if isinstance(plan, Plan) else load_plan(plan)
    made.check(shapes, world=max(2, world))
    return made

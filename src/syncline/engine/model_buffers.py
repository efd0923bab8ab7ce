"""`ModelBuffers`: all ranks get rank 0's buffers (BatchNorm statistics) after a backward pass, or before a forward."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from syncline._compat.autograd import in_backward
from syncline._compat.tensors import versions_of
from syncline.engine.inflight.buffers import broadcast_buffers
from syncline.engine.inflight.plain_copies import StayingHook
from syncline.engine.inflight.tracker import InFlight
from syncline.engine.protocols import EngineView
from syncline.engine.running_plan import RunningPlan
from syncline.engine.step_state import Phase, StepState


class ModelBuffers:
    """Sends the buffers of a model, and knows whether they have changed since. Thread: as for `Backward`."""

    def __init__(
        self,
        engine: EngineView,
        state: StepState,
        in_flight: InFlight,
        running: RunningPlan,
        *,
        send: bool,
        exchanges: Callable[[], bool],
    ) -> None:
        """`send`: False if every rank keeps its own; `exchanges()`: False under `no_sync`."""
        self._engine, self._state, self._in_flight, self._running = engine, state, in_flight, running
        self._exchanges = exchanges
        self.count = sum(b.numel() > 0 for b in engine.model.buffers()) if send else 0
        """Buffers that are sent after every pass."""
        self._changed = False
        """Whether a forward may have changed the buffers since they were sent."""
        self._sent: list[Tensor] = []
        self._sent_versions: list[int] = []
        """The buffers that were sent, and their versions then, until the next training forward."""
        self.broadcast: Callable[[], list[Tensor]] | None = None
        """Another way to send the buffers, which have arrived when it returns them (torch's reducer)."""
        self._hook: Any = None

    def hook_model(self) -> None:
        """Hook the model's forward, if it has buffers."""
        # TorchScript modules take no hooks: their buffers are sent after every backward pass only.
        if self.count and self._hook is None and not isinstance(self._engine.model, torch.jit.ScriptModule):
            self._sent = list(self._engine.model.buffers())
            self._sent_versions = versions_of(self._sent)
            self._hook = self._engine.model.register_forward_pre_hook(_BeforeForward(self))

    def close(self) -> None:
        """Remove the hook."""
        if self._hook is not None:
            self._hook.remove()

    def before_forward(self) -> None:
        """Send the buffers if the last forward trained and no backward pass has sent them since, as DDP does."""
        if self._state.phase is Phase.BACKWARD or in_backward() or torch.compiler.is_compiling():
            return
        if self._changed:
            self.send()
        elif self._sent and versions_of(self._sent) != self._sent_versions:
            self._engine.say(
                "buffers were changed outside of the model's forward: other ranks get rank 0's values at the end of the"
                " next backward pass, where DDP sends them before this forward; for the same values on all ranks at"
                " once, broadcast them yourself"
            )
        if self._engine.model.training:
            self._sent = []  # this forward changes them
        # In evaluation, ranks may call the model on their own.
        trains = self._exchanges() and self._engine.model.training and torch.is_grad_enabled()
        # Dedicated servers see backward passes only, so buffers are sent at the end of those only.
        self._changed = trains and self._running.trainers == self._engine.world

    def send(self) -> None:
        """Send rank 0's buffers to all ranks."""
        self._changed = False
        if self.broadcast is not None:
            buffers = self.broadcast()
            self._sent, self._sent_versions = buffers, versions_of(buffers)
            return
        # Listed every time, because a module may have replaced them.
        buffers = [b for b in self._engine.model.buffers() if b.numel()]
        self._sent, self._sent_versions = buffers, versions_of(buffers)
        self._in_flight.add_buffers(buffers, broadcast_buffers(self._engine, buffers))


class _BeforeForward(StayingHook):
    """The model's forward begins: it may need the buffers."""

    def __init__(self, buffers: ModelBuffers) -> None:
        super().__init__()
        self._buffers = weakref.ref(buffers)

    def __call__(self, model: nn.Module, args: Any) -> None:
        buffers = self._buffers()
        if buffers is not None:
            buffers.before_forward()

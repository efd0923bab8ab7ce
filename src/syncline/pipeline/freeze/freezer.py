"""`Freezer`: freezes the first blocks of one model while it trains, with `syncline.attach` or without.

At the end of an epoch measurements are averaged over the ranks, rank 0 asks the policy, and all ranks apply its answer.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from syncline.engine.attach import use_freezer
from syncline.engine.inflight.plain_copies import StayingHook
from syncline.engine.sync import Sync
from syncline.errors import UsageError
from syncline.pipeline.blocks import Blocks
from syncline.pipeline.freeze.apply import keep_frozen_in_eval, set_frozen
from syncline.pipeline.freeze.measure import ActivationProbe, GradientNorms, gradient_norms
from syncline.pipeline.freeze.policies import needs_of
from syncline.pipeline.freeze.state import FreezeState, Measured, advance, parse, start
from syncline.spec import parse_one
from syncline.trace import Recorder

FREEZE = "freeze"
"""The name of the spans of freezes, in the lane `between`."""
_MEASURE_EVERY = 8
"""Gradient norms are read in every this many steps: reading them waits for the exchange."""
_FAILED = "failed: "


class Peers(Protocol):
    """The ranks that must freeze alike; `engine.process_groups.Groups` is one."""

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's values, one row per rank."""

    def text_of_rank_0(self, text: str) -> str:
        """Rank 0's text, on every rank."""


class Freezer:
    """Freezes blocks as a policy says, and unfreezes them when the held-out loss gets worse.

    Call `end_epoch` on every rank between two steps, or give the policy `every=STEPS` and the optimizers. It sets
    `requires_grad`, drops the gradients of frozen parameters and keeps frozen modules in evaluation mode. Optimizers
    are not changed. An attached engine drops frozen parameters from backward, network and plan at the next step.
    """

    def __init__(
        self,
        model: nn.Module | Blocks,
        policy: str = "schedule",
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        peers: Peers | None = None,
        wait: Callable[[], None] = lambda: None,
        recorder: Recorder | None = None,
    ) -> None:
        """`peers`: the other ranks; None if there are none. `wait` returns when no update is in flight."""
        self.settings = parse(policy)
        self.blocks = model if isinstance(model, Blocks) else Blocks.of(model, self.settings.blocks)
        self.state = start(policy, blocks=len(self.blocks))
        self._peers, self._wait, self._recorder = peers, wait, recorder
        self._steps = self._in_epoch = 0
        self._frozen_modules: list[nn.Module] = []
        needs = needs_of(parse_one(self.settings.policy).name)
        self._norms = GradientNorms() if "norms" in needs else None
        self._probe = ActivationProbe(self.blocks) if "changes" in needs else None
        if (self.settings.every or self._norms is not None) and not optimizers:
            raise UsageError(f"'{policy}' counts optimizer steps: give the optimizer, too")
        # Weakly typed in torch: a hook of a step gets (optimizer, args, kwargs).
        self._hooks: list[Any] = [optimizers[0].register_step_post_hook(self._stepped)] if optimizers else []
        self._hooks.append(self.blocks.model.register_forward_pre_hook(_BeforeForward(self)))
        self._tokens_found = False
        """Whether bare parameters in front of the first block were found after a freeze, so that they train still."""
        self._first_block: Any = None
        if self.blocks.bare:
            first = self.blocks.modules(0)[0]
            self._first_block = first.register_forward_pre_hook(_BeforeFirstBlock(self), with_kwargs=True)
            self._hooks.append(self._first_block)

    @property
    def frozen(self) -> int:
        """The number of frozen blocks, from the input."""
        return self.state.frozen

    def end_epoch(self, held_out_loss: float | None = None) -> int:
        """Count an epoch and freeze what the policy says; returns the number of frozen blocks. All ranks call this.

        `held_out_loss`: the loss on data that is not trained on, for the accuracy guard; the ranks' mean counts.
        """
        self._wait()
        begin = None if self._recorder is None else self._recorder.mark("between")
        before, self._in_epoch = self.state, 0
        self.state = self._decide(self._measure(held_out_loss))
        if self.state.frozen != before.frozen:
            self._frozen_modules = set_frozen(self.blocks, self.state.frozen)
            if self._recorder is not None:
                unit = f"{self.state.frozen} of {self.state.blocks} blocks"
                self._recorder.add("between", FREEZE, begin, self._recorder.mark("between"), unit=unit)
        return self.state.frozen

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's freeze state as plain tensors: the state as JSON text, and the probe batch of `plasticity`."""
        text = json.dumps({"state": self.state.to_json(), "steps": self._steps, "in_epoch": self._in_epoch})
        found = {"state": torch.tensor(list(text.encode()), dtype=torch.uint8)}
        if self._norms is not None and self._norms.count:
            found["norms"] = torch.tensor([*self._norms.squares, self._norms.count], dtype=torch.float64)
        if self._probe is not None:
            tensors = [t for t in self._probe.inputs if isinstance(t, Tensor)]
            found |= {f"input.{i}": t.cpu() for i, t in enumerate(tensors) if len(tensors) == len(self._probe.inputs)}
            found |= {f"reference.{i}": t for i, t in enumerate(self._probe.reference)}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`: freezes the same blocks again, and unfreezes the others."""
        if not state:  # of a run without freezing
            return
        try:
            found = json.loads(bytes(state["state"].tolist()).decode())
            loaded = FreezeState.from_json(found["state"])
            self._steps, self._in_epoch = int(found["steps"]), int(found["in_epoch"])
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not the state of a freezer: {error}") from None
        if loaded.blocks != len(self.blocks):
            raise UsageError(
                f"the freeze state is of a model with {loaded.blocks} blocks, this one has {len(self.blocks)}"
            )
        self._wait()
        self.state = loaded
        if self._norms is not None:
            *squares, count = state["norms"].tolist() if "norms" in state else [0]
            self._norms.squares, self._norms.count = squares, int(count)
        if self._probe is not None:
            device = next(self.blocks.model.parameters()).device
            self._probe.inputs = [t.to(device) for t in _numbered(state, "input")]
            self._probe.reference = _numbered(state, "reference")
        self._frozen_modules = set_frozen(self.blocks, loaded.frozen)

    def close(self) -> None:
        """Remove the hooks; frozen parameters stay frozen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_forward(self, args: Sequence[Any]) -> None:
        """The model is about to run."""
        if not self.blocks.model.training:
            return
        if self._tokens_found:
            self._wait()
            self._tokens_found, self._frozen_modules = False, set_frozen(self.blocks, self.state.frozen)
        if torch.is_grad_enabled():
            if self._probe is not None:
                self._probe.offer(args)
            # Here and not after the step: another optimizer may have had to step with the gradients.
            if self.settings.every and self._in_epoch >= self.settings.every:
                self.end_epoch()
        keep_frozen_in_eval(self._frozen_modules)

    def before_first_block(self, args: Sequence[Any]) -> None:
        """The first block is about to run: bare parameters that its inputs depend on are in front of it."""
        if torch.compiler.is_compiling() or not (self.blocks.model.training and torch.is_grad_enabled()):
            return
        self.blocks = self.blocks.with_tokens(args)
        self._tokens_found = self.state.frozen > 0 and bool(self.blocks.tokens)
        self._first_block.remove()

    def _stepped(self, *_: Any) -> None:
        self._steps += 1
        self._in_epoch += 1
        # Also in the last step of an epoch, which may be short.
        due = self._in_epoch == self.settings.every or self._in_epoch % _MEASURE_EVERY == 1
        if self._norms is not None and due:
            self._norms.add(gradient_norms(self.blocks))

    def _measure(self, held_out_loss: float | None) -> Measured:
        """This rank's measurements, averaged over the ranks: of gradient norms the root of the mean square."""
        squares = None if self._norms is None else self._norms.take()
        changes = None if self._probe is None else self._probe.compare()
        parts: list[Sequence[float]] = [squares or [], changes or [], [] if held_out_loss is None else [held_out_loss]]
        values = torch.tensor([v for part in parts for v in part], dtype=torch.float64)
        if self._peers is not None:
            sizes = self._peers.gather(torch.tensor([len(part) for part in parts]))
            if bool((sizes != sizes[0]).any()):
                raise UsageError(
                    "some ranks measured what others did not: call end_epoch on every rank after the same step, with a"
                    " held-out loss on all of them or on none"
                )
            values = self._peers.gather(values).mean(0) if len(values) else values
        means = iter(values.tolist())
        first, second, third = ([next(means) for _ in part] for part in parts)
        norms = [math.sqrt(square) for square in first]
        return Measured(norms or None, second or None, third[0] if third else None)

    def _decide(self, measured: Measured) -> FreezeState:
        """Rank 0's decision, on every rank; an error of the policy is raised on every rank."""
        if self._peers is None:
            return advance(self.state, measured, step=self._steps)
        error: Exception | None = None
        try:
            text = json.dumps(advance(self.state, measured, step=self._steps).to_json())
        except Exception as raised:  # of a user's policy: the other ranks must not wait for a decision
            error, text = raised, f"{_FAILED}{type(raised).__name__}: {raised}"
        told = self._peers.text_of_rank_0(text)
        if told.startswith(_FAILED):
            raise error or UsageError(f"the freeze policy of rank 0 {told}")
        return FreezeState.from_json(json.loads(told))


class _BeforeForward(StayingHook):
    def __init__(self, freezer: Freezer) -> None:
        super().__init__()
        self._freezer = freezer

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._freezer.before_forward(args)


class _BeforeFirstBlock(StayingHook):
    def __init__(self, freezer: Freezer) -> None:
        super().__init__()
        self._freezer = freezer

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._freezer.before_first_block([*args, *kwargs.values()])


def _numbered(state: Mapping[str, Tensor], name: str) -> list[Tensor]:
    return [state[key] for key in sorted((k for k in state if k.startswith(f"{name}.")), key=_number)]


def _number(key: str) -> int:
    return int(key.rpartition(".")[2])


class _EnginePeers:
    """The peers of an engine; one that is lost becomes a named error."""

    def __init__(self, sync: Sync) -> None:
        self._sync = sync

    def gather(self, values: Tensor) -> Tensor:
        with self._sync.communicating("measurements for freezing"):
            return self._sync.groups.gather(values)

    def text_of_rank_0(self, text: str) -> str:
        with self._sync.communicating("the freeze decision"):
            return self._sync.groups.text_of_rank_0(text)


@use_freezer
def attached(sync: Sync, policy: str, optimizers: Sequence[torch.optim.Optimizer]) -> Freezer:
    """The freezer of `attach(..., freeze=policy)`."""
    peers = _EnginePeers(sync) if sync.world > 1 else None
    return Freezer(sync.model, policy, optimizers=optimizers, peers=peers, wait=sync.wait, recorder=sync.recorder)

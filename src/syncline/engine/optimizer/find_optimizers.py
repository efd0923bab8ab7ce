"""Find optimizers that `attach` was not given, when they step: none was given, or another one was built since."""

from typing import Any

import torch

from syncline._compat.optimizers import on_every_step
from syncline.engine.optimizer.adoption import adopted
from syncline.engine.optimizer.step import Stepper
from syncline.engine.protocols import EngineView
from syncline.engine.weak_callback import weak_callback


class OptimizerFinder:
    """Watches the steps of all optimizers of the process for those with parameters of this engine's model.

    One that is nobody's is adopted: the step that has begun steps all parameters at once, and from the next one on it
    steps by units. One that belongs to the engine of another model stays there, and this engine takes note of its
    steps. Thread: the training thread.
    """

    def __init__(self, engine: EngineView, stepper: Stepper) -> None:
        self._engine, self._stepper = engine, stepper
        self._stepping: set[int] = set()
        """Optimizers, by id, whose step has begun and is not this engine's own."""
        self.close = on_every_step(weak_callback(self._before), weak_callback(self._after))

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        owner, stepper = adopted(optimizer), self._stepper
        if owner is not None and owner.methods is stepper:
            self._stepping.discard(id(optimizer))  # its first step had raised an error
            return
        if stepper.stepping is not None or self._stepping:
            return  # a part of another optimizer, such as ZeroRedundancyOptimizer, which is not done yet
        if not stepper.has_ours(optimizer):
            stepper.check_model()  # it may have what was put in place of our parameters
            return
        stepper.check_not_in_backward(optimizer)
        self._engine.wait()
        if owner is None:
            kind = type(optimizer).__name__
            self._engine.say(
                f"found the optimizer {kind} at its first step: give it to attach to overlap that step too"
            )
            stepper.adopt(optimizer)
        else:
            owner.shared = True
        self._stepping.add(id(optimizer))

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._stepping:
            self._stepping.remove(id(optimizer))
            if self._stepper.stepping is not optimizer:  # it is if the step in which it was found has raised an error
                self._stepper.stepped_whole(optimizer, broken=getattr(optimizer, "found_inf", None))

"""Collects the complete gradients of a unit for its launches, with the errors of gradients that cannot be averaged."""

import torch

from syncline._compat.autograd import has_other_hooks
from syncline._compat.tensors import storage_users
from syncline.engine.launch.units import UnitRun, as_real
from syncline.errors import UsageError


def must_wait_for_end(unit: UnitRun) -> bool:
    """Whether autograd may still read the memory of gradients into which the averages must be written.

    A hook of the user may have kept a view of a gradient, or put a view of other memory in its place. We cannot
    distinguish that from memory that autograd shares, and autograd does not read it any more when the pass has ended.
    """
    return any(
        not slot.kept_grad and has_other_hooks(slot.parameter) and storage_users(grad) > 1
        for slot in unit.slots
        if (grad := slot.parameter.grad) is not None
    )


def collect_gradients(unit: UnitRun) -> None:
    """Take a unit's complete gradients as they are. The objects stay; the user's memory stays theirs."""
    chain = unit.uncommitted
    # Kept gradients share the memory of their unit's last average; others who use it are the user's.
    kept = [slot.parameter.grad for slot in unit.slots if slot.kept_grad and slot.parameter.grad is not None]
    unit.shared_memory = any(storage_users(grad) > 1 for grad in kept) and unit.has_unknown_views()
    for slot in unit.slots:
        grad = slot.parameter.grad
        if grad is None:
            # No rank used it: nothing of it is kept, but all ranks must send messages of the same size.
            unit.grads.append(as_real(torch.zeros_like(slot.parameter.detach())))
            unit.targets.append(None)
            unit.takes_memory.append(False)
            slot.grad = None
            continue
        if grad.layout != torch.strided:
            raise sparse_gradient(slot.name)
        if grad.is_conj():
            grad.data = grad.detach().resolve_conj()  # autograd conjugates lazily; codecs need the values
        users_memory = slot.kept_grad
        if not users_memory and storage_users(grad) > 1:
            if has_other_hooks(slot.parameter):
                unit.shared_memory = users_memory = True
            else:
                # Autograd may share one memory among several gradients, or read it again; ours is overwritten.
                grad.data = grad.detach().clone()
        chain = chain and grad is slot.grad
        slot.grad = grad
        unit.grads.append(as_real(grad.detach()))
        unit.targets.append(grad)
        # On CUDA the average is copied: that is fast there, and until the device is done, memory that the gradient
        # gave up could not be used for anything else.
        unit.takes_memory.append(not users_memory and not grad.is_cuda)
    _check_kinds(unit)
    for launch in unit.launches:
        launch.chain = chain
    unit.uncommitted = True


def _check_kinds(unit: UnitRun) -> None:
    """Raise if gradients do not fit the plan any more. A model that is converted as a whole still does."""
    first, again = unit.grads[0], "call close() before you change or convert a part of a model, and attach it again"
    for slot, grad in zip(unit.slots, unit.grads, strict=True):
        if grad.shape != slot.shape:
            raise UsageError(f"'{slot.name}' is {tuple(grad.shape)} and was {slot.shape} at attach: {again}")
        if grad.dtype != first.dtype:
            raise UsageError(
                f"'{unit.slots[0].name}' and '{slot.name}' are sent together, as {first.dtype} and {grad.dtype} now:"
                f" {again}"
            )


def accumulated_twice(name: str) -> RuntimeError:
    """The error of a parameter that a backward pass has reached twice."""
    return RuntimeError(
        f"the gradient of '{name}' was accumulated twice in one backward pass: a shared parameter under reentrant"
        " checkpointing? Use torch.utils.checkpoint(..., use_reentrant=False)"
    )


def sparse_gradient(name: str) -> UsageError:
    """The error of a parameter with a sparse gradient."""
    return UsageError(f"the gradient of '{name}' is sparse: build its embedding with sparse=False")

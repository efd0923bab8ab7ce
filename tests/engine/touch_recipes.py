"""Ways to read a tensor that do not go through `__torch_function__` by themselves, each a function of one tensor.

`test_unguarded.py` runs them on real ranks against the plain loop, and `test_bypass_scan.py` on pending tensors.
The tensor is 3 x 3, a parameter or its gradient. Recipes return what they read, without changing the tensor.
"""

import io
import multiprocessing.reduction
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn, tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils.checkpoint import checkpoint

RECIPES: dict[str, Callable[[Tensor], Any]] = {}


def _twice(t: Tensor) -> Tensor:
    return (t * t).sum()


def _bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """The bias and GELU that Megatron fuses."""
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Quiet(torch.Tensor):
    """A subclass that switches torch functions off for all arguments."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Disabled(torch.Tensor):
    """A subclass without torch functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Named(torch.Tensor):
    """A subclass with torch's own behaviour."""


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tensor(x.tolist()).square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # users still have such functions
    bias_gelu = torch.jit.script(_bias_gelu)
    _traced = torch.jit.trace(lambda a, b: a * 2 + b, (torch.ones(3, 3), torch.ones(3, 3)), check_trace=False)
_INDICES = torch.tensor([[0, 1, 2], [0, 1, 2]])
_X = torch.linspace(-1, 1, 9).view(3, 3)

TYPED = {"torch.FloatTensor": lambda p: torch.FloatTensor(p)}
"""Cannot be guarded; see docs/engine.md."""
RECIPES |= {
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.tensor, imported by name": lambda p: tensor(p),
    "torch.tensor of a list": lambda p: torch.tensor([p, p]) if p.numel() == 1 else torch.tensor(p),
    "torch.Tensor": lambda p: torch.Tensor(p),
    "a subclass's constructor": lambda p: Named(p),
    "torch.as_tensor": lambda p: torch.as_tensor(p),
    "torch.as_tensor, another type": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "torch.asarray": lambda p: torch.asarray(p),
    "torch.asarray, copy": lambda p: torch.asarray(p, copy=True),
    "torch.sparse_coo_tensor": lambda p: torch.sparse_coo_tensor(_INDICES, p, (3, 3, 3)).to_dense(),
    "torch.sparse_csr_tensor": lambda p: torch.sparse_csr_tensor(
        torch.tensor([0, 3, 6, 9]), torch.tensor([0, 1, 2] * 3), p.view(9)
    ).to_dense(),
    "torch.sparse_compressed_tensor": lambda p: torch.sparse_compressed_tensor(
        torch.tensor([0, 1]), torch.tensor([0]), p.view(1, 3, 3), (3, 3), layout=torch.sparse_bsr
    ).to_dense(),
    "nested_tensor": lambda p: torch.nested.nested_tensor([p, p]).unbind()[0],
    "nested_tensor, jagged": lambda p: torch.nested.nested_tensor([p, p], layout=torch.jagged).unbind()[0],
    "as_nested_tensor": lambda p: torch.nested.as_nested_tensor([p, p]).unbind()[0],
    "a NestedTensor as input": lambda p: nn.functional.linear(_nested(), p).unbind()[0],
    "Tensor.new": lambda p: torch.ones(1).new(p),
    "Tensor.new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "Tensor.set_": lambda p: torch.empty(0).set_(p),
    "Tensor.as_subclass": lambda p: p.as_subclass(Named),
    "Tensor.as_subclass, by the class": lambda p: torch.Tensor.as_subclass(p, Named),
    "Tensor._make_subclass": lambda p: torch.Tensor._make_subclass(Named, p),
    "nn.Parameter": lambda p: nn.Parameter(p),
    "nn.Parameter, frozen": lambda p: nn.Parameter(p, requires_grad=False),
    "nn.Buffer": lambda p: nn.Buffer(p),
    "Tensor.data": lambda p: p.data,
    "Tensor.untyped_storage": lambda p: list(p.untyped_storage()),
    "Tensor.tolist": lambda p: p.tolist(),
    "Tensor.numpy": lambda p: p.detach().numpy().copy(),
    "numpy.asarray": lambda p: np.asarray(p.detach()).copy(),
    "numpy.from_dlpack": lambda p: np.from_dlpack(p.detach()).copy(),
    "from_dlpack": lambda p: torch.from_dlpack(p.detach()),
    "to_dlpack": lambda p: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p)),
    "repr": lambda p: repr(p),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": lambda p: _saved(p),
    "sent to a process": lambda p: _sent(p),
    "func.grad": lambda p: torch.func.grad(_twice)(p),
    "func.vjp": lambda p: torch.func.vjp(_twice, p)[1](torch.tensor(1.0)),
    "func.jvp": lambda p: torch.func.jvp(_twice, (p,), (_X,)),
    "func.jacrev": lambda p: torch.func.jacrev(_twice)(p),
    "func.jacfwd": lambda p: torch.func.jacfwd(_twice)(p),
    "func.hessian": lambda p: torch.func.hessian(_twice)(p),
    "func.linearize": lambda p: torch.func.linearize(_twice, p)[0],
    "func.functionalize": lambda p: torch.func.functionalize(_twice)(p),
    "func.vmap": lambda p: torch.func.vmap(_twice)(p),
    "func.vmap, closed over": lambda p: torch.func.vmap(lambda x: (x * p).sum())(_X),
    "func.functional_call": lambda p: torch.func.functional_call(nn.Linear(3, 3, bias=False), {"weight": p}, _X),
    "func.stack_module_state": lambda p: torch.func.stack_module_state([_holder(p)])[0]["weight"],
    "autograd.functional.jacobian": lambda p: torch.autograd.functional.jacobian(_twice, p),
    "autograd.grad, grad_outputs": lambda p: _weighted_gradient(p),
    "backward, gradient": lambda p: _weighted_backward(p),
    "autograd.Function": lambda p: Square.apply(p),
    "checkpoint": lambda p: checkpoint(_twice, p, use_reentrant=False),
    "a scripted function": lambda p: bias_gelu(p, _X),
    "a traced function": lambda p: _traced(_X, p),
    "a scripted module": lambda p: torch.jit.script(_holder(p))(_X),
    "a scripted module's method": lambda p: torch.jit.script(_holder(p)).forward(_X),
    "a quiet subclass first": lambda p: _X.as_subclass(Quiet) @ p,
    "a disabled subclass first": lambda p: _X.as_subclass(Disabled) @ p,
    "torch.ops": lambda p: torch.ops.aten.mul.Tensor(p, p),
    "torch._foreach": lambda p: torch._foreach_mul([p], 2.0),
}


def _collective(run: Callable[[Tensor, list[Tensor]], Any]) -> Callable[[Tensor], list[Tensor]]:
    """`run(p, out)`; `out` holds one tensor for each rank."""

    def collective(p: Tensor) -> list[Tensor]:
        out = [torch.zeros(3, 3) for _ in range(dist.get_world_size())]
        with torch.no_grad():
            work = run(p, out)
        if work is not None:
            work.wait()
        return out

    return collective


def _pair(p: Tensor) -> list[Tensor]:
    return [p] * dist.get_world_size()


def _first(p: Tensor) -> list[Tensor] | None:
    return _pair(p) if dist.get_rank() == 0 else None


def _send(p: Tensor, out: list[Tensor]) -> None:
    me, world = dist.get_rank(), dist.get_world_size()
    if me == 0 and world > 1:
        dist.send(p, dst=1)
    elif me == 1:
        dist.recv(out[0], src=0)


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    name: _collective(run)
    for name, run in {
        "all_gather": lambda p, out: dist.all_gather(out, p),
        "all_gather_into_tensor": lambda p, out: dist.all_gather_into_tensor(torch.cat(out), p),
        "all_gather_object": lambda p, out: dist.all_gather_object([None] * len(out), p),
        "all_to_all": lambda p, out: dist.all_to_all(out, _pair(p)),
        "all_to_all_single": lambda p, out: dist.all_to_all_single(torch.zeros(3, 3), p, *_uneven(out)),
        "broadcast": lambda p, out: dist.broadcast(p if dist.get_rank() == 0 else out[0], src=0),
        "gather": lambda p, out: dist.gather(p, out if dist.get_rank() == 0 else None, dst=0),
        "reduce": lambda p, out: dist.reduce(p if dist.get_rank() else out[0], dst=0),
        "scatter": lambda p, out: dist.scatter(out[0], _first(p), src=0),
        "reduce_scatter": lambda p, out: dist.reduce_scatter(out[0], _pair(p)),
        "send": _send,
        "ProcessGroup.allgather": lambda p, out: dist.group.WORLD.allgather([out], [p]),
        "ProcessGroup.broadcast": lambda p, out: dist.group.WORLD.broadcast([p if dist.get_rank() == 0 else out[0]]),
        "ProcessGroup.scatter": lambda p, out: dist.group.WORLD.scatter(
            [out[0]], [_pair(p)] if dist.get_rank() == 0 else [], dist.ScatterOptions()
        ),
        "ProcessGroup.reduce_scatter": lambda p, out: dist.group.WORLD.reduce_scatter([out[0]], [_pair(p)]),
    }.items()
}
"""Collectives with the tensor among their inputs; all ranks run them at the same time."""


def _uneven(out: list[Tensor]) -> tuple[list[int], list[int]]:
    """Split sizes with which a rank sends all rows to itself."""
    sizes = [3 if rank == dist.get_rank() else 0 for rank in range(len(out))]
    return sizes, sizes


def _nested() -> Tensor:
    made = torch.nested.nested_tensor([_X, _X[:2]], layout=torch.jagged)
    assert isinstance(made, NestedTensor)
    return made


def _sent(p: Tensor) -> Any:
    data = multiprocessing.reduction.ForkingPickler.dumps(p)
    return pickle.loads(data)


def _saved(p: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _holder(p: Tensor) -> nn.Linear:
    module = nn.Linear(3, 3, bias=False)
    if isinstance(p, nn.Parameter):
        module.weight = p
    else:
        del module.weight
        module.register_buffer("weight", p)
    return module


def _weighted_gradient(p: Tensor) -> Any:
    x = torch.ones(3, 3, requires_grad=True)
    return torch.autograd.grad(x * 2, x, grad_outputs=p)


def _weighted_backward(p: Tensor) -> Tensor | None:
    x = torch.ones(3, 3, requires_grad=True)
    (x * 2).backward(p)
    return x.grad

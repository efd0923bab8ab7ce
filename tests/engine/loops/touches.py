"""Loops that read or change parameters and gradients which may be in flight, in every way that torch offers."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loops.models import Raw, mlp, scripted
from loops.table import plain, row, train
from loops.ways import Run

HOST = {"numpy", "array_interface", "dlpack_to_numpy"}
"""NumPy reads no device memory."""


class Tagged(torch.Tensor):
    """A user's tensor subclass."""


class Silent(torch.Tensor):
    """A user's subclass without torch functions."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _gathered(p: Tensor, run: Run) -> list[Tensor]:
    parts = [torch.empty_like(p.detach()) for _ in range(run.world)]
    dist.all_gather(parts, p.detach(), group=run.way.group)
    return parts


def _scattered(p: Tensor, run: Run) -> Tensor:
    got = torch.empty_like(p.detach())
    dist.scatter(got, [p.data] * run.world if run.rank == 0 else None, src=0, group=run.way.group)
    return got


def _reduce_scattered(p: Tensor, run: Run) -> Tensor:
    got = torch.empty_like(p.detach())
    dist.reduce_scatter(got, [p] * run.world, group=run.way.group)
    return got


def _by_group(p: Tensor, run: Run) -> list[Tensor]:
    parts = [torch.empty_like(p.detach()) for _ in range(run.world)]
    run.way.group.allgather([parts], [p]).wait()
    return parts


def _reduced(p: Tensor, run: Run) -> Tensor:
    dist.all_reduce(p.data, group=run.way.group)
    total = p.detach().clone()
    p.data.div_(run.world)
    return total


def _swapped(p: Tensor, _run: Run) -> Tensor:
    """`swap_tensors` gives another object the parameter's content, and back."""
    other = nn.Parameter(torch.zeros_like(p)) if isinstance(p, nn.Parameter) else torch.zeros_like(p)
    torch.utils.swap_tensors(p, other)
    out = other.detach().clone()
    torch.utils.swap_tensors(p, other)
    return out


def _set(p: Tensor, _run: Run) -> Tensor:
    other = torch.empty(0, dtype=p.dtype, device=p.device)
    other.set_(p.detach())
    return other.clone()


def _saved(p: Tensor, _run: Run) -> Any:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@scripted
def _scripted(p: Tensor) -> Tensor:
    return p * 2.0 + 1.0


READS: dict[str, Callable[[Any, Run], Any]] = {
    "torch_tensor": lambda p, run: torch.tensor(p.detach()),
    "tensor_constructor": lambda p, run: torch.Tensor(p.cpu() if p.is_cuda else p),
    "as_tensor": lambda p, run: torch.as_tensor(p).clone(),
    "asarray": lambda p, run: torch.asarray(p.detach(), copy=True),
    "clone": lambda p, run: p.clone(),
    "data": lambda p, run: p.data.clone(),
    "numpy": lambda p, run: torch.from_numpy(p.detach().numpy().copy()),
    "array_interface": lambda p, run: torch.from_numpy(p.detach().__array__().copy()),
    "dlpack": lambda p, run: torch.from_dlpack(p.detach()).clone(),
    "dlpack_to_numpy": lambda p, run: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).clone(),
    "item": lambda p, run: torch.tensor([p.view(-1)[0].item(), float(p.view(-1)[1])]),
    "tolist": lambda p, run: torch.tensor(p.tolist()),
    "iteration": lambda p, run: torch.stack([t.detach().sum() for t in p]),
    "print": lambda p, run: torch.tensor([ord(c) for c in repr(p.detach())][:40]),
    "format": lambda p, run: torch.tensor([ord(c) for c in f"{p.view(-1)[0]:.6f}"][:6]),
    "bool": lambda p, run: torch.tensor(bool((p > 0).any())),
    "comparison": lambda p, run: (p == p.flip(0)).sum() + torch.equal(p, p),
    "foreach": lambda p, run: torch._foreach_mul([p.detach(), p.detach()], 2.0)[0],
    "out_argument": lambda p, run: torch.mul(p.detach(), 2, out=torch.empty_like(p.detach())),
    "copy_from": lambda p, run: torch.empty_like(p.detach()).copy_(p.detach()),
    "set_": _set,
    "set_data": lambda p, run: _through_data(p),
    "untyped_storage": lambda p, run: torch.tensor(list(p.untyped_storage()[:16])),
    "as_subclass": lambda p, run: p.detach().as_subclass(Tagged).clone().as_subclass(torch.Tensor),
    "raw_as_subclass": lambda p, run: p.as_subclass(Tagged).detach().as_subclass(torch.Tensor).clone(),
    "silent_subclass": lambda p, run: (p.as_subclass(Silent) + 0.0).as_subclass(torch.Tensor).detach().clone(),
    "new_parameter": lambda p, run: nn.Parameter(p).detach().clone(),
    "buffer": lambda p, run: nn.Buffer(p.detach()).clone(),
    "swap_tensors": _swapped,
    "nested_tensor": lambda p, run: torch.nested.nested_tensor([p.detach(), p.detach()]).unbind()[0].clone(),
    "raw_nested_tensor": lambda p, run: torch.nested.nested_tensor([p], requires_grad=False).unbind()[0].clone(),
    "as_nested_tensor": lambda p, run: torch.nested.as_nested_tensor([p, p]).unbind()[1].detach().clone(),
    "einsum": lambda p, run: torch.einsum("i...,i...->i", p, p),
    "functional_vmap": lambda p, run: torch.func.vmap(lambda r: r * 2)(p).detach(),
    "functional_grad": lambda p, run: torch.func.grad(lambda q: (q * q * q).sum())(p).detach(),
    "functional_vjp": lambda p, run: torch.func.vjp(lambda q: q.sin(), p)[1](torch.ones_like(p))[0].detach(),
    "functional_jvp": lambda p, run: torch.func.jvp(lambda q: q * q, (p,), (torch.ones_like(p),))[1].detach(),
    "scripted_function": lambda p, run: _scripted(p).detach(),
    "all_reduce": _reduced,
    "all_gather": _gathered,
    "scatter": _scattered,
    "reduce_scatter": _reduce_scattered,
    "process_group": _by_group,
    "broadcast_object": lambda p, run: pickle.loads(pickle.dumps(p.detach())),
    "pickled": lambda p, run: pickle.loads(pickle.dumps(p)),
    "saved": _saved,
    "deepcopied": lambda p, run: copy.deepcopy(p),
    "copied": lambda p, run: copy.copy(p).detach().clone(),
    "to_float64": lambda p, run: p.to(torch.float64),
    "contiguous": lambda p, run: p.t().contiguous(),
}
"""A value read from a parameter, or from a gradient."""
WITHOUT_GRADIENTS = {"new_parameter", "raw_nested_tensor", "swap_tensors"}


def _through_data(p: Tensor) -> Tensor:
    """Another tensor takes over the memory by `.data`."""
    other = torch.empty(0, dtype=p.dtype, device=p.device)
    other.data = p.detach()
    return other.clone()


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _parameters(read: Callable[[Any, Run], Any]) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model, optimizer, net = plain(run)
        train(run, optimizer, net, after=lambda step: run.read(*_listed(read(model[2 * (step % 3)].weight, run))))

    return loop


def _gradients(read: Callable[[Any, Run], Any]) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model, optimizer, net = plain(run)
        train(
            run, optimizer, net, between=lambda step: run.read(*_listed(read(model[2 * (step % 3)].weight.grad, run)))
        )

    return loop


# A missing wait shows over the late exchange, and a codec changes nothing about who waits: one way is enough. DDP holds
# parameters in a way that `swap_tensors` refuses.
for _name, _read in READS.items():
    _how: dict[str, Any] = {"steps": 4, "ways": ("fine",), "ddp": _name != "swap_tensors", "cuda": _name not in HOST}
    row(name=f"parameter_by_{_name}", **_how)(_parameters(_read))
    if _name not in WITHOUT_GRADIENTS:
        row(name=f"gradient_by_{_name}", **_how)(_gradients(_read))


def _raw(run: Run, read: Callable[[Raw, Tensor], Tensor]) -> None:
    """A module's forward reads its raw parameters, which the last step may still update."""
    _, optimizer, net = plain(run, lambda: Raw(read))
    train(run, optimizer, net)


@row()
def forward_reads_raw_parameters(run: Run) -> None:
    _raw(run, lambda m, x: (x @ m.first + m.bias).tanh())


@row()
def forward_reads_the_data_of_its_parameters(run: Run) -> None:
    _raw(run, lambda m, x: (x @ m.first + m.bias).tanh() + m.bias.data)


@row(ddp=False)
def forward_reads_through_a_subclass(run: Run) -> None:
    _raw(run, lambda m, x: (x @ m.first.as_subclass(Tagged) + m.bias).as_subclass(torch.Tensor).tanh())


@row()
def forward_reads_through_a_nested_tensor(run: Run) -> None:
    def read(m: Raw, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor(list(x.split(4)), layout=torch.jagged)
        return torch.cat(nn.functional.linear(rows, m.first.t(), m.bias).tanh().unbind())

    _raw(run, read)


@row()
def forward_multiplies_by_vmap(run: Run) -> None:
    _raw(run, lambda m, x: torch.func.vmap(lambda r: r @ m.first + m.bias)(x).tanh())


@row(cuda=False)  # the model's move to the device leaves the alias behind
def alias_from_before_attach(run: Run) -> None:
    model = mlp()
    alias = [p.data for p in model.parameters()]
    optimizer = run.optimizer(model.parameters())
    net = run.attach(model, optimizer)
    train(run, optimizer, net, after=lambda _step: run.read(*alias))


@row()
def alias_from_after_attach(run: Run) -> None:
    model, optimizer, net = plain(run)
    alias = [p.detach().view(-1)[:8] for p in model.parameters()]
    train(run, optimizer, net, after=lambda _step: run.read(torch.cat(alias)))


@row()
def alias_taken_in_every_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    alias: list[Tensor] = []

    def take(step: int) -> None:
        run.read(*alias)
        alias[:] = [model[2 * (step % 3)].weight.data]

    train(run, optimizer, net, after=take)


@row(cuda=False, optimizer="adamw")
def numpy_views_waited_for_by_hand(run: Run) -> None:
    model, optimizer, net = plain(run)
    views = [p.detach().numpy() for p in model.parameters()]  # nothing can see who reads these

    def look(_step: int) -> None:
        run.way.wait()
        run.read(*(torch.from_numpy(v.copy()) for v in views))

    train(run, optimizer, net, after=look)


@row(optimizer="adamw")
def parameters_edited_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def clamp(step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1) if step % 2 else p.clamp_(-0.1, 0.1)

    train(run, optimizer, net, after=clamp)


@row()
def parameters_replaced_by_data(run: Run) -> None:
    """The user gives parameters other memory between steps."""
    model, optimizer, net = plain(run)

    def replace(step: int) -> None:
        if step % 2:
            for p in model.parameters():
                p.data = p.data.clone().mul_(0.9)

    train(run, optimizer, net, after=replace)


@row()
def vector_of_parameters_and_back(run: Run) -> None:
    model, optimizer, net = plain(run)

    def shrink(_step: int) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.99, model.parameters())

    train(run, optimizer, net, after=shrink)


@row()
def deepcopy_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def twin(step: int) -> None:
        if step % 2:
            other = copy.deepcopy(model)
            run.read(*other.parameters())
            run.read(other(run.batch(step)[0]))

    train(run, optimizer, net, after=twin)


@row(optimizer="adamw")
def evaluation_right_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.read(model(run.batch(step, 9)[0]))
        model.train()

    train(run, optimizer, net, after=evaluate)


@row()
def evaluation_of_one_layer(run: Run) -> None:
    model, optimizer, net = plain(run)

    def probe(step: int) -> None:
        with torch.inference_mode():
            run.read(model[0](run.batch(step, 9)[0]))

    train(run, optimizer, net, after=probe)


@row()
def norm_of_all_parameters_after_step(run: Run) -> None:
    model, optimizer, net = plain(run)
    train(run, optimizer, net, after=lambda _step: run.read(nn.utils.get_total_norm(list(model.parameters()))))


@row(ddp=False)
def graph_from_before_the_step_is_refused(run: Run) -> None:
    """torch refuses a graph over changed values; so it does when the change is in flight."""
    _, optimizer, net = plain(run)
    for step in range(run.steps):
        old = run.loss(net, step)
        run.loss(net, step, 1).backward()
        optimizer.step()
        try:
            old.backward()
            refused = False
        except RuntimeError as error:
            refused = "modified by an inplace operation" in str(error)
        run.read(torch.tensor(refused))
        optimizer.zero_grad()

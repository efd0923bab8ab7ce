"""What a loop is compared with: torch's DDP, and the loop with an all-reduce written by hand after each backward pass.

The second one also takes a codec, which it applies to all gradients of a model at once, with `codecs.lockstep` over
the gradients of all ranks: no units, no threads, nothing in flight.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline import codecs


class Ddp:
    """torch's DistributedDataParallel."""

    ours = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.nets: dict[int, tuple[DistributedDataParallel, bool]] = {}

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool, **more: Any) -> nn.Module:
        net = DistributedDataParallel(
            model, process_group=more.get("process_group", self.group), find_unused_parameters=unused
        )
        self.nets[id(model)] = net, unused
        return net

    def again(self, model: nn.Module) -> nn.Module:
        """DDP does not follow `requires_grad`: a new one is needed, after the old one has let go of the parameters."""
        unused = self.nets.pop(id(model))[1]
        gc.collect()
        return self.attach(model, (), unused)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.nets[id(model)][0].no_sync()

    def wait(self) -> None:
        pass

    def leave(self, model: nn.Module) -> None:
        self.nets.pop(id(model))
        gc.collect()

    def close(self) -> None:
        self.nets.clear()


class Replica:
    """A model whose gradients are averaged by hand, with the state of its codec."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, codec: str) -> None:
        self.model, self.group, self.codec = model, group, codec
        self.parameters = dict(model.named_parameters())
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.states: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        """Every rank's codec state, committed."""
        self.tentative: list[dict[str, Tensor]] = [{} for _ in range(self.world)]
        """Every rank's codec state after exchanges whose gradients no step has used yet."""
        self.paused = False
        self.grads: dict[str, tuple[Tensor, int]] = {}
        self.exchanged: dict[str, tuple[Tensor, Tensor]] = {}
        """Gradient object and values of the parameter at the last exchange."""
        self.has_optimizer = False
        """Whether an optimizer has ever stepped."""
        self.hook = model.register_forward_pre_hook(self.before_forward) if list(model.buffers()) else None
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self.broadcast(tensor)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """The parameters that train now, under the names that they had at first."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def broadcast(self, tensor: Tensor) -> None:
        if self.world > 1 and tensor.numel():
            values = tensor.detach().contiguous()
            real = torch.view_as_real(values) if values.is_complex() else values
            dist.broadcast(real, dist.get_global_rank(self.group, 0), group=self.group)
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values)

    def before_forward(self, *_: Any) -> None:
        """As DDP does: rank 0's buffers before every forward that trains."""
        if self.model.training and torch.is_grad_enabled() and not self.paused:
            for buffer in self.model.buffers():
                self.broadcast(buffer)

    def before_backward(self) -> None:
        self.commit_used()
        self.grads = {n: (p.grad, p.grad._version) for n, p in self.named.items() if p.grad is not None}

    def after_backward(self) -> None:
        """Average the gradients, if this pass has accumulated into any on any rank."""
        if self.world == 1 or self.paused:
            return
        named = self.named
        fired = {n for n, p in named.items() if p.grad is not None and not self.same(n, p.grad)}
        have = [bool(fired), *(p.grad is not None for p in named.values())]
        counts = torch.tensor(have, dtype=torch.int32, device=next(self.model.parameters()).device)
        dist.all_reduce(counts, group=self.group)
        some, *used = counts.tolist()
        if not some:
            return
        mine = {n: p for (n, p), count in zip(named.items(), used, strict=True) if count}
        # States of a pass whose gradients were dropped are dropped, too.
        self.tentative = [
            {k: t for k, t in more.items() if self.continues(k.rpartition(".")[0])} for more in self.tentative
        ]  # fmt: skip
        for p in mine.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.average(mine)
        self.exchanged = {n: (p.grad, p.detach().clone()) for n, p in mine.items() if p.grad is not None}

    def same(self, name: str, grad: Tensor) -> bool:
        before, version = self.grads.get(name, (None, 0))
        return before is grad and grad._version == version

    @torch.no_grad()
    def average(self, mine: dict[str, nn.Parameter]) -> None:
        kinds: dict[torch.dtype, list[str]] = {}
        for name, p in mine.items():
            kinds.setdefault(p.dtype, []).append(name)
        for names in kinds.values():
            grads: list[Any] = [mine[name].grad for name in names]
            real = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
            for into, mean in zip(real, self.means(names, real), strict=True):
                into.copy_(mean)

    def means(self, names: list[str], grads: list[Tensor]) -> list[Tensor]:
        if codecs.build(self.codec).feedback:
            return self.compressed(names, grads)
        flat = torch.cat([g.reshape(-1) for g in grads])
        share = flat.float().bfloat16() if self.codec == "bf16" else flat
        share = share / self.world
        dist.all_reduce(share, group=self.group)
        return [part.view(g.shape) for part, g in zip(share.split([g.numel() for g in grads]), grads, strict=True)]

    def compressed(self, names: list[str], grads: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([g.reshape(-1) for g in grads])
        rows = [torch.empty_like(flat) for _ in range(self.world)]
        dist.all_gather(rows, flat, group=self.group)
        sizes = [g.numel() for g in grads]
        everyones = [
            [part.view(g.shape) for part, g in zip(row.split(sizes), grads, strict=True)] for row in rows
        ]  # fmt: skip
        # Accumulated onto the last exchange's gradients: its residual is added, as if a step had used them.
        start = [{**state, **more} for state, more in zip(self.states, self.tentative, strict=True)]
        done = codecs.lockstep(
            self.codec, everyones, names=names,
            states=[{k: t for k, t in s.items() if k.rpartition(".")[0] in names} for s in start],
        )  # fmt: skip
        # A product of factors that is not finite leaves the state as it was.
        for out, name in zip(done.outputs[0], names, strict=True):
            for old, new, kept in zip(start, done.states, self.tentative, strict=True):
                chosen = new if bool(out.isfinite().all()) else old
                kept.update({k: t for k, t in chosen.items() if k.rpartition(".")[0] == name})
        return done.outputs[self.rank]

    def continues(self, name: str) -> bool:
        """Whether this pass has accumulated onto the gradient of the last exchange."""
        before = self.exchanged.get(name)
        return before is not None and name in self.named and before[0] is self.named[name].grad

    def commit(self, names: set[str]) -> None:
        """A step has used these gradients."""
        for state, more in zip(self.states, self.tentative, strict=True):
            mine = [key for key in more if key.rpartition(".")[0] in names]
            state.update({key: more.pop(key) for key in mine})
        self.exchanged = {n: known for n, known in self.exchanged.items() if n not in names}

    def commit_used(self) -> None:
        """In a loop without an optimizer, gradients were used if parameters have changed since the last exchange."""
        if not self.has_optimizer:
            named = self.named
            if any(n in named and not torch.equal(named[n], values) for n, (_, values) in self.exchanged.items()):
                self.commit(set(named))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to use gradients, unless they were cleared or zeroed."""
        mine = {id(p) for p in self.parameters.values()}
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
        self.has_optimizer = self.has_optimizer or bool(grads)
        if any(grad is not None and bool(grad.any()) for grad in grads):
            self.commit(set(self.named))


class Plain:
    """The loop by hand: `torch.autograd.backward` is followed by an all-reduce of the gradients it has left."""

    ours = False

    def __init__(self, group: dist.ProcessGroup, codec: str = "none") -> None:
        self.group, self.codec = group, codec
        self.replicas: dict[int, Replica] = {}
        self.backward: Any = None
        self.hook: Any = None

    def attach(self, model: nn.Module, optimizers: tuple[Any, ...], unused: bool, **more: Any) -> nn.Module:
        self.replicas[id(model)] = Replica(model, more.get("process_group", self.group), self.codec)
        if self.backward is None:
            self.backward = torch.autograd.backward
            self.hook = register_optimizer_step_pre_hook(lambda o, *_: self.steps(o))
            torch.autograd.backward = self.then_average
        return model

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        for replica in self.replicas.values():
            replica.steps(optimizer)

    def then_average(self, *args: Any, **kwargs: Any) -> None:
        outer, torch.autograd.backward = torch.autograd.backward, self.backward  # checkpointing calls it inside
        try:
            for replica in self.replicas.values():
                replica.before_backward()
            self.backward(*args, **kwargs)
        finally:
            torch.autograd.backward = outer
        for replica in self.replicas.values():
            replica.after_backward()

    def again(self, model: nn.Module) -> nn.Module:
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        replica = self.replicas[id(model)]
        replica.paused = True
        try:
            yield
        finally:
            replica.paused = False

    def wait(self) -> None:
        pass

    def leave(self, model: nn.Module) -> None:
        replica = self.replicas.pop(id(model))
        if replica.hook is not None:
            replica.hook.remove()

    def save(self, model: nn.Module) -> Any:
        return [dict(state) for state in self.replicas[id(model)].states]

    def load(self, model: nn.Module, state: Any) -> None:
        self.replicas[id(model)].states = [dict(each) for each in state]

    def close(self) -> None:
        for replica in list(self.replicas.values()):
            self.leave(replica.model)
        if self.backward is not None:
            torch.autograd.backward = self.backward
            self.hook.remove()
        self.backward = None

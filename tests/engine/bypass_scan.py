"""Finds operations that read a pending tensor without waiting: calls all of torch's public functions with one.

A pending tensor holds stale values until its ticket is waited for. A function is called with it in many argument
patterns. If a call succeeds and nobody has waited, it is called again over other stale values: results that differ, or
stale values that were overwritten, show that it touched the memory.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from bypass_digest import digest
from torch import Tensor, nn

from syncline.engine.inflight import wait_on_touch

NAMESPACES: Mapping[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": nn.functional,
    "torch.nn.init": nn.init,
    "torch.nn.utils": nn.utils,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.nested": torch.nested,
    "torch.sparse": torch.sparse,
    "torch.signal.windows": torch.signal.windows,
    "torch.autograd": torch.autograd,
    "torch.utils.dlpack": torch.utils.dlpack,
    "torch.testing": torch.testing,
    "torch.masked": torch.masked,
    "torch.func": torch.func,
    "torch.autograd.functional": torch.autograd.functional,
    "torch.distributed": dist,
    "ProcessGroup": dist.ProcessGroup,
}
"""Public functions of these are called with the patterns below; the last two with a process group of one rank."""
NOT_CALLED = """
torch.compile torch.export torch.load torch.set_printoptions torch.typename torch.get_file_path torch.cond
torch.while_loop torch.prepare_multiprocessing_environment torch.fork torch.wait torch.import_ir_module
torch.import_ir_module_from_buffer torch.parse_ir torch.parse_schema torch.parse_type_comment torch.manual_seed
torch.merge_type_from_type_comment torch.init_num_threads torch.seed torch.initial_seed torch.read_vitals
torch.unify_type_list torch.vitals_enabled torch.clear_autocast_cache torch.autocast_increment_nesting
torch.autocast_decrement_nesting torch.empty_like torch.Tensor.new_empty torch.distributed.destroy_process_group
torch.distributed.new_group torch.distributed.new_subgroups torch.distributed.new_subgroups_by_enumeration
torch.distributed.split_group torch.distributed.recv torch.distributed.irecv torch.distributed.rendezvous
torch.distributed.breakpoint torch.distributed.register_rendezvous_handler torch.distributed.shrink_group
torch.distributed.recv_object_list torch.distributed.abort_process_group ProcessGroup.abort ProcessGroup.shutdown
ProcessGroup.recv ProcessGroup.recv_anysource ProcessGroup.merge_remote_group ProcessGroup.split_group
ProcessGroup.monitored_barrier torch.distributed.monitored_barrier torch.distributed.send torch.distributed.isend
torch.Tensor.index torch.distributed.send_object_list torch.distributed.batch_isend_irecv ProcessGroup.send
"""
"""They change the process or compile code, or their result is not determined."""
NOT_CALLED_PREFIXES = ("set_", "get_default", "init_", "is_", "use_", "cudnn_", "miopen_", "mkldnn_", "xpu")


class Pending:
    """The ticket of a tensor that gets its values when somebody waits."""

    marked: list[Tensor] | None = None

    def __init__(self, tensor: Tensor, arrived: Tensor) -> None:
        self.memory, self._arrived, self.waited = tensor.detach(), arrived, False
        assert wait_on_touch.mark(tensor, self)

    def wait(self) -> None:
        """The values arrive."""
        if not self.waited:
            self.waited = True
            with torch.no_grad():
                self.memory.copy_(self._arrived)

    def done(self) -> bool:
        """Whether the values are there."""
        return self.waited


@dataclass
class Found:
    """What a scan has seen, by the name of the function."""

    guarded: set[str] = field(default_factory=set)
    no_read: set[str] = field(default_factory=set)
    """They succeeded without a wait, and neither their result nor the memory shows the values."""
    bypasses: dict[str, str] = field(default_factory=dict)
    """They touched values without a wait: an argument pattern that shows it."""

    @property
    def exercised(self) -> set[str]:
        """Functions that at least one pattern fits."""
        return self.guarded | self.no_read | set(self.bypasses)


Pattern = Callable[[Callable[..., Any], Tensor], Any]


def scan(functions: Mapping[str, Callable[..., Any]]) -> Found:
    """Call functions in all patterns.

    torch's C++ functions look for pending tensors in all their arguments at once: one pattern that waits is enough.
    Functions in Python get all patterns with a kind of tensor that fits, and all with one number.
    """
    found = Found()
    with _others_marked():
        for name, function in functions.items():
            _scan_one(found, name, function)
    return found


def _scan_one(found: Found, name: str, function: Callable[..., Any]) -> None:
    native, fits = not inspect.isfunction(function), False
    collective = name.startswith(("torch.distributed", "ProcessGroup"))
    refused: set[str] = set()
    """Patterns that do not fit the arguments of a C++ function, whatever values a tensor of floats has."""
    for kind in KINDS:
        if (fits and kind != "one number") or (collective and kind not in ("parameter", "tensor")):
            continue
        for text, pattern in PATTERNS.items():
            if (collective and text not in COLLECTIVE_PATTERNS) or (text in refused and kind in FLOATS):
                continue
            outcome = _try(found, name, f"{text} with {kind}", lambda p, a=pattern: a(function, p), kind)
            fits = fits or outcome == "waited"
            if outcome == "refused" and native:
                refused.add(text)
            if fits and native:
                return


def try_recipes(recipes: Mapping[str, Callable[[Tensor], Any]], found: Found | None = None) -> Found:
    """Run functions of one pending tensor, a parameter and a plain tensor."""
    found = found or Found()
    with _others_marked():
        for name, recipe in recipes.items():
            for kind in ("parameter", "tensor"):
                _try(found, name, kind, recipe, kind)
    return found


@contextmanager
def _others_marked() -> Iterator[None]:
    """One more pending tensor, so that the guard is not put up and taken down again for every call."""
    other = torch.zeros(1)
    Pending(other, torch.zeros(1))
    try:
        yield
    finally:
        wait_on_touch.release(other)


def _try(found: Found, name: str, pattern: str, call: Callable[[Tensor], Any], kind: str) -> str | None:
    first = _outcome(call, kind, 1)
    if first == "waited":
        found.guarded.add(name)
    if first in (None, "waited", "refused"):
        return first
    # A function that draws random numbers gives the same ones: every call is seeded.
    if first == _outcome(call, kind, 1) and first != _outcome(call, kind, 2):
        found.bypasses.setdefault(name, pattern)
    else:
        found.no_read.add(name)
    return first


def _outcome(call: Callable[[Tensor], Any], kind: str, value: int) -> str | None:
    """The digest of result and memory; "waited" if the call waited; "refused" after a TypeError, None if it failed."""
    torch.default_generator.manual_seed(0)
    _others.clear()
    stale, arrived, before = _values(kind, value)
    tensor = nn.Parameter(stale.clone()) if kind == "parameter" else stale.clone()
    ticket = Pending(tensor, arrived)
    try:
        result = call(tensor)
        if ticket.waited:
            return "waited"
        text = ("" if result is tensor else digest(result)) + digest(list(_others))
        memory = digest(ticket.memory)
    except Exception as error:
        return "waited" if ticket.waited else "refused" if isinstance(error, TypeError) else None
    finally:
        wait_on_touch.release(tensor)
    return "waited" if ticket.waited else f"{text} {memory == before}"


KINDS: Mapping[str, Tensor] = {
    "parameter": torch.arange(9.0).view(3, 3) * 0.1,
    "tensor": torch.arange(9.0).view(3, 3) * 0.1,
    "vector": torch.tensor([0.2, 0.4, 0.3]),
    "images": torch.linspace(0.1, 0.9, 48).view(1, 3, 4, 4),
    "one number": torch.tensor(0.3),
    "integers": torch.tensor([[0, 1, 1], [1, 0, 1], [1, 1, 2]]),
}
"""Values of pending tensors."""
FLOATS = ("tensor", "vector", "images")
"""Kinds that a C++ function cannot tell from a parameter when it looks at the types of its arguments."""


@cache
def _values(kind: str, value: int) -> tuple[Tensor, Tensor, str]:
    """Stale values, which differ with the given one; the values that will arrive; the digest of the stale ones."""
    stale = KINDS[kind] * value + (torch.eye(3) * 3 if kind in ("parameter", "tensor") else 0)
    return stale, stale * 3, digest(stale)


_others: list[Tensor] = []
"""Other arguments of the current call."""


def _like(p: Tensor) -> Tensor:
    """A plain tensor of the same shape and type, made without a touch; a function may write its result there."""
    _others.append(torch.ones(p.shape, dtype=p.dtype))
    return _others[-1]


_INDEX = torch.tensor([0, 1, 1])
PATTERNS: Mapping[str, Pattern] = {
    "f(p)": lambda f, p: f(p),
    "f(p, p)": lambda f, p: f(p, p),
    "f(p, x)": lambda f, p: f(p, _like(p)),
    "f(x, p)": lambda f, p: f(_like(p), p),
    "f(p, x, x)": lambda f, p: f(p, _like(p), _like(p)),
    "f(x, p, x)": lambda f, p: f(_like(p), p, _like(p)),
    "f(x, x, p)": lambda f, p: f(_like(p), _like(p), p),
    "f([p])": lambda f, p: f([p]),
    "f([p, p])": lambda f, p: f([p, p]),
    "f([x], p)": lambda f, p: f([_like(p)], p),
    "f(x, [p])": lambda f, p: f(_like(p), [p]),
    "f([x], [p])": lambda f, p: f([_like(p)], [p]),
    "f([[x]], [p])": lambda f, p: f([[_like(p)]], [p]),
    "f([x], [[p]])": lambda f, p: f([_like(p)], [[p]]),
    "f([p], [x])": lambda f, p: f([p], [_like(p)]),
    "f(p, 0)": lambda f, p: f(p, 0),
    "f(p, 1)": lambda f, p: f(p, 1),
    "f(p, 2)": lambda f, p: f(p, 2),
    "f(p, 0.5)": lambda f, p: f(p, 0.5),
    "f(p, 0, 1)": lambda f, p: f(p, 0, 1),
    "f(p, 0, 1, 1)": lambda f, p: f(p, 0, 1, 1),
    "f(p, (3, 3))": lambda f, p: f(p, (3, 3)),
    "f(p, (1, 1))": lambda f, p: f(p, (1, 1)),
    "f(p, (0, 1))": lambda f, p: f(p, (0, 1)),
    "f(p, (0,), (1,))": lambda f, p: f(p, (0,), (1,)),
    "f(p, 0, index)": lambda f, p: f(p, 0, _INDEX),
    "f(p, 0, index, x)": lambda f, p: f(p, 0, _INDEX, _like(p)),
    "f(x, 0, index, p)": lambda f, p: f(_like(p), 0, _INDEX, p),
    "f(p, index)": lambda f, p: f(p, _INDEX),
    "f(index, p)": lambda f, p: f(_INDEX, p),
    "f(p, x > 0)": lambda f, p: f(p, _like(p) > 0),
    "f(x > 0, p)": lambda f, p: f(_like(p) > 0, p),
    "f(x > 0, p, x)": lambda f, p: f(_like(p) > 0, p, _like(p)),
    "f(p, 0.5, x)": lambda f, p: f(p, 0.5, _like(p)),
    "f(p, dtype)": lambda f, p: f(p, torch.float64),
    "f('ij,jk', p, p)": lambda f, p: f("ij,jk->ik", p, p),
    "f(4, p)": lambda f, p: f(2, p),
    "f(function, p)": lambda f, p: f(lambda t: (t * 2).sum(), p),
    "f(function, p, p)": lambda f, p: f(lambda t: (t * 2).sum(), p, _like(p)),
    "f(function)(p)": lambda f, p: f(lambda t: (t * 2).sum())(p),
    "f(p, out=x)": lambda f, p: f(p, out=_like(p)),
    "f(x, out=p)": lambda f, p: f(_like(p), out=p),
    "f(x, x, out=p)": lambda f, p: f(_like(p), _like(p), out=p),
}


COLLECTIVE_PATTERNS = (
    "f(p)", "f(p, p)", "f(x, p)", "f(p, x)", "f([p])", "f([x], p)", "f(x, [p])", "f([x], [p])", "f([[x]], [p])",
    "f([x], [[p]])", "f(p, 0)",
)  # fmt: skip
"""Gloo does not check its arguments: others could crash the process."""


def public_functions() -> dict[str, Callable[..., Any]]:
    """Public functions of the namespaces, by their full names."""
    functions: dict[str, Callable[..., Any]] = {}
    for space, owner in NAMESPACES.items():
        for name in sorted(dir(owner)):
            full = f"{space}.{name}"
            value = getattr(owner if owner is not dist.ProcessGroup else dist.group.WORLD, name, None)
            if name.startswith("_") or full in NOT_CALLED.split() or name.startswith(NOT_CALLED_PREFIXES):
                continue
            if callable(value) and not isinstance(value, type | types.ModuleType):
                functions[full] = value
    return functions

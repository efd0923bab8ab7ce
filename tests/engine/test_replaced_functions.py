"""Functions that are replaced while an engine is attached: compiled code, TorchScript, names, subclasses, restoring."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor

from ranks import run_ranks
from syncline.engine.inflight import wait_on_touch
from syncline.engine.inflight.unguarded import guard_process


def values(x: Tensor) -> Tensor:
    """Uses functions that are replaced."""
    return x + torch.tensor([1.0, 2.0, 3.0]).sum() + torch.as_tensor(2.0)


def compiled(rank: int, world: int) -> dict[str, bool]:
    """Compiled and scripted code while the functions are replaced, and after."""
    warnings.simplefilter("ignore", DeprecationWarning)
    x, right = torch.ones(3), {}

    def check(when: str) -> None:
        torch.compiler.reset()
        for name, function, want in (
            ("constructors", values, torch.full((3,), 9.0)),
            ("vmap", lambda x: torch.func.vmap(lambda t: t * 2)(x), torch.full((3,), 2.0)),
            ("grad", lambda x: torch.func.grad(lambda t: (t * t).sum())(x), torch.full((3,), 2.0)),
        ):
            made = torch.compile(function, backend="eager", fullgraph=True)
            right[f"{name}, {when}"] = torch.equal(made(x), want)
        right[f"script, {when}"] = torch.equal(torch.jit.script(values)(x), torch.full((3,), 9.0))

    end = guard_process()
    check("replaced")
    end()
    check("restored")
    return right


def test_compiled_and_scripted_code_may_use_replaced_functions() -> None:
    (right,) = run_ranks(compiled, 1)
    assert len(right) == 8
    assert all(right.values()), right


def test_everything_is_restored() -> None:
    def snapshot() -> list[Any]:
        kinds = [torch.Tensor.__dict__, nn.Parameter.__dict__, torch.distributed.ProcessGroup.__dict__]
        names = [torch.__dict__, torch.utils.__dict__, torch.nested.__dict__, {"tensor": globals()["tensor"]}]
        return [{k: v for k, v in space.items() if not k.startswith("__doc")} for space in (*kinds, *names)]

    guard_process()()  # torch loads modules for it
    before = snapshot()
    first, second = guard_process(), guard_process()
    assert tensor is torch.tensor
    assert torch.tensor is not before[3]["tensor"]
    first()
    first()
    assert torch.tensor is not before[3]["tensor"], "the second user still needs it"
    second()
    for old, new in zip(before, snapshot(), strict=True):
        assert {k for k in old.keys() | new.keys() if old.get(k) is not new.get(k)} == set()


class Ticket:
    marked: list[Tensor] | None = None
    waits = 0

    def wait(self) -> None:
        self.waits += 1

    def done(self) -> bool:
        return True


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_forward_waits_once_for_what_it_reads(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layer.train(mode == "train")
    end, tickets = guard_process(), []
    fast: list[bool] = []
    inner = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: fast.append(True) or inner(*args))
    for parameter in layer.parameters():
        tickets.append(Ticket())
        wait_on_touch.mark(parameter, tickets[-1])
    with torch.no_grad():
        layer(torch.ones(1, 3, 4))
    assert [ticket.waits for ticket in tickets] == [1] * len(tickets)
    assert not wait_on_touch.any_marked()
    assert bool(fast) == (mode == "eval"), "torch takes its fast path only if no tensor has an unusual class"
    end()


def test_a_module_without_pending_tensors_has_no_hook() -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    end, ticket, parameter = guard_process(), Ticket(), nn.Parameter(torch.ones(1))
    assert not hooks
    wait_on_touch.mark(parameter, ticket)
    assert len(hooks) == 1
    wait_on_touch.release(parameter)
    assert not hooks
    end()


def test_torchscript_forgets_a_function_that_is_restored() -> None:
    """It knows functions by id, which another function may get: it would be compiled as an operator of torch."""
    from torch.jit import _builtins

    guard_process()()  # imports what adds operators of its own
    known = dict(_builtins._get_builtin_table())
    end = guard_process()
    assert _builtins._get_builtin_table() != known
    end()
    assert _builtins._get_builtin_table() == known

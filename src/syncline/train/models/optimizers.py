"""Optimizers by spec: `sgd(lr=0.1, momentum=0.9)`; only arguments that a spec can write."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn, optim

from syncline import spec
from syncline.errors import UsageError
from syncline.registry import Registry

OPTIMIZERS: Registry[Callable[..., optim.Optimizer]] = Registry("optimizer")

Parameters = Iterable[nn.Parameter] | Iterable[Tensor] | Iterable[dict[str, Any]]


def load_optimizer(text: str, parameters: Parameters) -> optim.Optimizer:
    """The optimizer of a spec over `parameters`; `package.module:Class(lr=0.1)` is the user's own."""
    call = spec.parse_one(text)
    make = OPTIMIZERS.get(call.name)
    try:
        made = spec.apply(call, make, list(parameters))
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"optimizer '{call}': {error}") from error
    if not isinstance(made, optim.Optimizer):
        raise UsageError(f"optimizer '{call}' returned a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


@OPTIMIZERS.register("sgd")
def sgd(
    params: Any, *, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> optim.Optimizer:
    """Stochastic gradient descent."""
    return optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


@OPTIMIZERS.register("rmsprop")
def rmsprop(
    params: Any, *, lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> optim.Optimizer:  # fmt: skip
    """RMSprop."""
    return optim.RMSprop(params, lr=lr, alpha=alpha, eps=eps, momentum=momentum, weight_decay=weight_decay)


@OPTIMIZERS.register("adagrad")
def adagrad(params: Any, *, lr: float = 0.01, eps: float = 1e-10, weight_decay: float = 0.0) -> optim.Optimizer:
    """Adagrad."""
    return optim.Adagrad(params, lr=lr, eps=eps, weight_decay=weight_decay)


@OPTIMIZERS.register("adadelta")
def adadelta(
    params: Any, *, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0
) -> optim.Optimizer:
    """Adadelta."""
    return optim.Adadelta(params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)


def _adam_family(name: str, kind: Callable[..., optim.Optimizer], *, rate: float, decay: float) -> None:
    def make(
        params: Any, *, lr: float = rate, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
        weight_decay: float = decay,
    ) -> optim.Optimizer:  # fmt: skip
        return kind(params, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)

    OPTIMIZERS.register(name)(make)


_adam_family("adam", optim.Adam, rate=0.001, decay=0.0)
_adam_family("adamw", optim.AdamW, rate=0.001, decay=0.01)
_adam_family("adamax", optim.Adamax, rate=0.002, decay=0.0)
_adam_family("nadam", optim.NAdam, rate=0.002, decay=0.0)
_adam_family("radam", optim.RAdam, rate=0.001, decay=0.0)

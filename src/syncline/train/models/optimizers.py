"""Optimizers by spec: `sgd(lr=0.1, momentum=0.9)`; only arguments that a spec can write."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
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
    make = OPTIMIZERS.get(call.name, makes=(optim.Optimizer,))
    try:
        made = spec.apply(call, make, list(parameters))
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"optimizer '{call}': {error}") from error
    if not isinstance(made, optim.Optimizer):
        raise UsageError(f"optimizer '{call}' returned a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


_ADAM: dict[str, Any] = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
# Name -> (class, the arguments that a spec can give, with their defaults).
_TABLE: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}),
    "rmsprop": (optim.RMSprop, {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0}),
    "adagrad": (optim.Adagrad, {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0}),
    "adadelta": (optim.Adadelta, {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0}),
    "adam": (optim.Adam, _ADAM),
    "adamw": (optim.AdamW, _ADAM | {"weight_decay": 0.01}),
    "adamax": (optim.Adamax, _ADAM | {"lr": 0.002}),
    "nadam": (optim.NAdam, _ADAM | {"lr": 0.002}),
    "radam": (optim.RAdam, _ADAM),
}


def _register(name: str, kind: Callable[..., optim.Optimizer], defaults: dict[str, Any]) -> None:
    def make(params: Any, **given: Any) -> optim.Optimizer:
        arguments = defaults | given
        if "beta1" in arguments:
            arguments["betas"] = (arguments.pop("beta1"), arguments.pop("beta2"))
        return kind(params, **arguments)

    options = [Parameter(key, Parameter.KEYWORD_ONLY, default=v, annotation=type(v)) for key, v in defaults.items()]
    made: Any = make
    made.__signature__ = Signature([Parameter("params", Parameter.POSITIONAL_ONLY), *options])  # `spec.apply` reads it
    OPTIMIZERS.register(name)(make)


for _name, (_kind, _defaults) in _TABLE.items():
    _register(_name, _kind, _defaults)

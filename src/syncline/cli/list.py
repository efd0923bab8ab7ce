"""`syncline list`: names that specs, options and recipes can use, with their arguments and one line about each."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from syncline.cli.app import new_app
from syncline.cli.output import print_json
from syncline.errors import UsageError, unknown
from syncline.registry import Registry

app = new_app()

_GIVEN = ("grad", "state", "merge", "position", "progress", "need", "seed", "params", "inner")
"""Parameters that Syncline passes itself: no part of a spec."""


@dataclass(frozen=True)
class Entry:
    """A name, its arguments with their defaults, and one line about it."""

    name: str
    arguments: str
    summary: str


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(help="codecs, exchanges, strategies, models, data, optimizers, policies (freeze) or recipes."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the names of a kind with their arguments: codecs, exchanges, strategies, models, data and so on."""
    if not kind:
        raise UsageError(f"say what to list: syncline list {'|'.join(_KINDS)}")
    if kind not in _KINDS:
        raise unknown("kind", kind, _KINDS)
    entries = list(_KINDS[kind]())
    if as_json:
        print_json({kind: [asdict(entry) for entry in entries]})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = {"name": "name", "arguments": "arguments", "summary": "what it is"}
    shown = [key for key in columns if any(getattr(entry, key) for entry in entries)]
    for key in shown:
        table.add_column(columns[key], overflow="fold", no_wrap=key == "name")
    for entry in entries:
        table.add_row(*(getattr(entry, key) for key in shown))
    Console().print(table, markup=False, highlight=False)


def _entries(registry: Registry[Any], function: Callable[[Any], Any]) -> Iterator[Entry]:
    for name in registry.names():
        made = function(registry.get(name))
        yield Entry(name, _arguments(made), _first_sentence(made))


def _arguments(function: Any) -> str:
    parameters = inspect.signature(function).parameters.values()
    shown = [p for p in parameters if p.name not in _GIVEN and p.kind is not p.VAR_KEYWORD]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={_value(p.default)}" for p in shown)


def _value(default: Any) -> str:
    """A default as it is written in a spec."""
    text = str(round(default, 4)) if isinstance(default, float) and default > 1e-3 else str(default)
    return text.lower() if default is None or isinstance(default, bool) else text or '""'


def _first_sentence(function: Any) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]


def _codecs() -> Iterator[Entry]:
    from syncline.codecs import CODECS

    return _entries(CODECS, lambda made: made.function)


def _exchanges() -> Iterator[Entry]:
    from syncline.exchange import EXCHANGES

    return _entries(EXCHANGES, lambda made: made.merge)


def _strategies() -> Iterator[Entry]:
    from syncline.train.strategies import STRATEGIES

    return _entries(STRATEGIES, lambda made: made)


def _models() -> Iterator[Entry]:
    from syncline.train.models import MODELS

    return _entries(MODELS, lambda made: made)


def _data() -> Iterator[Entry]:
    from syncline.train.data import DATA

    return _entries(DATA, lambda made: made.make)


def _optimizers() -> Iterator[Entry]:
    from syncline.train.models.optimizers import OPTIMIZERS

    return _entries(OPTIMIZERS, lambda made: made)


def _policies() -> Iterator[Entry]:
    from syncline.pipeline.freeze import FREEZE_POLICIES

    return _entries(FREEZE_POLICIES, lambda made: made)


def _recipes() -> Iterator[Entry]:
    from syncline.train.config import load_recipe, recipes

    for name in recipes():
        yield Entry(name, "", load_recipe(name).title)


_KINDS: dict[str, Callable[[], Iterator[Entry]]] = {
    "codecs": _codecs,
    "exchanges": _exchanges,
    "strategies": _strategies,
    "models": _models,
    "data": _data,
    "optimizers": _optimizers,
    "policies": _policies,
    "recipes": _recipes,
}

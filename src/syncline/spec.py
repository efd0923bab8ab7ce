"""Parser of specs, the language for codecs, strategies, models and optimizers: `name(arg=value) | name`.

>>> parse("topk(0.01) | int8")
(Call(name='topk', args=(0.01,), kwargs={}), Call(name='int8', args=(), kwargs={}))
>>> str(parse_one("syncline(powersgd(rank=4) | bf16)"))
'syncline(powersgd(rank=4) | bf16)'
>>> split("ddp,syncline(powersgd(rank=4, warm=true))")
['ddp', 'syncline(powersgd(rank=4, warm=true))']
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from syncline.errors import UsageError

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?(?![\w.]))"
    r"|(?P<name>[A-Za-z_/][\w./:-]*)"
    r"|(?P<string>\"[^\"]*\"|'[^']*')"
    r"|(?P<mark>[()|,=]))"
)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
_WORDS = {"true": True, "false": False, "none": None}
_MAX_DEPTH = 16
_MOST_DIGITS = 18
_LONGEST = 400  # characters of a spec in an error message
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """One `name(args)` of a spec. A bare word as a value is a string, a nested call or chain a tuple of calls."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def parse(text: str) -> tuple[Call, ...]:
    """The calls of a chain, left to right."""
    parser = _Parser(text)
    chain = parser.chain(depth=0)
    if parser.peek()[0] != "end":
        raise parser.error(f"unexpected '{parser.peek()[1]}'")
    return chain


def parse_one(text: str) -> Call:
    """The only call of a spec that must not be a chain (a strategy, a model, an optimizer)."""
    chain = parse(text)
    if len(chain) != 1:
        raise UsageError(f"'{text}' is a chain: one name is expected here, without '|'")
    return chain[0]


def show(chain: tuple[Call, ...]) -> str:
    """The canonical text of a chain; `parse(show(c)) == c`."""
    return " | ".join(map(str, chain))


def split(text: str) -> list[str]:
    """Split a comma list of specs; commas inside parentheses or quotes do not split."""
    parts, depth = [""], 0
    for piece in re.findall(r"\"[^\"]*\"?|'[^']*'?|.", text, re.DOTALL):
        depth += (piece == "(") - (piece == ")")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def apply(call: Call, function: Callable[..., Any], *lead: Any, **extra: Any) -> Any:
    """Call `function(*lead, *call.args, **call.kwargs, **extra)`; wrong arguments raise a `UsageError`."""
    _check(call, function, lead, extra)
    return function(*lead, *call.args, **call.kwargs, **extra)


def options(call: Call, function: Callable[..., Any], *, lead: int) -> dict[str, Any]:
    """The call's arguments by name: positional ones fill the parameters after the first `lead`, keyword-only or not.

    Arguments that do not fit the function raise a `UsageError`.
    """
    named = dict(zip(list(inspect.signature(function).parameters)[lead:], call.args, strict=False))
    if both := set(named) & set(call.kwargs):
        raise UsageError(f"'{call}': '{min(both)}' is given twice")
    given = {**named, **call.kwargs}
    _check(Call(call.name, call.args[len(named) :], given), function, (None,) * lead, {})
    return given


def _check(call: Call, function: Callable[..., Any], lead: tuple[Any, ...], extra: Mapping[str, Any]) -> None:
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*lead, *call.args, **call.kwargs, **extra)
    except TypeError as error:
        legal = [p for p in list(signature.parameters.values())[len(lead) :] if p.name not in extra]
        takes = ", ".join(str(p.replace(annotation=p.empty)) for p in legal) or "no arguments"
        raise UsageError(f"'{call}': {error}; {call.name} takes ({takes})") from None
    for name, value in list(bound.arguments.items())[len(lead) :]:
        parameter = signature.parameters[name]
        if name not in extra and not _fits(value, parameter):
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            takes = " or ".join(_KINDS[kind] for kind in kinds)
            raise UsageError(f"'{call}': {name} takes {takes}, not {_show(value)}")


def _fits(value: Any, parameter: inspect.Parameter) -> bool:
    """Whether a value has the annotated type; only annotations of plain values are checked."""
    kinds = get_args(parameter.annotation) or (parameter.annotation,)
    if not set(kinds) <= {int, float, bool, str, type(None)} or parameter.kind in _VARIADIC:
        return True
    given = type(value)
    return given in kinds or (given is int and float in kinds)


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return show(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_/][\w./:-]*", value):
        return f'"{value}"'
    return str(value)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error(f"unexpected '{text[position:].strip()[0]}'")
            kind = match.lastgroup
            assert kind is not None
            self.tokens.append((kind, match.group(kind)))
            position = match.end()
        self.at = 0

    def error(self, why: str) -> UsageError:
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}..."
        return UsageError(f"cannot read '{text}': {why}; write name(arg=value), chained with '|'")

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end")

    def shown(self) -> str:
        """The next token for a message."""
        kind, word = self.peek()
        return word if kind == "end" else f"'{word}'"

    def take(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.at += 1
            return True
        return False

    def chain(self, depth: int) -> tuple[Call, ...]:
        if depth > _MAX_DEPTH:
            raise self.error("nested too deeply")
        calls = [self.call(depth)]
        while self.take("|"):
            calls.append(self.call(depth))
        return tuple(calls)

    def call(self, depth: int) -> Call:
        kind, name = self.peek()
        if kind != "name":
            raise self.error(f"a name is expected, not {self.shown()}")
        self.at += 1
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if self.take("(") and not self.take(")"):
            self.argument(args, kwargs, depth)
            while not self.take(")"):
                if not self.take(","):
                    raise self.error(f"',' or ')' is expected, not {self.shown()}")
                self.argument(args, kwargs, depth)
        return Call(name, tuple(args), kwargs)

    def argument(self, args: list[Any], kwargs: dict[str, Any], depth: int) -> None:
        kind, word = self.peek()
        following = self.tokens[self.at + 1 : self.at + 2]
        if kind == "name" and following == [("mark", "=")]:
            self.at += 2
            if word in kwargs:
                raise self.error(f"'{word}' is given twice")
            kwargs[word] = self.value(depth)
        elif kwargs:
            raise self.error("a positional argument follows a named one")
        else:
            args.append(self.value(depth))

    def value(self, depth: int) -> Any:
        kind, word = self.peek()
        if kind in ("number", "string"):
            self.at += 1
            if kind == "string":
                return word[1:-1]
            digits = word.lstrip("+-")
            if digits.isdigit() and len(digits) > _MOST_DIGITS:
                raise self.error(f"a number of {len(digits)} digits is too large")
            return int(word) if digits.isdigit() else float(word)
        chain = self.chain(depth + 1)
        if len(chain) == 1 and not chain[0].args and not chain[0].kwargs and "(" not in word:
            return _WORDS.get(chain[0].name.lower(), chain[0].name)
        return chain

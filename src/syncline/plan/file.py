"""Read and write plan files: TOML that people can read, edit and diff. `load` returns the plan that `save` wrote."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from syncline.errors import UsageError, short, unknown
from syncline.files import parse_toml, read_text, reason, write_text
from syncline.plan import check
from syncline.plan.table import Plan
from syncline.plan.unit import Fact, Part, Unit
from syncline.trust import check_file

VERSION = 1
"""Version of the file format; only this version is read and written."""

_HEADER = """\
# A Syncline plan: what is done to each gradient. Edit it, and run with it; mistakes are named when it is read.
# executor: "overlap" hides launches behind the backward pass and the next forward pass. "reducer" is torch's C++
#   reducer: each unit is a bucket that is sent during the backward pass; codec "none", "bf16" or "fp16" for all units.
# order: what is sent first, the same on every rank. Move lines; each part of each unit must be there once.
#   A unit of one part goes by its name, the parts of a larger one are "name[0]", "name[1]" and so on.
# [[unit]]: rows in the order of the forward pass. Parameters of one unit are sent as one.
#   codec: "none", "bf16", "topk(0.01) | int8"...  exchange: "allreduce", "allgather", "sharded"...
#   partitions: parts it is cut into, so that urgent ones can pass; only for codecs of flat values.
#   What is left out is executor = "overlap", codec = "none", exchange = "allreduce", partitions = 1.
"""
_TRUST = "if you trust the file, use --trust, or in a program plan=syncline.plan.load(path, trust=True)"
_UNIT = {"name": str, "parameters": list, "codec": str, "exchange": str, "partitions": int}
_TOP = {"version": int, "executor": str, "order": list, "about": dict, "unit": list}
_WORDS = {str: "text in quotes", int: "a whole number", list: "a list", dict: "a table", bool: "true or false"}
_BITS = 63
_PART = re.compile(r"(.*)\[([0-9]{1,9})\]", re.DOTALL)
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan atomically. A plan that `load` would reject raises `UsageError`."""
    try:
        write_text(text_of(plan), path)
    except OSError as error:
        raise UsageError(f"cannot write the plan '{path}': {error.strerror}") from None


def text_of(plan: Plan) -> str:
    """The text of the plan file."""
    check.table(plan.units, plan.order)
    names = {unit.name: unit for unit in plan.units}
    check.executor(plan.executor, plan.units)
    lines = [_HEADER, f"version = {VERSION}"]
    lines += [f"executor = {_text(plan.executor)}"] * (plan.executor != "overlap") + ["", "order = ["]
    lines += [f"  {_text(_spell(names[name], part, names))}," for name, part in plan.order]
    lines += ["]", ""]
    if plan.about:
        lines += ["[about]", *(f"{_key(k)} = {_fact(k, plan.about[k])}" for k in sorted(plan.about)), ""]
    for unit in plan.units:
        lines += ["[[unit]]", f"name = {_text(unit.name)}"]
        lines += [f"parameters = [{', '.join(map(_text, unit.parameters))}]"]
        lines += [f"codec = {_text(unit.codec)}", f"exchange = {_text(unit.exchange)}"]
        lines += [f"partitions = {unit.partitions}"] * (unit.partitions != 1) + [""]
    return "\n".join(lines)


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Plan:
    """Read a plan; a `UsageError` names the file and its first mistake.

    `trust=True` accepts codecs and exchanges that are not Syncline's (`package.module:name`): their code is run.
    """
    try:
        text = read_text(path, encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"there is no plan '{path}': give the path of a file that syncline.plan.save wrote") from None
    except OSError as error:
        raise UsageError(f"cannot read the plan '{path}': {reason(error)}") from None
    except UnicodeDecodeError:
        raise UsageError(f"plan '{path}' is not text in UTF-8: save it as UTF-8") from None
    plan = parse(text, of=f"plan '{path}'")
    for unit in () if trust else plan.units:
        for spec in (unit.codec, unit.exchange):
            check_file(spec, source=f"plan '{path}', unit '{unit.name}',", fix=_TRUST)
    return plan


def parse(text: str, *, of: str = "the plan") -> Plan:
    """Parse the text of a plan file; `of` names the plan in errors."""
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{of} is not valid TOML: {reason(error)}") from None
    try:
        plan = _plan(content)
        check.table(plan.units, plan.order)
        check.executor(plan.executor, plan.units)
    except UsageError as error:
        raise UsageError(f"{of}: {error}") from None
    return plan


def _plan(content: Mapping[str, Any]) -> Plan:
    version = content.get("version")
    if type(version) is not int:
        raise UsageError(f"it does not say its version: write version = {VERSION} at the top")
    if version != VERSION:
        raise UsageError(f"it has version {version} and this Syncline reads version {VERSION}: make the plan again")
    if isinstance(content.get("unit"), dict):
        raise UsageError("a unit is not in a list: write [[unit]] above each, with two brackets")
    _typed(content, _TOP, "the file", needed=("order",))
    units = tuple(_unit(row, number) for number, row in enumerate(content.get("unit", []), start=1))
    about = content.get("about", {})
    for key, value in about.items():
        if not isinstance(value, Fact):
            raise UsageError(f"[about] {key} is a {type(value).__name__}: use text, a number, true or false")
    names = {unit.name: unit for unit in units}
    order = tuple(_part(text, names) for text in _texts(content["order"], "order"))
    return Plan(units, order, about, content.get("executor", "overlap"))


def _unit(row: Any, number: int) -> Unit:
    if not isinstance(row, dict):
        raise UsageError(f"unit {number} is not a table: write [[unit]] and its keys in the lines below")
    name = row.get("name")
    where = f"unit '{name}'" if isinstance(name, str) else f"unit {number}"
    _typed(row, _UNIT, where, needed=("name", "parameters"))
    return Unit(**{**row, "parameters": tuple(_texts(row["parameters"], f"{where}: parameters"))})


def _typed(table: Mapping[str, Any], kinds: Mapping[str, type], where: str, *, needed: Sequence[str]) -> None:
    for key, value in table.items():
        if key not in kinds:
            raise UsageError(f"{where}: {unknown('key', key, kinds)}")
        if type(value) is not kinds[key]:
            raise UsageError(f"{where}: {key} takes {_WORDS[kinds[key]]}, not {short(value)}")
    for key in needed:
        if key not in table:
            raise UsageError(f"{where}: '{key}' is missing: add it")


def _texts(items: Sequence[Any], where: str) -> Sequence[str]:
    for item in items:
        if not isinstance(item, str):
            raise UsageError(f"{where} takes a list of names in quotes, not {short(item)}")
    return items


def _part(text: str, units: Mapping[str, Unit]) -> Part:
    """Parse a line of the order. `name[3]` is part 3 of `name` if that unit exists, else a unit called `name[3]`."""
    if (match := _PART.fullmatch(text)) and (match[1] in units or text not in units):
        return match[1], int(match[2])
    if text in units and units[text].partitions > 1:
        raise UsageError(
            f"the order launches '{text}', which has several parts: write '{text}[0]', '{text}[1]' and so on"
        )
    return text, 0


def _spell(unit: Unit, part: int, units: Collection[str]) -> str:
    """The line that `_part` reads as this part; it has an index if the bare name looks like a part of another unit."""
    match = _PART.fullmatch(unit.name)
    return f"{unit.name}[{part}]" if match and match[1] in units else unit.label(part)


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _text(text)


def _fact(key: str, value: Fact) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        if value.bit_length() > _BITS:
            raise UsageError(f"the plan's about['{key}'] is {short(value)}: a plan file holds whole numbers of 64 bits")
        return repr(int(value))
    raise UsageError(f"the plan's about['{key}'] is a {type(value).__name__}: use text, a number, True or False")


def _text(text: str) -> str:
    """A TOML string; characters that do not print are escaped, so that an editor shows all of them."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise UsageError(f"{text!r} is not valid Unicode, which a plan's file needs: rename it")
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'

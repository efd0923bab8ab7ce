"""The JSON of `trace analyze` is what docs/analysis.schema.json says, field by field."""

import json
from pathlib import Path

import pytest
from analysis_spans import steps
from trace_files import GLOO, HOROVOD, NCCL

from syncline.trace import PHASES, Trace, analyze, load

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "analysis.schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}
TYPES |= {"boolean": bool}
KEYWORDS = {
    "$schema", "$defs", "$ref", "title", "description", "type", "properties", "required", "additionalProperties",
    "propertyNames", "items", "anyOf", "enum", "const",
}  # fmt: skip


def problems(value, schema, at="$"):
    """What JSON Schema (the keywords above) finds wrong with a value."""
    assert schema.keys() <= KEYWORDS, at
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], at)
    if "anyOf" in schema:
        found = [problems(value, one, at) for one in schema["anyOf"]]
        return [] if [] in found else found[0]
    if "const" in schema or "enum" in schema:
        return [] if value in schema.get("enum", [schema.get("const")]) else [f"{at}: {value!r}"]
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    types = tuple(TYPES[name] for name in allowed)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return [f"{at} is a {type(value).__name__}, not {allowed}"]
    if isinstance(value, list):
        return [text for n, item in enumerate(value) for text in problems(item, schema["items"], f"{at}[{n}]")]
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        found = [f"{at} lacks {key}" for key in schema.get("required", ()) if key not in value]
        names = schema.get("propertyNames", {}).get("enum")
        for key, item in value.items():
            if (key not in known and more is False) or (names is not None and key not in names):
                found.append(f"{at} has {key}, which the schema does not know")
            else:
                found += problems(item, known.get(key) or more, f"{at}.{key}")
        return found
    return []


def properties(schema):
    """Every property of a schema, with its name."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        for inner in schema.values():
            yield from properties(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from properties(inner)


PIECES = [("data", 2), ("forward", 5), ("backward", 6), ("exchange", 4, "bucket 0", 25_000_000), ("update", 1)]
LATE = [("data", 12), *PIECES[1:]]
SOURCES = {
    "made by hand": lambda: Trace.of(steps(12, PIECES, LATE)),
    "one rank": lambda: Trace.of(steps(3, PIECES[:3])),
    "torch.profiler, Gloo": lambda: load(GLOO),
    "torch.profiler, NCCL": lambda: load(NCCL),
    "Horovod": lambda: load(HOROVOD),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_output_is_what_the_schema_says(source):
    printed = json.loads(json.dumps(analyze(SOURCES[source]()).as_json("here"), allow_nan=False))
    assert problems(printed, SCHEMA) == []


def test_the_schema_describes_every_field_and_knows_all_phases():
    assert [name for name, schema in properties(SCHEMA) if not schema.get("description")] == []
    assert SCHEMA["$defs"]["phases_ms"]["propertyNames"]["enum"] == list(PHASES)


def test_a_wrong_output_is_found():
    printed = analyze(SOURCES["made by hand"]()).as_json("here")
    del printed["bound"]["distance"]
    wrong = printed | {"world_size": "2", "more": 1, "overlap": {"communication": None, "compression": "x"}}
    assert sorted(problems(wrong, SCHEMA)) == [
        "$ has more, which the schema does not know",
        "$.bound lacks distance",
        "$.overlap.compression is a str, not ['number', 'null']",
        "$.world_size is a str, not ['integer']",
    ]

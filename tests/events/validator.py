"""As much of JSON Schema as our schemas use. A word it does not know is an error, not a pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
_KNOWN = {
    "$schema", "title", "description", "type", "required", "additionalProperties", "properties", "enum", "const", "pattern",
    "format", "minimum", "minLength", "maxLength",
}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], at: str = "$") -> Iterator[str]:
    assert schema.keys() <= _KNOWN, schema.keys() - _KNOWN
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{at}: {value!r} is not {kinds}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r} is not {schema['const']!r}"
    if isinstance(value, str):
        yield from _text_problems(value, schema, at)
    if "minimum" in schema and _is(value, "number") and value < schema["minimum"]:
        yield f"{at}: {value} is too small"
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        yield from (f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value)
        if schema.get("additionalProperties") is False:
            yield from (f"{at}: {name} is not known" for name in value if name not in inner)
        for name in value.keys() & inner.keys():
            yield from problems(value[name], inner[name], f"{at}.{name}")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _text_problems(value: str, schema: dict[str, Any], at: str) -> Iterator[str]:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        yield f"{at}: {len(value)} characters"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if schema.get("format") == "date-time":
        try:
            assert datetime.fromisoformat(value).tzinfo is not None
        except (ValueError, AssertionError):
            yield f"{at}: {value!r} is no time"

"""Compares a value with a JSON schema, as far as `headway.views.schemas` uses them."""

from __future__ import annotations

import re
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def problems(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """What is wrong with the value; nothing if it has the shape."""
    if "anyOf" in schema:
        return [] if any(not problems(value, part) for part in schema["anyOf"]) else [f"{where}: fits none: {value!r}"]
    if "const" in schema and value != schema["const"]:
        return [f"{where}: {value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        return [f"{where}: {value!r} does not look like {schema['pattern']}"]
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _KINDS[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return [f"{where}: {value!r} is no {kind}"]
    if kind == "array" and "items" in schema:
        return [
            problem for at, part in enumerate(value) for problem in problems(part, schema["items"], f"{where}[{at}]")
        ]
    return _problems_of_keys(value, schema, where) if kind == "object" else []


def _problems_of_keys(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    found = [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, part in value.items():
        if name in properties:
            found += problems(part, properties[name], f"{where}.{name}")
        elif others is False:
            found.append(f"{where}: {name} is not in the schema")
        elif isinstance(others, dict):
            found += problems(part, others, f"{where}.{name}")
    return found

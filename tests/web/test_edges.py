"""Every parameter and field of the OpenAPI document at and beyond its edges: no answer is a server error. The values are made
from the document, so that a new route is tried without being named here; `test_schemathesis.py` looks for longer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlencode

from tests.web.conftest import Web
from tests.web.test_routes import EXISTING

TEXTS = ("", "\0", "'%\u202e😀", "x" * 5000)
NUMBERS = (2**63, 10**30, 1.5)
ODD: tuple[Any, ...] = (None, [], "\ud800")


def edges(schema: dict[str, Any]) -> list[Any]:
    """What a schema allows and forbids: each bound, one beyond it, and what is of another kind."""
    found: list[Any] = []
    for part in schema.get("anyOf", [schema]):
        found += part.get("enum", [])[:1]
        if part.get("type") in ("integer", "number"):
            bounds = [part[name] for name in ("minimum", "maximum") if name in part]
            found += [*NUMBERS, *bounds, *(bound + step for bound in bounds for step in (-1, 1))]
        if part.get("type") == "string":
            found += TEXTS
        if part.get("type") == "array":
            found += [["\0"], [1], ["x"] * 1001]
        if part.get("type") == "boolean":
            found += [True, "maybe"]
    return found


def requests(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(method, path with its query, body): one thing at its edge, the others as they exist."""
    for path, methods in document["paths"].items():
        known = next((values for begin, values in EXISTING.items() if path.startswith(begin)), {})
        for method, operation in methods.items():
            parameters = operation.get("parameters", [])
            for parameter in parameters:
                for value in edges(parameter["schema"]):
                    if parameter["in"] == "path":
                        yield method, path_of(path, {**known, parameter["name"]: value}), {}
                    else:
                        yield method, f"{path_of(path, known)}?{urlencode({parameter['name']: value})}", {}
            for body in bodies(document, operation):
                yield method, path_of(path, known), body


def bodies(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[Any]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        return
    schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield from ODD
    yield {"unknown": 1}
    for name, field in schema.get("properties", {}).items():
        if name != "reason" or operation["operationId"].startswith("pause"):  # the same field everywhere
            for value in (*edges(field), *ODD):
                yield {name: value}


def path_of(path: str, values: dict[str, Any]) -> str:
    for name, value in values.items():
        path = path.replace("{" + name + "}", quote(str(value), safe=""))
    return path


def test_no_parameter_at_its_edge_is_a_server_error(opened: Web):
    document = opened.ask("/api/v1/openapi.json").json
    asked = 0
    with closing(http.client.HTTPConnection(opened.host, timeout=60)) as connection:
        for method, path, body in requests(document):
            content = None if method == "get" else json.dumps(body).encode()
            connection.request(method.upper(), path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status < 500, (method, path[:200], str(body)[:200], text)
            schema = json.loads(text)["schema"]
            assert (schema == "headway.error/1") == (response.status != 200), (
                method,
                path[:200],
                response.status,
                text,
            )
            asked += 1
    assert asked > 200

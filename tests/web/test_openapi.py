"""The OpenAPI document: what a generated client relies on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.views.schema_check import problems
from tests.web.conftest import Web


@pytest.fixture
def document(closed: Web) -> dict[str, Any]:
    return closed.ask("/api/v1/openapi.json", token="viewer").json


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in document["paths"].values():
        yield from path.items()


def inlined(schema: Any) -> Iterator[dict[str, Any]]:
    """Objects with properties, at any depth."""
    if isinstance(schema, list):
        for part in schema:
            yield from inlined(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield schema
        for part in schema.values():
            yield from inlined(part)


def resolved(schema: Any, document: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they refer to; one to nothing is a KeyError."""
    if isinstance(schema, list):
        return [resolved(part, document) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return resolved(document["components"]["schemas"][name], document)
    return {key: resolved(part, document) for key, part in schema.items()}


def test_every_status_that_is_sent_is_declared_and_422_is_not(closed: Web, document: dict[str, Any]):
    for method, operation in operations(document):
        expected = {"400", "401", "403", "404", "429", "503"} | (
            {"408", "409", "413", "415"} if method == "post" else {"304"}
        )
        assert set(operation["responses"]) == expected | {"200"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert closed.ask("/api/v1/jobs?limit=0", token="viewer").status == 400
    assert closed.post("/api/v1/dead/retry", {"reason": 1}, token="operator").status == 400
    assert closed.post("/api/v1/dead/retry", b"reason=x", token="operator", Content_Type="text/plain").status == 415


def test_every_object_is_a_component_of_its_own_name(document: dict[str, Any]):
    for _, operation in operations(document):
        assert not list(inlined(operation["responses"]))
        for answer in operation["responses"].values():
            resolved(answer, document)
    for name, schema in document["components"]["schemas"].items():
        assert schema["title"] == name
        assert list(inlined(schema)) == [schema]


@pytest.mark.parametrize("path", ["/alerts", "/performance", "/jobs", "/jobs/{id}", "/tasks", "/projects", "/health"])
def test_an_answer_is_what_its_component_says(closed: Web, document: dict[str, Any], path: str):
    answer = closed.ask(f"/api/v1{path.replace('{id}', 'ads')}", token="viewer").json
    content = document["paths"][f"/api/v1{path}"]["get"]["responses"]["200"]["content"]
    assert list(problems(answer, resolved(content["application/json"]["schema"], document))) == []


def test_it_says_where_the_server_is_and_how_to_authenticate(document: dict[str, Any]):
    assert document["servers"][0] == {"url": "/"}
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert document["security"] == [{"token": []}]

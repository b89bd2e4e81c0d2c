"""The OpenAPI document: routes with named schemas, error statuses and authentication.

FastAPI generates the paths, parameters and bodies. It adds status 422, which this application never sends: invalid input is
400. The routes inline their response schemas. This module moves each view to a named component, so that a generated client
has one class for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from headway.views.shape import SCHEMAS, Json
from headway.web.api import problems

if TYPE_CHECKING:
    from fastapi import FastAPI

#: Descriptions of the error statuses by method. The gate in front of the routes sends most of them.
ERRORS: Final[dict[str, dict[int, str]]] = {
    "get": {
        400: "a parameter is invalid",
        401: "no token, session or ticket, or one that is not valid",
        403: "the role has no right to this",
        404: "it does not exist, or belongs to another user",
        429: "too many wrong tokens from this address; see Retry-After",
        503: "a store does not answer, or too many requests wait; see Retry-After",
    },
    "post": {
        400: "a parameter or the body is invalid",
        401: "no token, session or ticket, or one that is not valid",
        403: "the role has no right to this",
        404: "it does not exist, or belongs to another user",
        408: "the body did not arrive in time",
        409: "refused: it would harm recorded work",
        413: "the body is too large",
        415: "the body is not application/json",
        429: "too many wrong tokens from this address; see Retry-After",
        503: "a store does not answer, or too many requests wait; see Retry-After",
    },
}
SECURITY: Final[Json] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "a token (headway token create), or a ticket of an application (headway.web.ticket)",
    },
}
_ERROR: Final[Json] = {
    "title": "Error",
    "type": "object",
    "properties": {
        "schema": {"const": problems.SCHEMA},
        "error": {
            "title": "ErrorDetail",
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "hint": {"type": "string"},
                "exit_code": {"type": "integer"},
            },
            "required": ["type", "message", "hint", "exit_code"],
        },
    },
    "required": ["schema", "error"],
}
_NAMES: Final = {schema: name for name, schema in SCHEMAS.items()}


def install(app: FastAPI) -> None:
    """Make ``app`` serve this document instead of FastAPI's."""
    written = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(written())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation says


def complete(document: Json) -> Json:
    """Return FastAPI's document with named schemas, error statuses and authentication."""
    schemas: Json = {
        name: schema
        for name, schema in document["components"]["schemas"].items()
        if name not in ("HTTPValidationError", "ValidationError")
    }
    bodies = frozenset(schemas)
    error = _named(_ERROR, schemas, bodies)
    for path in document["paths"].values():
        for method, operation in path.items():
            success = operation["responses"]["200"]
            answer = success["content"]["application/json"]
            answer["schema"] = _named(answer["schema"], schemas, bodies)
            operation["responses"] = {"200": success} | {
                str(status): {"description": text, "content": {"application/json": {"schema": error}}}
                for status, text in ERRORS[method].items()
            }
            if method == "get":
                operation["responses"]["304"] = {"description": "unchanged since the ETag of If-None-Match"}
    components = {"schemas": dict(sorted(schemas.items())), "securitySchemes": SECURITY}
    return {**document, "components": components, "security": [{name: []} for name in SECURITY]}


def _named(schema: Any, schemas: Json, taken: frozenset[str]) -> Any:
    """Move every object of ``schema`` to ``schemas`` under its title, and return the schema with references."""
    if isinstance(schema, list):
        return [_named(part, schemas, taken) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _named(part, schemas, taken) for key, part in schema.items()}
    if found.get("type") != "object" or "properties" not in found:
        return found
    about = {"description": found.pop("description")} if "description" in found else {}  # describes this use of it
    title = found["title"]  # a nested document has no field `schema`
    name = found["title"] = _NAMES.get(title) or (f"{title}Entry" if title in SCHEMAS else title)
    if name in taken or schemas.setdefault(name, found) != found:
        raise TypeError(f"two schemas are called {name}")
    return {"$ref": f"#/components/schemas/{name}", **about}

"""The JSON schemas of all documents, and their reference page.

To write the page: ``python -m headway.views.schemas > docs/reference/json.md``.

The schemas come from the annotations of the views, so they cannot differ from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from headway.views import failed, history, projects, queue, search, states
from headway.views.jobs import dead, items, job
from headway.views.jobs import listing as jobs
from headway.views.jobs import map as item_map
from headway.views.shape import ABSENT, SCHEMAS, Absent, Json
from headway.views.system import access, alerts, health, performance, records, relay

MODULES = (
    jobs, job, items, item_map, dead, failed, search, history, projects, states, queue, performance, relay, alerts, health,
    records, access,
)  # fmt: skip

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}

_HEAD = """\
# JSON

<!-- Written by `python -m headway.views.schemas`; change the views, not this page. -->

Every command that reads has `--json`. It writes one document whose `schema` names its shape; `--follow` writes one per
line. Within a version keys are added, never changed or removed. Times are ISO 8601 in UTC, to the millisecond, with
a `Z`. `idx` is an item's index, `no` the number of a run, an attempt or a cause. A key marked *sometimes* is left out unless
requested.

`headway run --json` writes `headway.run/1` and with `--dry-run` `headway.dry-run/1`; see [cli.md](cli.md).
"""


def documents() -> dict[str, type]:
    """Return schema -> class of the document."""
    return {schema: _view(name) for name, schema in SCHEMAS.items()}


def json_schema(view: type, schema: str | None = None) -> Json:
    """Return a view's JSON schema (2020-12), with the views inside it."""
    hints = get_type_hints(view, include_extras=True)
    properties: Json = {} if schema is None else {"schema": {"const": schema}}
    for name in fields(view):
        type_, text = get_args(hints[name])[:2]
        properties[name] = {**_of(type_), "description": text}
    optional = {name for name, value in defaults(view).items() if value is ABSENT}
    return {
        "title": schema or view.__name__,
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def fields(view: type) -> tuple[str, ...]:
    """Return the field names of a view."""
    names: tuple[str, ...] = view._fields  # type: ignore[attr-defined]  # every view is a named tuple
    return names


def defaults(view: type) -> dict[str, object]:
    """Return the field defaults of a view."""
    found: dict[str, object] = view._field_defaults  # type: ignore[attr-defined]  # every view is a named tuple
    return found


def _view(name: str) -> type:
    for module in MODULES:
        if name in vars(module):
            found = vars(module)[name]
            assert isinstance(found, type)
            return found
    raise LookupError(name)


def _of(type_: Any) -> Json:
    origin, arguments = get_origin(type_), get_args(type_)
    if type_ in _TYPES:
        return {"type": _TYPES[type_]}
    if type_ is datetime:
        return {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$"}
    if type_ is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0])}
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    if origin in (Union, UnionType):
        parts = [_of(part) for part in arguments if part is not Absent]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    if origin is Annotated:
        return _of(arguments[0])
    if isinstance(type_, type) and hasattr(type_, "_fields"):
        return json_schema(type_)
    raise TypeError(f"{type_!r} has no JSON type")


# ---------------------------------------------------------------------------------------------------------------------
# The page


def page() -> str:
    """Return the reference page as Markdown."""
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _HEAD
    yield "## Documents\n"
    for schema, view in documents().items():
        yield f"### `{schema}`\n\n{_first_line(view)}\n\n{_table(view)}"
    yield "## Inner objects\n"
    for view in inner_views():
        yield f"### {view.__name__}\n\n{_first_line(view)}\n\n{_table(view)}"


def inner_views() -> list[type]:
    """Return the views inside the documents, each once, in order of first use."""
    found: dict[str, type] = {}

    def visit(type_: Any) -> None:
        if isinstance(type_, type) and hasattr(type_, "_fields"):
            key = f"{type_.__module__}.{type_.__name__}"
            if key not in found:
                if type_.__name__ not in SCHEMAS:
                    found[key] = type_
                for hint in get_type_hints(type_, include_extras=True).values():
                    visit(hint)
        for part in get_args(type_):
            visit(part)

    for view in documents().values():
        visit(view)
    return list(found.values())


def _first_line(view: type) -> str:
    return " ".join((view.__doc__ or "").split())


def _table(view: type) -> str:
    hints = get_type_hints(view, include_extras=True)
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for name in fields(view):
        type_, text = get_args(hints[name])[:2]
        sometimes = " *sometimes*" if defaults(view).get(name) is ABSENT else ""
        lines.append(f"| `{name}` | {_in_words(type_)}{sometimes} | {text} |")
    return "\n".join(lines) + "\n"


def _in_words(type_: Any) -> str:
    origin, arguments = get_origin(type_), get_args(type_)
    if type_ in _TYPES:
        return _TYPES[type_]
    if type_ is datetime:
        return "time"
    if type_ is Any:
        return "any"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if origin is tuple:
        return f"list of {_in_words(arguments[0])}"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {_in_words(arguments[1])}"
    if origin in (Union, UnionType):
        return " or ".join(_in_words(part) for part in arguments if part is not Absent)
    heading = SCHEMAS.get(type_.__name__, type_.__name__)
    return f"[{type_.__name__}](#{re.sub(r'[^a-z0-9-]', '', heading.lower())})"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 - the page goes to stdout

"""Parse the JSON of a document into its view, by the view's annotations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headway.errors import StorageError
from headway.views.shape import Absent

T = TypeVar("T")


def parse(view: type[T], document: Any) -> T:
    """Return ``document`` as a view. Unknown keys are ignored; a missing key raises `StorageError`."""
    try:
        found: T = _view(view, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"The server's answer does not have the expected shape ({view.__name__}: {error}).",
            hint="Use the same version of Headway on both sides.",
        ) from error
    return found


def _view(view: Any, value: Mapping[str, Any]) -> Any:
    """Build a view from the keys that are present. A missing field without a default raises `TypeError`."""
    hints = _hints(view)
    return view(**{name: _value(hints[name], value[name]) for name in view._fields if name in value})


@lru_cache(maxsize=256)
def _hints(view: Any) -> dict[str, Any]:
    return get_type_hints(view)


def _value(type_: Any, value: Any) -> Any:
    origin, arguments = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return _value(arguments[0], value)
    if type_ is Any or origin is Literal or value is None:
        return value
    if origin in (Union, UnionType):
        [*parts] = (part for part in arguments if part not in (NoneType, Absent))
        return _value(parts[0], value) if len(parts) == 1 else value
    if type_ is datetime:
        return datetime.fromisoformat(value)
    if origin is tuple:
        return tuple(_value(arguments[0], part) for part in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        key = int if arguments[0] is int else str  # JSON object keys are strings
        return {key(name): _value(arguments[1], part) for name, part in value.items()}
    return _view(type_, value) if hasattr(type_, "_fields") else value

"""From a document's JSON back to its view, by the annotations the view is made of."""

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
    """``document`` as a view. Keys that this version does not know are left out; one that it needs and misses is an error."""
    try:
        found: T = _view(view, document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"The server's answer is not of the shape that is expected here ({view.__name__}: {error}).",
            hint="Use the same version of headway here and there.",
        ) from error
    return found


def _view(view: Any, value: Mapping[str, Any]) -> Any:
    """The fields that are there; one that may be left out has a default, and one that is missing is an error of the view."""
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
        key = int if arguments[0] is int else str  # JSON has names of texts only
        return {key(name): _value(arguments[1], part) for name, part in value.items()}
    return _view(type_, value) if hasattr(type_, "_fields") else value

"""Validation of the arguments of `headway.map`, `headway.open_job` and `headway.track` that are not settings.

Settings (workers, retries, rate, ...) are validated by `headway.config.Config`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from headway.errors import InvalidInput


def check_flags(**flags: object) -> None:
    """Refuse a flag that is not a bool: the text "no" would count as true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} must be True or False (got {value!r:.60}).")


def check_callables(**functions: object) -> None:
    """Refuse a callback that cannot be called."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InvalidInput(f"{name} must be a function or None (got {value!r:.60}).")


def check_key(key: object) -> None:
    """Refuse a key that is not the name of a field."""
    if key is not None and not (isinstance(key, str) and key.strip()):
        raise InvalidInput(f"key must be the name of a field (got {key!r:.60}).")


def check_choice(name: str, value: object, words: tuple[str, ...]) -> None:
    """Refuse a value that is not one of ``words``."""
    if value not in words:
        raise InvalidInput(f"{name} must be {', '.join(words[:-1])} or {words[-1]} (got {value!r:.60}).")


def check_path(name: str, value: object) -> None:
    """Refuse a value that is not a path."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value)):
        raise InvalidInput(f"{name} must be the path of a file (got {value!r:.60}).")


def refuse_mapping(items: object) -> None:
    """Refuse a dict: iterating over it would lose the values."""
    if isinstance(items, Mapping):
        raise InvalidInput(
            f"items is a {type(items).__name__}: it could mean its keys, its values or both.",
            hint="Give list(items), list(items.values()), or both as items with a key: "
            '[{"key": k, "value": v} for k, v in items.items()] and key="key"',
        )

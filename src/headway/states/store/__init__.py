"""The stores of states. ``contract.py`` says what a store does; `open_backend` chooses one by its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headway.errors import InvalidInput
from headway.telemetry import redact

if TYPE_CHECKING:
    from headway.states.store.contract import Backend


def open_backend(url: str, *, create: bool = True) -> Backend:
    """Return the backend for a URL. Its module is imported on first use."""
    match urlsplit(url).scheme:
        case "sqlite":
            from headway.states.store.sqlite import SqliteStates

            return SqliteStates(url, create=create)
        case "postgresql" | "postgres":
            from headway.states.store.postgres import PostgresStates

            return PostgresStates(url, create=create)
        case "redis" | "rediss" | "unix":
            from headway.states.store.redis import RedisStates

            return RedisStates(url)
        case "firestore":
            from headway.states.store.firestore import FirestoreStates

            return FirestoreStates(url)
    raise InvalidInput(
        f"{redact(url)!r} is not the address of a store.",
        hint="Use sqlite:///file.db, postgresql://user@host/name, redis://host:6379/1 or firestore://PROJECT",
    )

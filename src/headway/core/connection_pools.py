"""Discard the application's connection pools in a forked child.

An application may open its database before the fork, at import or in an earlier task. The child inherits the socket.
If the child used it, parent and child would read each other's replies. Closing it would end the parent's session on the
server. So the child drops inherited connections without closing them, and its pool opens new ones on demand.

SQLAlchemy engines and Django connections are found without importing either library.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

#: Inherited connections. Keeping them referenced prevents their destructors, some of which write to the socket.
_inherited: list[object] = []


def discard_inherited() -> None:
    """Drop the database connections that this process inherited from its parent.

    Call it once in the child, before the application's code runs.
    """
    _discard_sqlalchemy()
    _discard_django()


def _discard_sqlalchemy() -> None:
    base: Any = sys.modules.get("sqlalchemy.engine.base")
    if base is None:
        return
    orm: Any = sys.modules.get("sqlalchemy.orm.session")
    found = list(_instances(base.Engine, base.Connection, *([] if orm is None else [orm.Session])))
    for connection in found:
        if isinstance(connection, base.Connection) and not connection.closed and not connection.invalidated:
            if _is_in_memory(connection.engine):
                continue
            proxy = connection.connection
            _inherited.append(proxy.dbapi_connection)
            proxy.detach()  # so that `invalidate` has no connection to close
            connection.invalidate()
    for each in found:
        if isinstance(each, base.Engine) and not _is_in_memory(each):
            _inherited.append(each.pool)
            each.dispose(close=False)
    for session in found:
        # The connection is already invalid, so this sends nothing. Without a rollback the next statement would fail.
        if orm is not None and isinstance(session, orm.Session) and session.in_transaction():
            with suppress(Exception):
                session.rollback()


def _is_in_memory(engine: Any) -> bool:
    """Return whether the engine is an in-memory SQLite database. The child has its own copy of one."""
    return engine.dialect.name == "sqlite" and (
        engine.url.database in (None, "", ":memory:") or "mode=memory" in engine.url.database
    )


def _instances(*classes: type) -> Iterator[Any]:
    """Yield all live instances of the classes and their subclasses.

    SQLAlchemy has no registry of engines, so the garbage collector is searched for them.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # the collector does not search frozen objects
    for found in gc.get_referrers(*_with_subclasses(classes)):
        if issubclass(type(found), classes):  # not isinstance, which may raise for proxy objects
            yield found
    if frozen:
        gc.freeze()


def _with_subclasses(classes: tuple[type, ...]) -> list[type]:
    found = list(classes)
    for known in found:  # the list grows during iteration
        found.extend(type.__subclasses__(known))
    return found


def _discard_django() -> None:
    django: Any = sys.modules.get("django.db")
    connections = getattr(django, "connections", None)
    if connections is None:
        return
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            continue
        _inherited.append(connection)
        del connections[connection.alias]
        pools = getattr(connection, "_connection_pools", None)  # PostgreSQL, with OPTIONS["pool"]
        if pools:
            _inherited.extend(pools.values())
            pools.clear()

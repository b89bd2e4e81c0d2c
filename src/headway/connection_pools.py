"""Connection pools of the application, discarded in a forked child.

An application may open its database before it is forked: at import, or in an earlier task. The child inherits the socket.
If it used the socket, parent and children would read each other's replies. So the child forgets inherited connections
without closing them: closing would end the parent's session on the server. Its next use of the pool connects anew.

SQLAlchemy engines and Django connections are found without importing either library.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

#: Inherited connections. The references keep their destructors, some of which write to the socket, from running.
_inherited: list[object] = []


def discard_inherited() -> None:
    """Forget the database connections that this process inherited from its parent.

    To be called once, in the child, before code of the application runs.
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
            proxy.detach()  # after it `invalidate` has nothing to close
            connection.invalidate()
    for engine in found:
        if isinstance(engine, base.Engine) and not _is_in_memory(engine):
            _inherited.append(engine.pool)
            engine.dispose(close=False)
    for session in found:
        # Its connection is invalid by now, so this sends nothing. Without it the session would refuse its next statement.
        if orm is not None and isinstance(session, orm.Session) and session.in_transaction():
            with suppress(Exception):
                session.rollback()


def _is_in_memory(engine: Any) -> bool:
    """Return whether the engine is a SQLite database in memory. The child owns a copy of it and shares nothing."""
    return engine.dialect.name == "sqlite" and (
        engine.url.database in (None, "", ":memory:") or "mode=memory" in engine.url.database
    )


def _instances(*classes: type) -> Iterator[Any]:
    """Find all live instances of classes and their subclasses.

    SQLAlchemy has no registry of engines. The collector finds them wherever the application keeps them.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # the collector does not search frozen objects
    for found in gc.get_referrers(*_with_subclasses(classes)):
        if issubclass(type(found), classes):  # not isinstance: a proxy of the application may raise there
            yield found
    if frozen:
        gc.freeze()


def _with_subclasses(classes: tuple[type, ...]) -> list[type]:
    found = list(classes)
    for known in found:  # it grows while it is read
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

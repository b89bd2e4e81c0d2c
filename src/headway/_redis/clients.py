"""Clients with explicit time limits and without hidden retries.

A command whose reply was lost may have been applied. Only the caller knows its identity and may repeat it, so the retries of
redis-py are off (``Retry(NoBackoff(), 0)``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway._redis.address import Role, database_of, read_address
from headway._redis.connections import make_pool
from headway._redis.errors import import_redis
from headway.errors import InvalidInput

if TYPE_CHECKING:
    from redis import Redis
    from redis.asyncio import Redis as AsyncRedis

#: Seconds. Four tries, with waits of 1, 2 and 4 s between them, end within 15 s.
TIMEOUT = 1.8


def connect(
    url: str,
    *,
    role: Role,
    name: str = "",
    timeout: float = TIMEOUT,
    connect_timeout: float = TIMEOUT,
    max_connections: int = 256,
    decode: bool = True,
) -> Redis:
    """Return a client with its own connection pool. It connects on first use.

    ``timeout`` limits the wait for one reply in seconds. A client that blocks in the server (BLPOP) needs a longer one.
    """
    import_redis()
    from redis import Redis as Client
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    options = _options(url, role, name, (connect_timeout, timeout), max_connections)
    pool = make_pool(read_address(url).scheme, retry=Retry(NoBackoff(), 0), decode_responses=decode, **options)
    client = Client(connection_pool=pool)
    client.auto_close_connection_pool = True  # no other client uses the pool
    return client


def connect_async(
    url: str,
    *,
    role: Role,
    name: str = "",
    timeout: float = TIMEOUT,
    connect_timeout: float = TIMEOUT,
    max_connections: int = 256,
    decode: bool = True,
) -> AsyncRedis:
    """Return an asyncio client (see `connect`)."""
    import_redis()
    from redis.asyncio import ConnectionPool
    from redis.asyncio import Redis as Client
    from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options = _options(url, role, name, (connect_timeout, timeout), max_connections)
    kinds = {"redis": Connection, "rediss": SSLConnection, "unix": UnixDomainSocketConnection}
    pool: Any = ConnectionPool(
        connection_class=kinds[read_address(url).scheme],
        retry=Retry(NoBackoff(), 0),
        decode_responses=decode,
        **options,
    )
    client = Client(connection_pool=pool)
    client.auto_close_connection_pool = True
    return client


def client_address(client: Any) -> str:
    """Return host and port, or the socket path, of a client's server, for messages."""
    known = client.connection_pool.connection_kwargs
    return f"{known.get('host', known.get('path'))}:{known.get('port', '')}"


def _options(url: str, role: Role, name: str, timeouts: tuple[float, float], max_connections: int) -> dict[str, Any]:
    from redis.connection import parse_url

    database = database_of(url, role)
    try:
        found: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]  # redis-py's
    except ValueError as error:  # an invalid ssl_ option; the message may show other values
        raise InvalidInput(
            "An option of the Redis address has an invalid value.", hint="See the ssl_... options of redis-py."
        ) from error
    found.pop("connection_class", None)
    if read_address(url).scheme == "unix":
        ours: dict[str, Any] = {}
    else:
        ours = {"socket_keepalive": True}
    ours |= {
        "db": database,
        "client_name": f"headway-{name or role}",
        "socket_connect_timeout": timeouts[0],
        "socket_timeout": timeouts[1],
        "health_check_interval": 0,
        "retry_on_timeout": False,
        "max_connections": max_connections,
        "encoding_errors": "backslashreplace",  # invalid UTF-8 changes one value and does not fail the whole reply
        "protocol": 2,  # the same replies in every supported redis-py
    }
    return found | ours

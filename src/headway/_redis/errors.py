"""Translate exceptions of redis-py into those of Headway."""

from __future__ import annotations

import re
from functools import lru_cache

from headway._redis.address import shown_address
from headway.errors import HeadwayError, MissingExtra, StorageError, StoreFull, Unavailable
from headway.telemetry import redact


def import_redis() -> None:
    """Raise `MissingExtra` if redis-py is not installed."""
    try:
        import redis  # noqa: F401  # only to see whether it is installed
    except ImportError as error:
        raise MissingExtra("redis", "A redis:// address") from error


@lru_cache(maxsize=1)
def failures() -> tuple[type[Exception], ...]:
    """Return the exception classes that a client may raise."""
    import_redis()
    from redis import exceptions

    return (exceptions.RedisError, OSError)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry on a new connection may help. It cannot after a refused password or a command error."""
    from redis import exceptions

    away = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    if isinstance(error, away):
        return not isinstance(error, refused)
    # BUSY: another client's script runs for seconds, and our command was not executed.
    return _says(error, "READONLY", "MASTERDOWN", "NOREPLICAS", "LOADING", "BUSY")


def _says(error: BaseException, *codes: str) -> bool:
    """Return whether the reply has one of these codes. Redis up to 6.2 wraps errors inside a script."""
    text = str(error)
    return any(text.partition(" ")[0] == code or f"-{code} " in text for code in codes)


def _denied(error: BaseException) -> bool:
    """Return whether the ACL forbids the command. A script of Redis 6.2 has its own message for it."""
    from redis import exceptions

    return (
        isinstance(error, exceptions.NoPermissionError)
        or _says(error, "NOPERM")
        or "The user executing the script can't" in str(error)
    )


_COMMAND = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


def translate(error: BaseException, where: str) -> HeadwayError:
    """Return the exception for an error of a client. ``where`` is the address, shown without user and password."""
    from redis import exceptions

    # redis-py quotes a pipeline's command with all its arguments, which may be secret.
    text = _COMMAND.sub("", str(error))
    server, why = shown_address(where), redact(text) or type(error).__name__
    if is_transient(error):
        return Unavailable(
            f"Redis at {server} cannot be reached: {why}",
            hint="Check that it runs and that the address is right.",
        )
    if isinstance(error, exceptions.ConnectionError) or _denied(error):
        return Unavailable(
            f"Redis at {server} refused us: {why}",
            hint="Check user and password in the address, and the user's ACL (docs/reference/redis.md has its rights).",
        )
    if isinstance(error, exceptions.OutOfMemoryError) or _says(error, "OOM"):
        return StoreFull(
            f"Redis at {server} has reached its maxmemory.",
            hint="Raise maxmemory, or move the cache to another server.",
        )
    return StorageError(f"Redis at {server} failed: {why}")

"""What a client raises, in headway's words."""

from __future__ import annotations

import re
from functools import lru_cache

from headway._redis.address import place
from headway.errors import HeadwayError, MissingExtra, StorageError, StoreFull, Unavailable
from headway.telemetry import redact


def import_redis() -> None:
    """Say which extra is missing, if it is."""
    try:
        import redis  # noqa: F401  # asked only whether it is there
    except ImportError as error:
        raise MissingExtra("redis", "A redis:// address") from error


@lru_cache(maxsize=1)
def failures() -> tuple[type[Exception], ...]:
    """Whatever a client of ours may raise."""
    import_redis()
    from redis import exceptions

    return (exceptions.RedisError, OSError)


def is_transient(error: BaseException) -> bool:
    """Whether another try on a new connection may help: not after a refused password or a command error."""
    from redis import exceptions

    away = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError)
    refused = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    if isinstance(error, away):
        return not isinstance(error, refused)
    # BUSY: somebody's script has been running for seconds, and nothing of ours was.
    return _says(error, "READONLY", "MASTERDOWN", "NOREPLICAS", "LOADING", "BUSY")


def _says(error: BaseException, *codes: str) -> bool:
    """Whether the server answered one of these; up to 6.2 it wraps what happened inside a script in other words."""
    text = str(error)
    return any(text.partition(" ")[0] == code or f"-{code} " in text for code in codes)


def _denied(error: BaseException) -> bool:
    """Whether the ACL forbids it; a script of Redis 6.2 says so in words of its own."""
    from redis import exceptions

    return (
        isinstance(error, exceptions.NoPermissionError)
        or _says(error, "NOPERM")
        or "The user executing the script can't" in str(error)
    )


_COMMAND = re.compile(r"^Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)


def translate(error: BaseException, where: str) -> HeadwayError:
    """A client's error in our words. ``where`` is the address; it is shown without user and password."""
    from redis import exceptions

    # redis-py names a pipeline's command with all it carries, which is nobody's business.
    said = _COMMAND.sub("", str(error))
    server, why = place(where), redact(said) or type(error).__name__
    if is_transient(error):
        return Unavailable(
            f"Redis at {server} cannot be reached: {why}",
            hint="Check that it runs and that the address is right.",
        )
    if isinstance(error, exceptions.ConnectionError) or _denied(error):
        return Unavailable(
            f"Redis at {server} refused us: {why}",
            hint="Check user and password in the address, and their ACL (docs/reference/redis.md lists the rights needed).",
        )
    if isinstance(error, exceptions.OutOfMemoryError) or _says(error, "OOM"):
        return StoreFull(
            f"Redis at {server} has reached its maxmemory.",
            hint="Raise maxmemory, or move the cache to another server.",
        )
    return StorageError(f"Redis at {server} did not do it: {why}")

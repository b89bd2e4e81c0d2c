"""Addresses of servers: parsed strictly, shown without secrets."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

from headway.errors import InvalidInput
from headway.telemetry import redact

Role = Literal["state", "queue", "cache"]

#: Default database of each role. State never shares database 0 with a cache.
DATABASES: dict[Role, int] = {"state": 1, "queue": 0, "cache": 0}

#: Options that an address may have. This package decides timeouts, retries, protocol and decoding.
_OPTION = re.compile(r"db|username|password|ssl_\w+")

_HINT = "Use redis://host:6379/1, rediss://... or unix:///path?db=1; in a password write # / ? @ as %23 %2F %3F %40."


def read_address(url: object) -> SplitResult:
    """Parse an address. Raises `InvalidInput` without repeating anything that could be part of a password.

    A ``#`` or ``/`` in a password ends the part of the address in which a parser looks for it.
    """
    if not isinstance(url, str) or re.match(r"(redis|rediss|unix)://", url) is None:
        scheme = re.match(r"[a-z0-9+]{1,20}://", url) if isinstance(url, str) else None
        raise InvalidInput(f"{scheme[0] + '...' if scheme else 'The text'} is not a Redis address.", hint=_HINT)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # its message may contain a part of the password
        raise _unreadable(url, "host or port is not valid") from error
    if not url.isprintable() or " " in url:
        raise _unreadable(url, "it contains a space or a control character")
    if "#" in url or "@" in parts.path + parts.query:
        raise _unreadable(url, "it contains a # or @ that must be encoded")
    if port == 0:
        raise _unreadable(url, "port 0 does not exist")
    if parts.scheme == "unix" and not parts.path.strip("/"):
        raise _unreadable(url, "the path of the socket is missing")
    for name in parse_qs(parts.query, keep_blank_values=True):
        if not _OPTION.fullmatch(name):
            shown = name if re.fullmatch(r"[a-z_]{1,40}", name) else "something"
            raise InvalidInput(
                f"The Redis address {parts.scheme}://... sets {shown!r}, which headway decides itself.",
                hint="Remove it. Only db=..., and ssl_...= for rediss://, may follow the ?.",
            )
    return parts


def _unreadable(url: str, why: str) -> InvalidInput:
    return InvalidInput(f"The Redis address {url.partition('://')[0]}://... cannot be read: {why}.", hint=_HINT)


def database_of(url: str, role: Role) -> int:
    """Return the database number of an address for a role. Raises `InvalidInput` if the role must not use it."""
    parts = read_address(url)
    named = parse_qs(parts.query, keep_blank_values=True).get("db")
    text = named[0] if named else parts.path.strip("/") if parts.scheme != "unix" else ""
    if (text or named) and not re.fullmatch(r"[0-9]{1,9}", text):
        raise _unreadable(url, "its database is not a number")
    number = int(text) if text else DATABASES[role]
    if role == "state" and number == 0:
        raise InvalidInput(
            f"{shown_address(url)!r} is database 0, which is for caches. State needs another database.",
            hint="Use database 1: redis://host:6379/1",
        )
    return number


def shown_address(where: str) -> str:
    """Return an address to show: scheme, host, port and database, without user, password and options."""
    if "://" not in where:
        return redact(where)
    try:
        parts = read_address(where)
    except InvalidInput:
        return f"{where.partition('://')[0]}://..."
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = parts.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "") + parts.path

"""One connection to a server: JSON there and back, errors as they were raised there.

It follows no redirection, because the token would go with it, and takes no password in the address. Without a token it
looks for the token file of a server on this machine (`headway.local_servers`).
"""

from __future__ import annotations

import http.client
import json
import os
import re
import selectors
import socket
import ssl
import threading
import time
import weakref
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from headway import __version__, errors
from headway.config import is_loopback, is_server
from headway.errors import HeadwayError, InvalidInput, Refused, ServerRefused, StorageError, Unavailable, UsageError
from headway.local_servers import LocalServer, find
from headway.telemetry import Log, redact

log = Log("client")

#: Seconds an answer may take, and bytes it may have.
TIMEOUT: Final = 30.0
LARGEST: Final = 256_000_000

_SENDABLE = re.compile(r"[\x21-\x7e]{0,4096}")


_ALL: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """Kept open between questions; used by one thread at a time, the others wait."""

    def __init__(self, address: str, token: str | None, *, timeout: float = TIMEOUT) -> None:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not is_server(address) or not host or parts.query or parts.fragment:
            raise InvalidInput(f"{redact(address)!r} is no server.", hint="Use https://host or http://127.0.0.1:8700")
        if parts.username is not None or parts.password is not None:
            raise InvalidInput("An address has no user or password in it.", hint="Put the token into HEADWAY_TOKEN.")
        try:
            host.encode("idna")
        except UnicodeError:
            raise InvalidInput(
                f"{redact(address)[:200]!r} is no server.", hint="Use https://host or http://127.0.0.1:8700"
            ) from None
        if token is not None and not _SENDABLE.fullmatch(token):  # what it is is not repeated
            raise InvalidInput(
                "The token has characters that no token has.", hint="Use it as it was printed by: headway token create"
            )
        self.address = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._path = parts.path.rstrip("/")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._token, self._timeout = token, timeout
        self._lock = threading.Lock()
        self._open: http.client.HTTPConnection | None = None
        self._local: LocalServer | None = None
        _ALL.add(self)

    def get(self, path: str, **parameters: Any) -> Any:
        given = {name: _text(value) for name, value in parameters.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, **body: Any) -> Any:
        return self._ask("POST", path, {name: value for name, value in body.items() if value is not None})

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _ask(self, method: str, path: str, body: Any) -> Any:
        with self._lock:
            if self._open is not None and _was_closed(self._open):
                self._drop()  # nothing was sent on it: what changes something may go on another
            # One that closes just now is not seen. Then a question is asked again; what changes something may have been
            # done already, so that the trouble is said instead.
            tries = 2 if self._open is not None and method == "GET" else 1
            while True:
                tries -= 1
                try:
                    return self._once(method, path, body)
                except HeadwayError:
                    raise  # it was read to its end
                except BaseException as error:
                    self._drop()  # an answer that was not read to its end would be taken for the next one's
                    if not isinstance(error, http.client.HTTPException | OSError):
                        raise
                    if not tries:
                        raise self._away(error) from error

    def _once(self, method: str, path: str, body: Any) -> Any:
        connection, end = self._connection(), time.monotonic() + self._timeout
        headers = {"Accept": "application/json", "User-Agent": f"headway/{__version__}"}
        token = self._token or (None if self._local is None else self._local.token)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        content = None
        if body is not None:
            content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        connection.request(method, f"{self._path}/api/v1{path}", content, headers)
        response = connection.getresponse()
        announced = response.length  # None where it comes in chunks, which say themselves that they are whole
        text = _whole(response, end)
        if announced is not None and len(text) < min(announced, LARGEST + 1):
            raise http.client.IncompleteRead(text, announced - len(text))
        if announced is None and not response.chunked and not text:
            raise http.client.IncompleteRead(text)  # it broke off in the head, before it said how long it is
        if len(text) > LARGEST:
            self._drop()
            raise ServerRefused(f"The answer of {self.address} is larger than {LARGEST:,} bytes.")
        return self._read(response.status, text)

    def _read(self, status: int, text: bytes) -> Any:
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if status == 200 and isinstance(document, dict):
            return document
        error = document.get("error") if isinstance(document, dict) else None
        if not isinstance(error, dict):
            raise ServerRefused(
                f"{self.address} answered {status}, and not as a server of headway does.",
                hint="Check the address: it is that of headway serve.",
            )
        raise _as_raised(status, error)

    def _connection(self) -> http.client.HTTPConnection:
        if self._open is None:
            if self._secure:
                context = ssl.create_default_context()
                self._open = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
            else:
                if self._token and not _is_near(self._host):
                    log.warning("the token is sent without encryption", host=self._host)
                # Read anew for every connection: a server that started again has another token.
                self._local = None if self._token else find(self._host, self._port or http.client.HTTP_PORT)
                host = self._host if self._local is None else self._local.connect_host
                self._open = http.client.HTTPConnection(host, self._port, timeout=self._timeout)
        return self._open

    def leave_to_parent(self) -> None:
        """In a forked child, before anything else runs there: what the parent asks on its connection is not for us."""
        self._lock = threading.Lock()
        self._drop()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _away(self, error: Exception) -> HeadwayError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unavailable(f"{self.address} is not who it says it is: {error.verify_message}.")
        reason = redact(str(error)) or type(error).__name__
        return Unavailable(
            f"The server at {self.address} cannot be reached: {reason}.", hint="Check that it runs: headway serve"
        )


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side closed it while nobody asked; a server does so after some seconds. Nothing else is to be read
    from a connection whose last answer was read to its end."""
    if connection.sock is None:
        return False
    waiting = selectors.DefaultSelector()
    with waiting:
        waiting.register(connection.sock, selectors.EVENT_READ)
        return bool(waiting.select(0))


def _whole(response: http.client.HTTPResponse, end: float) -> bytes:
    """The answer, by that moment: one that comes in drops would keep its asker for ever."""
    parts, size = [], 0
    while size <= LARGEST and (some := response.read1(1_000_000)):
        parts.append(some)
        size += len(some)
        if time.monotonic() > end:
            raise TimeoutError("it did not answer in time")
    response.close()  # read to its end, which the connection is told by this; it stays open for the next question
    return b"".join(parts)


def part(text: str) -> str:
    """An id as a part of a path."""
    return quote(text, safe="") or "%20"  # an empty one would be another path


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_near(host: str) -> bool:
    return is_loopback(host) or host in ("localhost", socket.gethostname())


def _as_raised(status: int, error: dict[str, Any]) -> HeadwayError:
    """The error of the server, of its own class where this version knows it."""
    message, hint = str(error.get("message", "")), str(error.get("hint", ""))
    kind = getattr(errors, str(error.get("type", "")), None)
    if not (isinstance(kind, type) and issubclass(kind, HeadwayError)) or kind is errors.MissingExtra:
        by_status = {400: UsageError, 401: UsageError, 404: errors.NotFound, 503: Unavailable}
        kind = by_status.get(status, Refused if 400 <= status < 500 else StorageError)
    return kind(message, hint=hint)


def _after_fork() -> None:
    for connection in _ALL:
        connection.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)

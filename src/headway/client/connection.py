"""`Connection`: JSON requests to a Headway server. It raises the errors that the server reports.

It follows no redirect, because the token would be sent along, and accepts no password in the address. Without a token it
uses the token file of a server on this machine (`headway.local_servers`).
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

#: Timeout in seconds, and maximum size of a response in bytes.
TIMEOUT: Final = 30.0
LARGEST: Final = 256_000_000

_SENDABLE = re.compile(r"[\x21-\x7e]{0,4096}")


_ALL: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """A persistent connection. One thread uses it at a time; the others wait."""

    def __init__(self, address: str, token: str | None, *, timeout: float = TIMEOUT) -> None:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not is_server(address) or not host or parts.query or parts.fragment:
            raise _invalid(address)
        if parts.username is not None or parts.password is not None:
            raise InvalidInput(
                "The address must not contain a user or password.", hint="Put the token into HEADWAY_TOKEN."
            )
        try:
            host.encode("idna")
        except UnicodeError:
            raise _invalid(address) from None
        if token is not None and not _SENDABLE.fullmatch(token):  # the error must not contain it
            raise InvalidInput(
                "The token contains invalid characters.", hint="Use the token as printed by: headway token create"
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
        """Send a GET request and return the parsed response. Parameters that are None are left out."""
        given = {name: _text(value) for name, value in parameters.items() if value is not None}
        return self._request("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, **body: Any) -> Any:
        """Send a POST request and return the parsed response. Fields that are None are left out."""
        return self._request("POST", path, {name: value for name, value in body.items() if value is not None})

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        with self._lock:
            self._drop()

    def _request(self, method: str, path: str, body: Any) -> Any:
        with self._lock:
            if self._open is not None and _was_closed(self._open):
                self._drop()  # nothing was sent on it, so any request may use a new connection
            # The server may close the connection just now. Then a GET is repeated once. A POST may have been executed
            # already, so its error is raised.
            tries = 2 if self._open is not None and method == "GET" else 1
            while True:
                tries -= 1
                try:
                    return self._send(method, path, body)
                except HeadwayError:
                    raise  # the response was read completely
                except BaseException as error:
                    self._drop()  # the rest of the response would be read as the next one
                    if not isinstance(error, http.client.HTTPException | OSError):
                        raise
                    if not tries:
                        raise self._unreachable(error) from error

    def _send(self, method: str, path: str, body: Any) -> Any:
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
        announced = response.length  # None for a chunked response, whose end is detected by http.client
        text = _whole(response, end)
        if announced is not None and len(text) < min(announced, LARGEST + 1):
            raise http.client.IncompleteRead(text, announced - len(text))
        if announced is None and not response.chunked and not text:
            raise http.client.IncompleteRead(text)  # cut within the headers
        if len(text) > LARGEST:
            self._drop()
            raise ServerRefused(f"The response of {self.address} is larger than {LARGEST:,} bytes.")
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
                f"{self.address} answered {status}, but not like a Headway server.",
                hint="Check the address. It must be the address of: headway serve",
            )
        raise _as_raised(status, error)

    def _connection(self) -> http.client.HTTPConnection:
        if self._open is None:
            if self._secure:
                context = ssl.create_default_context()
                self._open = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
            else:
                if self._token and not _is_local(self._host):
                    log.warning("the token is sent without encryption", host=self._host)
                # Read for every connection: a restarted server has another token.
                self._local = None if self._token else find(self._host, self._port or http.client.HTTP_PORT)
                host = self._host if self._local is None else self._local.connect_host
                self._open = http.client.HTTPConnection(host, self._port, timeout=self._timeout)
        return self._open

    def leave_to_parent(self) -> None:
        """Drop the connection in a forked child: it belongs to the parent."""
        self._lock = threading.Lock()
        self._drop()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _unreachable(self, error: Exception) -> HeadwayError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unavailable(f"The certificate of {self.address} is not valid: {error.verify_message}.")
        reason = redact(str(error)) or type(error).__name__
        return Unavailable(
            f"The server at {self.address} cannot be reached: {reason}.", hint="Check that it runs: headway serve"
        )


def _invalid(address: str) -> InvalidInput:
    return InvalidInput(
        f"{redact(address)[:200]!r} is not the address of a server.", hint="Use https://host or http://127.0.0.1:8700"
    )


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server closed an idle connection, which it does after some seconds.

    The last response was read completely, so nothing else can be readable.
    """
    if connection.sock is None:
        return False
    waiting = selectors.DefaultSelector()
    with waiting:
        waiting.register(connection.sock, selectors.EVENT_READ)
        return bool(waiting.select(0))


def _whole(response: http.client.HTTPResponse, end: float) -> bytes:
    """Read the response until ``end``. The socket's timeout alone would not limit a response that arrives byte by byte."""
    parts, size = [], 0
    while size <= LARGEST and (some := response.read1(1_000_000)):
        parts.append(some)
        size += len(some)
        if time.monotonic() > end:
            raise TimeoutError("it did not answer in time")
    response.close()  # marks the response as read; the connection stays open for the next request
    return b"".join(parts)


def part(text: str) -> str:
    """Quote an id as one segment of a path."""
    return quote(text, safe="") or "%20"  # an empty segment would be another path


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_local(host: str) -> bool:
    return is_loopback(host) or host in ("localhost", socket.gethostname())


def _as_raised(status: int, error: dict[str, Any]) -> HeadwayError:
    """Return the server's error, in its class if this version has it."""
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

"""One POST within one deadline. Imported with the first webhook, because http.client takes long to import."""

from __future__ import annotations

import base64
import functools
import http.client
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib import error, request
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from headway.errors import HeadwayError, InvalidInput, ServerRefused, Unavailable
from headway.events.deadline import Watchdog
from headway.events.outbox import EventRefused
from headway.telemetry import redact

#: 4xx answers after which another try may succeed.
TEMPORARY = frozenset({408, 409, 425, 429})

#: Answers about the content of one event. Other 4xx answers may come from a receiver that is misconfigured for a moment.
CONTENT = frozenset({400, 406, 413, 415, 422})


class Address:
    """A parsed web address: URL, credentials, and the part that may be shown."""

    def __init__(self, url: str) -> None:
        parts = _split(url)
        host = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))
        self.host = host
        #: Without path and query, which often contain the secret of a webhook.
        self.shown = f"{parts.scheme}://{host}/***"
        self.headers: dict[str, str] = {}
        if "@" in parts.netloc:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            self.headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()


def _split(url: str) -> SplitResult:
    """Split an address. Raises `InvalidInput` without showing it: any part may belong to a password."""
    hint = "Use http://host/path or https://user:password@host/path, with %40 for @ and %2F for / in a password."
    try:
        parts = urlsplit(url)
        named = parts.hostname is not None and (parts.port is None or parts.port > 0)
        url.encode("ascii")
    except ValueError as trouble:  # its message may contain a part of the password
        raise InvalidInput("A sink's web address cannot be read.", hint=hint) from (
            None if isinstance(trouble, UnicodeError) else trouble.__cause__
        )
    if parts.scheme not in ("http", "https") or not named or any(mark.isspace() for mark in url):
        raise InvalidInput("A sink's web address must be http://host/path or https://host/path.", hint=hint)
    if "@" in parts.netloc and "@" in parts.path:
        raise InvalidInput("A sink's web address is ambiguous: it has two @.", hint=hint)
    return parts


def post(address: Address, body: bytes, headers: Mapping[str, str], *, seconds: float, watchdog: Watchdog) -> None:
    """Send ``body``. Returns for any 2xx answer.

    Raises `EventRefused` for an answer about the content (`CONTENT`), `ServerRefused` for other permanent answers (4xx) and
    `Unavailable` for everything else.
    """
    deadline = time.monotonic() + seconds
    connections: list[http.client.HTTPConnection] = []

    def end() -> None:
        for connection in connections:
            if connection.sock is not None:
                with suppress(OSError):  # not connected
                    connection.sock.shutdown(socket.SHUT_RDWR)

    opener = request.build_opener(_NoRedirect, _Http(deadline, connections), _Https(deadline, connections))
    call = request.Request(  # noqa: S310 - http or https: see _split
        address.url, data=body, headers={**headers, **address.headers}, method="POST"
    )
    with watchdog.over(end, seconds) as late:
        try:
            opener.open(call, timeout=seconds).close()
        except error.HTTPError as answer:
            outcome = f"HTTP {answer.code} {redact(str(answer.reason))[:100]}"
            answer.close()
            raise _refusal(address, answer.code, outcome) from None
        except (error.URLError, http.client.HTTPException, OSError, ValueError, AttributeError) as trouble:
            # AttributeError: http.client reads from a connection that the watchdog has closed.
            why = f"no answer within {seconds:g} s" if late() or _is_late(trouble) else redact(str(trouble))
            raise Unavailable(f"The webhook {address.shown} did not take the event: {why}") from None


def _refusal(address: Address, code: int, outcome: str) -> HeadwayError:
    message = f"The webhook {address.shown} did not take the event: {outcome}"
    if code in CONTENT:
        return EventRefused(message)
    if 400 <= code < 500 and code not in TEMPORARY:
        return ServerRefused(message)
    return Unavailable(message)


def _is_late(trouble: BaseException) -> bool:
    return isinstance(trouble, TimeoutError) or isinstance(getattr(trouble, "reason", None), TimeoutError)


class _NoRedirect(request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST becomes a GET without the event, and a login page would answer 200."""

    def redirect_request(self, *_: object) -> None:
        return None


class _Http(request.HTTPHandler):
    """Opens connections that share one deadline and that the watchdog can close."""

    def __init__(self, deadline: float, connections: list[http.client.HTTPConnection]) -> None:
        super().__init__()
        self._made = (deadline, connections)

    def http_open(self, req: request.Request) -> Any:
        return self.do_open(functools.partial(_made, http.client.HTTPConnection, *self._made), req)


class _Https(request.HTTPSHandler):
    def __init__(self, deadline: float, connections: list[http.client.HTTPConnection]) -> None:
        super().__init__()
        self._made = (deadline, connections)

    def https_open(self, req: request.Request) -> Any:
        return self.do_open(functools.partial(_made, http.client.HTTPSConnection, *self._made), req)


class _Response(http.client.HTTPResponse):
    """Skips interim answers (102, 103). http.client skips only 100, and the event would be repeated for ever."""

    def _read_status(self) -> tuple[str, int, str]:
        found: tuple[str, int, str] = super()._read_status()  # type: ignore[misc]  # http.client's own hook, here and below
        while 101 < found[1] < 200:
            http.client.parse_headers(self.fp)
            found = super()._read_status()  # type: ignore[misc]
        return found


def _made(
    kind: type[http.client.HTTPConnection],
    deadline: float,
    known: list[http.client.HTTPConnection],
    host: str,
    **options: Any,
) -> http.client.HTTPConnection:
    connection = kind(host, **options)
    connection.response_class = _Response
    known.append(connection)
    # By default each address of a host would get the whole time limit.
    connection._create_connection = functools.partial(_dial, deadline)  # type: ignore[attr-defined]  # noqa: SLF001  # http.client's own hook
    return connection


def _dial(deadline: float, target: tuple[str, int], *_: object, **__: object) -> socket.socket:
    trouble: OSError = OSError("the host has no address")
    for family, kind, protocol, _name, address in socket.getaddrinfo(*target, type=socket.SOCK_STREAM):
        link = socket.socket(family, kind, protocol)
        try:
            link.settimeout(max(0.001, deadline - time.monotonic()))
            link.connect(address)
            link.settimeout(max(0.001, deadline - time.monotonic()))
            return link
        except OSError as error:
            link.close()
            trouble = error
    raise trouble

"""The gate: middleware that checks every request and sets the headers of every response.

It wraps the whole application, so no route can bypass it. A request passes if

1. its size is within bounds;
2. its user is authenticated (`headway.web.auth.identity`);
3. it does not come from another site's page, as shown by ``Origin`` and ``Sec-Fetch-Site``, also for WebSockets;
4. it has our CSRF token, if it changes something and is authenticated by a cookie, or not at all (``--no-auth``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response

from headway.errors import HeadwayError
from headway.telemetry import metrics
from headway.web.api import problems
from headway.web.api.problems import Forbidden, NotAcceptable, TooLarge, TooSlow, Unauthenticated
from headway.web.auth.identity import root_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from headway.web.auth.identity import Access, Known

#: Maximum size of a request body in bytes, and the seconds in which it must arrive.
BODY: Final = 1_000_000
UPLOAD: Final = 30.0

#: Paths that need no authentication, because they reveal nothing.
PUBLIC: Final = ("/healthz", "/readyz", "/login", "/enter", "/favicon.ico")
PUBLIC_BELOW: Final = "/static/"

SAFE: Final = ("GET", "HEAD", "OPTIONS")

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
        "manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send `Origin: null` with our own forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Gate:
    """The middleware of this module."""

    def __init__(self, app: ASGIApp, access: Access, on_error: Callable[[Scope, HeadwayError], Response]) -> None:
        self._app, self._access, self._on_error = app, access, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if scope.get("method") == "HEAD" and path_of(scope) != "/enter":
            # HEAD runs as GET, and the server omits the body. Not for `/enter`: it spends a ticket, and HEAD must not
            # change anything.
            scope = {**scope, "method": "GET"}
        answering = _Answering(send)
        try:
            clear = await self._admit(scope)
            if isinstance(clear, Response):
                await self._refuse(scope, receive, answering, clear)
                return
            answering.dress = clear
            await self._app(scope, _bounded(scope, receive), answering)
        except Exception as error:  # noqa: BLE001 - no exception may reveal internals in the response
            if answering.begun and "headway.explained" in scope:
                return  # answered and logged already
            known = problems.explained(error)
            if not answering.begun:
                await self._refuse(scope, receive, answering, self._on_error(scope, known))

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, response: Response) -> None:
        if scope["type"] == "websocket":
            await receive()  # the handshake
            await problems.deny(scope, receive, send, response)
            return
        await response(scope, receive, send)

    async def _admit(self, scope: Scope) -> Response | Callable[[MutableHeaders], None]:
        """Check a request. Returns a function that sets the response's cookies, or the response that refuses it."""
        connection, access, path = HTTPConnection(scope), self._access, path_of(scope)
        _check_source(connection, path)
        if path.startswith(PUBLIC_BELOW) or path in ("/healthz", "/readyz", "/favicon.ico"):
            return _nothing
        await access.load()
        known = None
        if path not in PUBLIC:
            known = await access.who(connection)
            if known is None:
                return self._ask_to_log_in(scope, connection, path)
            scope["headway.user"], scope["headway.pulse"] = known.user, access.seen
            scope["headway.session"] = known.by == "session"  # such a user can log out
        visitor = access.cookie(connection, "visitor")
        fresh = "" if visitor or is_for_programs(path) else secrets.token_urlsafe(24)
        scope["headway.csrf"] = access.form_token(connection, visitor or fresh)
        if scope["type"] == "http" and scope["method"] not in SAFE and is_for_programs(path):
            self._check_program(connection, known)
        flash = access.cookie(connection, "flash") if not is_for_programs(path) else ""
        scope["headway.flash"] = access.read_flash(flash) if flash else None

        def dress(headers: MutableHeaders) -> None:
            response = Response()
            if fresh:
                access.set_cookie(response, scope, "visitor", fresh, None)
            if flash and scope.get("method") == "GET":
                access.set_cookie(response, scope, "flash", "", 0)
            for value in response.headers.getlist("set-cookie"):
                headers.append("set-cookie", value)

        return dress

    def _check_program(self, connection: HTTPConnection, known: Known | None) -> None:
        """Check a change through the API. Requiring JSON keeps out forms of other sites, which browsers send with cookies."""
        kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NotAcceptable(
                f"The content type must be application/json (got {kind[:60]!r}).",
                hint="Send a JSON object with Content-Type: application/json",
            )
        from_browser = "origin" in connection.headers or "sec-fetch-site" in connection.headers
        if known is None or known.by in ("session", "users") or (known.by == "open" and from_browser):
            self._access.check_form(connection, connection.headers.get("x-csrf-token", ""))

    def _ask_to_log_in(self, scope: Scope, connection: HTTPConnection, path: str) -> Response:
        given = "authorization" in connection.headers
        error = Unauthenticated(
            "The Authorization header has no valid token of Headway." if given else "Log in first.",
            hint="On the server's machine: headway open, or headway token create NAME --role viewer; "
            "send a token as Authorization: Bearer TOKEN",
        )
        wants_page = scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and not is_for_programs(path)
        if not wants_page:
            return problems.answer(error)
        if self._access.users is not None:
            return self._on_error(scope, error)  # the application has its own login
        query = scope.get("query_string", b"").decode("latin-1")
        back = quote(path + (f"?{query}" if query else ""), safe="/")
        return RedirectResponse(f"{root_of(scope)}/login?next={back}", 303)


# ---------------------------------------------------------------------------------------------------------------------
# The request


def path_of(scope: Scope) -> str:
    """Return the path below the application's mount point."""
    path, root = str(scope["path"]), root_of(scope)
    return path[len(root) :] or "/" if root and f"{path}/".startswith(f"{root}/") else path


def is_for_programs(path: str) -> bool:
    """Return whether a path belongs to the API or the metrics, not to a page."""
    return path.startswith(("/api/", "/metrics"))


def _check_source(connection: HTTPConnection, path: str) -> None:
    """Refuse requests of other sites' pages. Browsers send their origin in headers that no script can set."""
    headers, scope = connection.headers, connection.scope
    changes = scope["type"] == "websocket" or scope["method"] not in SAFE
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    foreign = Forbidden("This request comes from another site.", hint="Open the page under its own address.")
    if changes and origin is not None and _netloc(origin) != headers.get("host", "").lower():
        raise foreign
    if site not in (None, "same-origin", "none") and (
        changes or (is_for_programs(path) and headers.get("sec-fetch-mode") != "navigate")
    ):
        raise foreign


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _nothing(_: MutableHeaders) -> None:
    """Set no cookies."""


class _Answering:
    """Sends a response with the common headers."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.dress: Callable[[MutableHeaders], None] = _nothing

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.begun = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if message["type"] != "websocket.accept":
                headers.setdefault("Cache-Control", "no-store")
                self.dress(headers)
                metrics.count("headway_web_requests", status=f"{message['status'] // 100}xx")
        elif message["type"] == "websocket.close":
            self.begun = True
        await self._send(message)


def _bounded(scope: Scope, receive: Receive) -> Receive:
    """Refuse a body that is too large, before it is in memory, or too slow."""
    if scope["type"] != "http":
        return receive
    length = Headers(scope=scope).get("content-length", "0")
    error = TooLarge(f"The request is too large. At most {BODY:,} bytes are allowed.")
    if not length.isdecimal() or int(length) > BODY:
        raise error
    taken, end = 0, time.monotonic() + UPLOAD
    whole = False

    async def counted() -> Message:
        nonlocal taken, whole
        if whole:  # only a disconnect can follow
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise TooSlow(f"The request did not arrive within {UPLOAD:.0f} s.") from None
        whole = not message.get("more_body", False)
        taken += len(message.get("body", b"") or b"")
        if taken > BODY:
            raise error
        return message

    return counted

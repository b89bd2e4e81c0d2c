"""The gate in front of every route: who is asking, and whether the request comes from where it says.

No route is reached around it, so none can forget it. A request passes when

1. its size is within bounds;
2. somebody is known to ask: by a token or a ticket (``Authorization: Bearer``), by the application's own ``users``
   function, by the session cookie of a login; or the server is *open*, which it is while nobody ever made a token, and then
   only to this machine: the peer, the ``Host`` it names (a name that was pointed at us by DNS rebinding is another one) and
   the absence of a proxy's headers are looked at;
3. it was not sent by another site's page: ``Origin`` and ``Sec-Fetch-Site`` say so, for WebSockets too;
4. where a browser's cookie or its being on this machine is all that vouches for it, it carries the token of our own forms.

While the store is away nothing is opened: who was known in the last minutes stays known, everybody else is told to wait.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import inspect
import ipaddress
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import quote, urlsplit
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, cookie_parser
from starlette.responses import RedirectResponse, Response

from headway.errors import ConfigError, HeadwayError, StorageError, Unavailable
from headway.telemetry import Log, metrics
from headway.web import problems, tickets, tokens
from headway.web.problems import Forbidden, NotAcceptable, TooLarge, TooSlow, Unauthenticated
from headway.web.site import NAME, RIGHTS, THREADS, Flash, User, is_name
from headway.web.throttle import REMEMBERED, Network, Throttle, peer_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from headway.web.site import Site

log = Log("web")

T = TypeVar("T")

#: An application's own users: who sends this request, or None. It may be a coroutine function.
Users = Callable[[HTTPConnection], User | Awaitable[User | None] | None]

#: Seconds between two looks whether a token or a login was made or ended, by one statement for all who ask.
PULSE: Final = 2.0
#: Seconds that the store may take to say who somebody is.
ASK: Final = 2.0
#: Seconds that an answer about a token or a session is taken for true while none was revoked; and while the store is away.
FRESH: Final = 30.0
STALE: Final = 600.0
#: Bytes a request may have, and seconds in which it has to be here.
BODY: Final = 1_000_000
UPLOAD: Final = 30.0

#: Reached without being anybody: they tell nothing.
PUBLIC: Final = ("/healthz", "/readyz", "/login", "/enter", "/favicon.ico")
PUBLIC_BELOW: Final = "/static/"

SAFE: Final = ("GET", "HEAD", "OPTIONS")

_OF_PROXIES: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
        "manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers call the origin of our own forms null
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Known:
    """Who asks, and by what they are known."""

    user: User
    by: str  # "token", "users", "session" or "open"


@dataclass(slots=True)
class Access:
    """What the store said about tokens and sessions, for a few seconds."""

    site: Site
    users: Users | None = None
    hosts: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()
    throttle: Throttle = field(default_factory=Throttle)
    key: bytes | None = None
    _known: dict[str, tuple[float, User | None]] = field(default_factory=dict)
    _turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)
    _pulse: tuple[float, tokens.Pulse | None] = (-STALE, None)
    _away_until: float = 0.0
    _was_closed: bool = False
    _installation: str = ""

    async def who(self, connection: HTTPConnection) -> Known | None:
        await self.pulse()
        bearer = _bearer(connection.headers.get("authorization"))
        if bearer is not None and bearer.startswith(tickets.PREFIX):
            ticket = self.ticket(bearer, self.peer(connection))
            return None if ticket is None else Known(ticket.user, "token")
        if bearer is not None:
            user = await self._by_token(bearer, self.peer(connection))
            return None if user is None else Known(user, "token")
        if self.users is not None:
            found = self.users(connection)
            user = await found if inspect.isawaitable(found) else found
            if user is not None:
                return Known(_checked(user), "users")
        cookie = self.cookie(connection, "session")
        if cookie:
            found_user = await self._ask("s" + tokens.hashed(cookie), tokens.find_session, cookie)
            if isinstance(found_user, User):
                return Known(found_user, "session")
        if self.users is None and self._is_near(connection) and not self._was_closed and not self.keys:
            return Known(User("local", "admin"), "open")
        return None

    def peer(self, connection: HTTPConnection) -> str:
        """The address whose wrong tokens are counted; nothing else is decided by it."""
        return peer_of(connection.scope, self.proxies)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.site.settings.texts("web_keys")

    def ticket(self, text: str, peer: str) -> tickets.Ticket | None:
        found = tickets.read(self.keys, text, audience=self.site.settings.text("web_audience"))
        if found is None:
            self.throttle.check(peer)
            self.throttle.failed(peer)
        return found

    async def enter(self, text: str, peer: str) -> tuple[User, str] | None:
        """Who came with a ticket, and the new session's cookie; a ticket is taken once."""
        ticket = self.ticket(text, peer)
        if ticket is None:
            return None
        cookie = await self.site.change(lambda: tokens.open_visit(self.site.reader.database, *ticket))
        return None if cookie is None else (ticket.user, cookie)

    async def _by_token(self, text: str, peer: str) -> User | None:
        name = "t" + tokens.hashed(text)
        if name in self._known:  # one that was right before is not kept waiting by another's guesses
            return await self._ask(name, _user_of, text)
        async with self.throttle.trying(peer):
            user = await self._ask(name, _user_of, text)
            if user is None:
                self.throttle.failed(peer)
        return user

    async def pulse(self) -> tokens.Pulse:
        """How many tokens and logins were made and ended. When one ended, everybody is asked about again."""
        at, pulse = self._pulse
        if pulse is not None and time.monotonic() - at < PULSE:
            return pulse
        try:
            found = await self._read(self._look)
        except (Unavailable, StorageError):
            if pulse is not None and time.monotonic() - at < STALE:
                return pulse
            raise
        if pulse is not None and (found.made < pulse.made or found[1:] != pulse[1:]):
            # Not forgotten: while the store is away, who was known stays known.
            known = self._known.items()
            self._known = {name: (min(since, time.monotonic() - FRESH), user) for name, (since, user) in known}
        self._pulse = (time.monotonic(), found)
        # For as long as this process lives: a store that was emptied or went back must not open what was closed.
        self._was_closed = self._was_closed or found.made > 0
        return found

    @property
    def seen(self) -> tokens.Pulse | None:
        """The pulse by which those were judged who were let in last."""
        return self._pulse[1]

    async def _read(self, question: Callable[..., T], *args: object) -> T:
        """Ask the store, not for long; and for a moment not again once it did not answer, so that whoever needs no store
        is not kept waiting by it."""
        if time.monotonic() < self._away_until:
            raise Unavailable("The database does not answer just now.", hint="Try again in a moment.")
        try:
            return await asyncio.wait_for(self.site.read(question, *args), ASK)
        except (TimeoutError, Unavailable) as error:
            self._away_until = time.monotonic() + PULSE
            if isinstance(error, Unavailable):
                raise
            raise Unavailable(f"The database did not answer within {ASK:.0f} s.") from None

    def _look(self) -> tokens.Pulse:
        return tokens.pulse(self.site.reader.database)

    async def log_in(self, text: str, peer: str) -> tuple[User, str] | None:
        """The user and the new session's cookie."""
        async with self.throttle.trying(peer):
            found = await self.site.read(lambda: tokens.find(self.site.reader.database, text))
            if found is None:
                self.throttle.failed(peer)
                return None
        user, token = found
        cookie = await self.site.change(lambda: tokens.open_session(self.site.reader.database, token, user=user))
        return user, cookie

    async def log_out(self, cookie: str) -> None:
        await self.site.change(lambda: tokens.close_session(self.site.reader.database, cookie))
        self._known.pop("s" + tokens.hashed(cookie), None)

    async def load(self) -> None:
        """The key that cookies and forms are signed with; once."""
        if self.key is None:
            self.key = await self.site.read(self._signing_key)  # by its name: all who ask share one answer
            self._installation = tokens.hashed(self.key.hex())[:8]

    def _signing_key(self) -> bytes:
        return tokens.signing_key(self.site.reader.database)

    async def _ask(self, name: str, function: Callable[..., User | None], *args: str) -> User | None:
        """As many at once as there are threads, the others in their turn: after a restart a thousand pages come back
        together, and none of them is one too many."""
        at, found = self._known.get(name, (-STALE, None))
        if time.monotonic() - at < FRESH:
            return found
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS)):
            at, found = self._known.get(name, (-STALE, None))
            if time.monotonic() - at < FRESH:
                return found  # somebody came by the same one, and was quicker
            try:
                found = await self._read(self._find, function, *args)
            except (Unavailable, StorageError):
                if time.monotonic() - at < STALE:
                    return found
                raise
            while len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known.pop(name, None)
            if found is not None:  # what is no token costs its sender a query each time, and us no memory
                self._known[name] = (time.monotonic(), found)
            return found

    def _find(self, function: Callable[..., User | None], *args: str) -> User | None:
        return function(self.site.reader.database, *args)

    def _is_near(self, connection: HTTPConnection) -> bool:
        """From this machine, under a name of this machine, and through nobody."""
        headers = connection.headers
        client = connection.scope.get("client")
        return (
            (client is None or _is_loopback(str(client[0])))
            and connection.scope.get("http_version") != "1.0"  # that is nginx, which says nothing else of itself
            and not any(name in headers for name in _OF_PROXIES)
            and self.is_ours(headers.get("host", ""))
        )

    def is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return name in self.hosts or name == "localhost" or name.endswith(".localhost") or _is_loopback(name)

    # ---- cookies -----------------------------------------------------------------------------------------------------

    def name(self, kind: str) -> str:
        """Cookies of one machine are the same for all ports: each installation has names of its own."""
        return f"headway-{kind}-{self._installation}"

    def cookie(self, connection: HTTPConnection, kind: str) -> str:
        # Read as browsers write them: what another application of this host keeps in one, whatever it is, costs ours nothing.
        return cookie_parser(connection.headers.get("cookie", "")).get(self.name(kind), "")

    def set_cookie(self, response: Response, scope: Scope, kind: str, value: str, seconds: int | None) -> None:
        response.set_cookie(
            self.name(kind), value, max_age=seconds, path=root_of(scope) or "/", httponly=True, samesite="strict",
            secure=_is_encrypted(scope),
        )  # fmt: skip

    def form_token(self, connection: HTTPConnection, visitor: str) -> str:
        """What our own forms carry: bound to the session, or before one exists to the visitor's cookie."""
        bound = self.cookie(connection, "session") or visitor
        return self._sign("form", bound) if bound else ""

    def check_form(self, connection: HTTPConnection, given: str) -> None:
        expected = str(connection.scope.get("headway.csrf", ""))
        if not expected or not hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace")):
            raise Forbidden("The form is not from this page, or too old.", hint="Load the page again and repeat it.")

    def flash(self, kind: str, text: str) -> str:
        body = (
            base64.urlsafe_b64encode(json.dumps([kind, text[:500]], ensure_ascii=False).encode("utf-8", "replace"))
            .decode()
            .rstrip("=")
        )
        return f"{body}.{self._sign('flash', body)}"

    def read_flash(self, cookie: str) -> Flash | None:
        body, _, signature = cookie.partition(".")
        if not body or not hmac.compare_digest(self._sign("flash", body).encode(), signature.encode()):
            return None
        kind, text = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return Flash("failed" if kind == "failed" else "done", str(text))

    def _sign(self, purpose: str, text: str) -> str:
        assert self.key is not None
        return hmac.new(self.key, f"{purpose}:{text}".encode("utf-8", "replace"), "sha256").hexdigest()


class Gate:
    """See the module."""

    def __init__(self, app: ASGIApp, access: Access, on_error: Callable[[Scope, HeadwayError], Response]) -> None:
        self._app, self._access, self._on_error = app, access, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answering = _Answering(send)
        try:
            clear = await self._admit(scope)
            if isinstance(clear, Response):
                await self._refuse(scope, receive, answering, clear)
                return
            answering.dress = clear
            await self._app(scope, _bounded(scope, receive), answering)
        except Exception as error:  # noqa: BLE001 - whatever happens, the answer says no more than it should
            known = (
                error if isinstance(error, HeadwayError) or "headway.explained" in scope else problems.explained(error)
            )
            if not answering.begun:
                assert isinstance(known, HeadwayError)
                await self._refuse(scope, receive, answering, self._on_error(scope, known))

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, response: Response) -> None:
        if scope["type"] == "websocket":
            await receive()  # its opening
            await send({"type": "websocket.close", "code": 4401 if response.status_code == 401 else 4403})
            return
        await response(scope, receive, send)

    async def _admit(self, scope: Scope) -> Response | Callable[[MutableHeaders], None]:
        """Look at a request; what is put on its answer's headers, or the answer that refuses it."""
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
        """A change through the API. JSON cannot be sent by another site's form; a cookie is sent by every page."""
        kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise NotAcceptable(
                "Changes are asked for in JSON.", hint="Send a JSON object with Content-Type: application/json"
            )
        from_browser = "origin" in connection.headers or "sec-fetch-site" in connection.headers
        if known is None or known.by in ("session", "users") or (known.by == "open" and from_browser):
            self._access.check_form(connection, connection.headers.get("x-csrf-token", ""))

    def _ask_to_log_in(self, scope: Scope, connection: HTTPConnection, path: str) -> Response:
        error = Unauthenticated(
            "Say who you are."
            if "authorization" not in connection.headers
            else "This token is not known, or has ended.",
            hint="Make a token on the server: headway token create NAME --role viewer; send it as Authorization: Bearer TOKEN",
        )
        wants_page = scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and not is_for_programs(path)
        if not wants_page:
            return problems.answer(error)
        if self._access.users is not None:
            return self._on_error(scope, error)  # the application has a login of its own
        query = scope.get("query_string", b"").decode("latin-1")
        back = quote(path + (f"?{query}" if query else ""), safe="/")
        return RedirectResponse(f"{root_of(scope)}/login?next={back}", 303)


# ---------------------------------------------------------------------------------------------------------------------
# The request


def path_of(scope: Scope) -> str:
    """The path below where the application is mounted."""
    path, root = str(scope["path"]), root_of(scope)
    return path[len(root) :] or "/" if root and path.startswith(root) else path


def is_for_programs(path: str) -> bool:
    return path.startswith(("/api/", "/metrics"))


def root_of(scope: Scope) -> str:
    return str(scope.get("root_path", "")).rstrip("/")


def _is_encrypted(scope: Scope) -> bool:
    """Whether the browser came by TLS, also where a proxy ends it. A sender who says so falsely gets a cookie that is sent
    less often, and nothing else."""
    said = Headers(scope=scope).get("x-forwarded-proto", "")
    return scope.get("scheme") in ("https", "wss") or said.partition(",")[0].strip().lower() == "https"


def _check_source(connection: HTTPConnection, path: str) -> None:
    """Refuse what another site's page sent. Browsers say so in headers that no script can set."""
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


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _bearer(header: str | None) -> str | None:
    """The token of an Authorization header; an empty one for a header of another kind, which nobody knows."""
    if header is None:
        return None
    kind, _, text = header.partition(" ")
    return text.strip() if kind.lower() == "bearer" else ""


def _checked(user: object) -> User:
    """What the application's function gave, before it becomes part of questions that are asked for many people at once."""
    if not isinstance(user, User) or user.role not in RIGHTS:
        raise ConfigError(
            "The application's users function gave neither a headway.web.User with a known role nor None.",
            hint=f"Roles are {', '.join(RIGHTS)}.",
        )
    if not is_name(user.name):
        raise ConfigError(
            f"The application's users function gave a name that is no text of 1 to {NAME} printable characters.",
            hint="Use the text that submit(user_id=...) is given: User(str(account.id), role).",
        )
    return user


def _user_of(database: object, text: str) -> User | None:
    found = tokens.find(database, text)  # type: ignore[arg-type]  # a Database; it is passed through
    return None if found is None else found[0]


def _nothing(_: MutableHeaders) -> None:
    """An answer that needs no cookie."""


class _Answering:
    """Sends an answer with the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.dress: Callable[[MutableHeaders], None] = _nothing

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            self.begun = True
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
            if message["type"] == "http.response.start":
                headers.setdefault("Cache-Control", "no-store")
                self.dress(headers)
                metrics.count("headway_web_requests", status=f"{message['status'] // 100}xx")
        elif message["type"] == "websocket.close":
            self.begun = True
        await self._send(message)


def _bounded(scope: Scope, receive: Receive) -> Receive:
    """Refuse what is larger than any request of ours, before it is in memory, and what does not come to its end."""
    if scope["type"] != "http":
        return receive
    length = Headers(scope=scope).get("content-length", "0")
    error = TooLarge(f"A request may have {BODY:,} bytes.")
    if not length.isdecimal() or int(length) > BODY:
        raise error
    taken, end = 0, time.monotonic() + UPLOAD
    whole = False

    async def counted() -> Message:
        nonlocal taken, whole
        if whole:  # what comes now is that the other side went away
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise TooSlow(f"The request was not here within {UPLOAD:.0f} s.") from None
        whole = not message.get("more_body", False)
        taken += len(message.get("body", b"") or b"")
        if taken > BODY:
            raise error
        return message

    return counted

"""Who is asking, and what they are known by.

By a token or a ticket (``Authorization: Bearer``), by the application's own ``users`` function, by the session cookie of a
login; or the server is *open*, which it is while nobody ever made a token, and then only to this machine: the peer, the
``Host`` it names (a name that was pointed at us by DNS rebinding is another one) and the absence of a proxy's headers are
looked at.

While the store is away nothing is opened: who was known in the last minutes stays known, everybody else is told to wait.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, cookie_parser
from starlette.responses import Response

from headway.config import is_loopback
from headway.errors import ConfigError, StorageError, Unavailable
from headway.web import tickets, tokens
from headway.web.addresses import Network, peer_of
from headway.web.problems import Forbidden
from headway.web.site import NAME, RIGHTS, THREADS, Flash, User, is_name
from headway.web.throttle import REMEMBERED, Throttle

if TYPE_CHECKING:
    from starlette.types import Scope

    from headway.web.site import Site

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

_OF_PROXIES: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


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
            (client is None or is_loopback(str(client[0])))
            and connection.scope.get("http_version") != "1.0"  # that is nginx, which says nothing else of itself
            and not any(name in headers for name in _OF_PROXIES)
            and self.is_ours(headers.get("host", ""))
        )

    def is_ours(self, host: str) -> bool:
        name = _name_of(host)
        return name in self.hosts or name == "localhost" or name.endswith(".localhost") or is_loopback(name)

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
        return self._sign("form", bound)[:32] if bound else ""  # 128 bits: a page carries it many times

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


def root_of(scope: Scope) -> str:
    return str(scope.get("root_path", "")).rstrip("/")


def _is_encrypted(scope: Scope) -> bool:
    """Whether the browser came by TLS, also where a proxy ends it. A sender who says so falsely gets a cookie that is sent
    less often, and nothing else."""
    said = Headers(scope=scope).get("x-forwarded-proto", "")
    return scope.get("scheme") in ("https", "wss") or said.partition(",")[0].strip().lower() == "https"


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


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

"""Who is asking, and what they are known by.

1. A token or a ticket of ours (``Authorization: Bearer``). A wrong one is refused and counted. An ``Authorization`` header of
   another kind (the application's own JWT, a proxy's Basic) says nothing to us and is ignored.
2. The application's own ``users`` function.
3. The session cookie of a login.

`headway serve` adds a token of its own (`headway.local_servers`), or with ``--no-auth`` lets everybody in. Nothing in a request
shows that it came from this machine: a proxy on this machine sends everybody's.

While the database is away nobody new is let in; whoever was known in the last minutes stays known.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, cookie_parser
from starlette.responses import Response

from headway.config import is_loopback
from headway.errors import ConfigError, StorageError, Unavailable
from headway.ids import user_text
from headway.local_servers import LINK_PREFIX, link_id
from headway.web import tickets, tokens
from headway.web.addresses import Network, peer_of
from headway.web.problems import Forbidden
from headway.web.site import NAME, RIGHTS, THREADS, Flash, User, is_name
from headway.web.throttle import REMEMBERED, Throttle

if TYPE_CHECKING:
    from starlette.types import Scope

    from headway.local_servers import LocalServer
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

#: Whoever has the token of a local server, or is let in by ``--no-auth``.
LOCAL: Final = User("local", "admin")


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
    #: The server that serves this application, if it has a token of its own.
    local: LocalServer | None = None
    #: Everybody is admin (``headway serve --no-auth``).
    no_auth: bool = False
    _known: dict[str, tuple[float, User | None]] = field(default_factory=dict)
    _turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)
    _pulse: tuple[float, tokens.Pulse | None] = (-STALE, None)
    _away_until: float = 0.0
    _installation: str = ""

    async def who(self, connection: HTTPConnection, *, again: bool = False) -> Known | None:
        """Return who sends a request. ``again``: it was admitted before, so it spends no ticket and is not counted."""
        await self.pulse()
        bearer = _bearer(connection.headers.get("authorization"))
        if bearer is not None:
            user = await self._by_bearer(bearer, self.peer(connection), again=again)
            return None if user is None else Known(user, "token")
        if self.users is not None:
            found = self.users(connection)
            user = await found if inspect.isawaitable(found) else found
            if user is not None:
                return Known(_checked(user), "users")
        user = await self.session_user(connection)
        if user is not None:
            return Known(user, "session")
        # The name is checked because of DNS rebinding: a page of another site, whose name was pointed at this machine.
        if self.no_auth and self.is_ours(connection.headers.get("host", "")):
            return Known(LOCAL, "open")
        return None

    async def session_user(self, connection: HTTPConnection) -> User | None:
        cookie = self.cookie(connection, "session")
        return await self._ask("s" + tokens.hashed(cookie), tokens.find_session, cookie) if cookie else None

    async def _by_bearer(self, text: str, peer: str, *, again: bool) -> User | None:
        if self.local is not None and hmac.compare_digest(self.local.token.encode(), text.encode("utf-8", "replace")):
            return LOCAL
        if text.startswith(tickets.PREFIX):
            ticket = self.ticket(text, peer, again=again)
            spent = ticket is not None and (again or await self._spend(ticket))
            return ticket.user if ticket is not None and spent else None
        return await self._by_token(text, peer, again=again)

    def peer(self, connection: HTTPConnection) -> str:
        """The address whose wrong tokens are counted; nothing else is decided by it."""
        return peer_of(connection.scope, self.proxies)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.site.settings.texts("web_keys")

    def ticket(self, text: str, peer: str, *, again: bool = False) -> tickets.Ticket | None:
        """Return what a ticket or the ticket of a local link says; None if it is invalid or has expired."""
        if text.startswith(LINK_PREFIX) and self.local is not None:
            id = link_id(self.local.token, text)
            return None if id is None else tickets.Ticket(id, LOCAL)
        found = tickets.read(self.keys, text, audience=self.site.settings.text("web_audience"))
        if found is None and not again and not tickets.is_signed(self.keys, text):  # one that expired is not a guess
            self.throttle.check(peer)
            self.throttle.failed(peer)
        return found

    async def enter(self, ticket: tickets.Ticket) -> str | None:
        """Open a session by a ticket and return its cookie; None if the ticket was used before."""
        return await self.site.change(lambda: tokens.open_visit(self.site.reader.database, *ticket))

    async def _spend(self, ticket: tickets.Ticket) -> bool:
        return await self.site.change(lambda: tokens.spend(self.site.reader.database, *ticket))

    async def _by_token(self, text: str, peer: str, *, again: bool) -> User | None:
        name = "t" + tokens.hashed(text)
        if again or name in self._known:  # one that was right before is not kept waiting by another's guesses
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

    def is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine."""
        name = _name_of(host)
        return name in self.hosts or name == "localhost" or name.endswith(".localhost") or is_loopback(name)

    # ---- cookies -----------------------------------------------------------------------------------------------------

    def name(self, kind: str) -> str:
        """Cookies of one machine are the same for all ports: each installation has names of its own."""
        return f"headway-{kind}-{self._installation}"

    def cookie(self, connection: HTTPConnection, kind: str) -> str:
        # Read as browsers write them: what another application of this host keeps in one, whatever it is, costs ours nothing.
        return cookie_parser(connection.headers.get("cookie", "")).get(self.name(kind), "")

    def set_cookie(
        self,
        response: Response,
        scope: Scope,
        kind: str,
        value: str,
        seconds: int | None,
        *,
        same_site: Literal["strict", "lax"] = "strict",
    ) -> None:
        response.set_cookie(
            self.name(kind), value, max_age=seconds, path=root_of(scope) or "/", httponly=True, samesite=same_site,
            secure=_is_encrypted(scope),
        )  # fmt: skip

    def set_session(self, response: Response, scope: Scope, user: User, cookie: str) -> None:
        """Set the cookie of a session, and one that says whose it is.

        A browser withholds the session cookie when another site leads to us. The second one is sent then, and opens
        nothing: by it `replaces_another` notices that the other site would exchange the session.
        """
        self.set_cookie(response, scope, "session", cookie, int(tokens.SESSION))
        self.set_cookie(response, scope, "who", self._who(user), int(tokens.SESSION), same_site="lax")

    def clear_session(self, response: Response, scope: Scope) -> None:
        self.set_cookie(response, scope, "session", "", 0)
        self.set_cookie(response, scope, "who", "", 0, same_site="lax")

    async def replaces_another(self, connection: HTTPConnection, user: User) -> bool:
        """Return whether the browser has a session of somebody else than ``user``."""
        if self.cookie(connection, "session"):
            return await self.session_user(connection) not in (None, user)
        who = self.cookie(connection, "who")
        return bool(who) and not hmac.compare_digest(who.encode("utf-8", "replace"), self._who(user).encode())

    def _who(self, user: User) -> str:
        return self._sign("who", f"{user.role}:{user.name}")[:32]

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
    """Return the token or ticket of an Authorization header; None if there is none, or it is not one of ours."""
    kind, _, text = (header or "").partition(" ")
    text = text.strip()
    return text if kind.lower() == "bearer" and text.startswith((tokens.PREFIX, tickets.PREFIX)) else None


def _checked(user: object) -> User:
    """What the application's function gave, before it becomes part of questions that are asked for many people at once."""
    if not isinstance(user, User) or user.role not in RIGHTS:
        raise ConfigError(
            "The application's users function gave neither a headway.web.User with a known role nor None.",
            hint=f"Roles are {', '.join(RIGHTS)}.",
        )
    name = user_text(user.name)
    if not isinstance(name, str) or not is_name(name):
        raise ConfigError(
            f"The application's users function returned a name that is not a text of 1 to {NAME} printable characters.",
            hint="Use what submit(user_id=...) is given: User(account.id, role).",
        )
    return user if name is user.name else replace(user, name=name)


def _user_of(database: object, text: str) -> User | None:
    found = tokens.find(database, text)  # type: ignore[arg-type]  # a Database; it is passed through
    return None if found is None else found[0]

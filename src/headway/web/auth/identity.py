"""Authentication: which user sends a request.

These are tried in order:

1. A token or ticket of ours (``Authorization: Bearer``). An invalid one is refused and counted. An ``Authorization``
   header of another kind (the application's own JWT, a proxy's Basic) is ignored.
2. The application's own ``users`` function.
3. The session cookie of a login.

`headway serve` adds a token of its own (`headway.local_servers`), or with ``--no-auth`` admits everyone. A request
from this machine is not trusted for that: a proxy on this machine forwards the requests of everyone.

While the database is unreachable, no new user is admitted. Users that were authenticated in the last minutes stay so.
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
from headway.core.ids import user_text
from headway.errors import ConfigError, StorageError, Unavailable
from headway.local_servers import LINK_PREFIX, link_id
from headway.web.api.problems import Forbidden
from headway.web.auth import tickets, tokens
from headway.web.auth.addresses import Network, peer_of
from headway.web.auth.throttle import REMEMBERED, Throttle
from headway.web.site import NAME, RIGHTS, THREADS, Flash, User, is_name

if TYPE_CHECKING:
    from starlette.types import Scope

    from headway.local_servers import LocalServer
    from headway.web.site import Site

T = TypeVar("T")

#: An application's own authentication: returns the user of a request, or None. It may be a coroutine function.
Users = Callable[[HTTPConnection], User | Awaitable[User | None] | None]

#: Seconds between checks for created or ended tokens and sessions. One statement serves all requests.
PULSE: Final = 2.0
#: Seconds that the store may take to look up a user.
ASK: Final = 2.0
#: Seconds that a cached user is valid while no token or session ended; and while the store is unreachable.
FRESH: Final = 30.0
STALE: Final = 600.0

#: The user of a local server's token, or of any request under ``--no-auth``.
LOCAL: Final = User("local", "admin")


@dataclass(frozen=True, slots=True)
class Known:
    """An authenticated user, and how the user was authenticated."""

    user: User
    by: str  # "token", "users", "session" or "open"


@dataclass(slots=True)
class Access:
    """Authenticates requests, and caches what the store said about tokens and sessions."""

    site: Site
    users: Users | None = None
    hosts: frozenset[str] = frozenset()
    proxies: tuple[Network, ...] = ()
    throttle: Throttle = field(default_factory=Throttle)
    key: bytes | None = None
    #: The local server that serves this application, if it has its own token.
    local: LocalServer | None = None
    #: Every request is made as admin (``headway serve --no-auth``).
    no_auth: bool = False
    _known: dict[str, tuple[float, User | None]] = field(default_factory=dict)
    _turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(default_factory=WeakKeyDictionary)
    _pulse: tuple[float, tokens.Pulse | None] = (-STALE, None)
    _away_until: float = 0.0
    _installation: str = ""

    async def who(self, connection: HTTPConnection, *, again: bool = False) -> Known | None:
        """Return the user that sends a request; None if it is not authenticated.

        With ``again`` the request was admitted before: it spends no ticket, and a wrong token is not counted.
        """
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
        # Checking the name prevents DNS rebinding: another site could point its own name at this machine.
        if self.no_auth and self.is_ours(connection.headers.get("host", "")):
            return Known(LOCAL, "open")
        return None

    async def session_user(self, connection: HTTPConnection) -> User | None:
        """Return the user of the session cookie; None without a valid session."""
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
        """Return the client address. It is used only to count wrong tokens."""
        return peer_of(connection.scope, self.proxies)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.site.settings.texts("web_keys")

    def ticket(self, text: str, peer: str, *, again: bool = False) -> tickets.Ticket | None:
        """Verify a ticket, or the ticket in a local link; None if it is invalid or has expired."""
        if text.startswith(LINK_PREFIX) and self.local is not None:
            id = link_id(self.local.token, text)
            return None if id is None else tickets.Ticket(id, LOCAL)
        found = tickets.read(self.keys, text, audience=self.site.settings.text("web_audience"))
        if found is None and not again and not tickets.is_signed(self.keys, text):  # an expired ticket is not a guess
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
        if again or name in self._known:  # a known token is not delayed by wrong guesses from its address
            return await self._ask(name, _user_of, text)
        async with self.throttle.trying(peer):
            user = await self._ask(name, _user_of, text)
            if user is None:
                self.throttle.failed(peer)
        return user

    async def pulse(self) -> tokens.Pulse:
        """Read how many tokens and sessions were created and ended.

        When one has ended, all cached users are looked up again.
        """
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
            # Mark the entries stale instead of deleting them: they are still used while the store is unreachable.
            known = self._known.items()
            self._known = {name: (min(since, time.monotonic() - FRESH), user) for name, (since, user) in known}
        self._pulse = (time.monotonic(), found)
        return found

    @property
    def seen(self) -> tokens.Pulse | None:
        """The pulse that was current when the latest requests were admitted."""
        return self._pulse[1]

    async def _read(self, question: Callable[..., T], *args: object) -> T:
        """Query the store with a short time limit.

        After a failure, calls fail at once for `PULSE` seconds. Requests that need no store are then not delayed by
        it.
        """
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
        """Log in with a token; return the user and the cookie of the new session."""
        async with self.throttle.trying(peer):
            found = await self.site.read(lambda: tokens.find(self.site.reader.database, text))
            if found is None:
                self.throttle.failed(peer)
                return None
        user, token = found
        cookie = await self.site.change(lambda: tokens.open_session(self.site.reader.database, token, user=user))
        return user, cookie

    async def log_out(self, cookie: str) -> None:
        """End the session of a cookie."""
        await self.site.change(lambda: tokens.close_session(self.site.reader.database, cookie))
        self._known.pop("s" + tokens.hashed(cookie), None)

    async def load(self) -> None:
        """Load the key that signs cookies and forms, once."""
        if self.key is None:
            # A method and not a lambda, because concurrent reads of one function share one answer.
            self.key = await self.site.read(self._signing_key)
            self._installation = tokens.hashed(self.key.hex())[:8]

    def _signing_key(self) -> bytes:
        return tokens.signing_key(self.site.reader.database)

    async def _ask(self, name: str, function: Callable[..., User | None], *args: str) -> User | None:
        """Look up a user through the cache.

        At most `THREADS` lookups run at once and the rest queue here. After a restart a thousand pages reconnect
        together, and none of them may be refused because too many requests wait.
        """
        at, found = self._known.get(name, (-STALE, None))
        if time.monotonic() - at < FRESH:
            return found
        async with self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(THREADS)):
            at, found = self._known.get(name, (-STALE, None))
            if time.monotonic() - at < FRESH:
                return found  # another request looked it up meanwhile
            try:
                found = await self._read(self._find, function, *args)
            except (Unavailable, StorageError):
                if time.monotonic() - at < STALE:
                    return found
                raise
            while len(self._known) >= REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known.pop(name, None)
            if found is not None:  # invalid tokens are not cached: they must not take memory
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
        """Return the name of a cookie of this installation.

        Browsers share the cookies of a host between its ports, so each installation needs different names.
        """
        return f"headway-{kind}-{self._installation}"

    def cookie(self, connection: HTTPConnection, kind: str) -> str:
        """Return the value of one of our cookies; empty if it is not set."""
        # Parsed leniently, as browsers do: a malformed cookie of another application on this host must not hide ours.
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
        """Set one of our cookies for ``seconds``; None: until the browser is closed."""
        response.set_cookie(
            self.name(kind), value, max_age=seconds, path=root_of(scope) or "/", httponly=True, samesite=same_site,
            secure=_is_encrypted(scope),
        )  # fmt: skip

    def set_session(self, response: Response, scope: Scope, user: User, cookie: str) -> None:
        """Set the session cookie and a second cookie that identifies its user.

        A browser withholds the strict session cookie when another site leads to us. It still sends the second one,
        which grants no access. With it `replaces_another` notices that the other site would replace the session.
        """
        self.set_cookie(response, scope, "session", cookie, int(tokens.SESSION))
        self.set_cookie(response, scope, "who", self._who(user), int(tokens.SESSION), same_site="lax")

    def clear_session(self, response: Response, scope: Scope) -> None:
        """Delete the cookies of a session."""
        self.set_cookie(response, scope, "session", "", 0)
        self.set_cookie(response, scope, "who", "", 0, same_site="lax")

    async def replaces_another(self, connection: HTTPConnection, user: User) -> bool:
        """Return whether the browser has a session of a user other than ``user``."""
        if self.cookie(connection, "session"):
            return await self.session_user(connection) not in (None, user)
        who = self.cookie(connection, "who")
        return bool(who) and not hmac.compare_digest(who.encode("utf-8", "replace"), self._who(user).encode())

    def _who(self, user: User) -> str:
        return self._sign("who", f"{user.role}:{user.name}")[:32]

    def form_token(self, connection: HTTPConnection, visitor: str) -> str:
        """Return the CSRF token of our forms.

        It is bound to the session, or before a login to the visitor's cookie.
        """
        bound = self.cookie(connection, "session") or visitor
        return self._sign("form", bound)[:32] if bound else ""  # 128 bits are enough, and a page contains it many times

    def check_form(self, connection: HTTPConnection, given: str) -> None:
        """Raise `Forbidden` unless ``given`` is the CSRF token of this request."""
        expected = str(connection.scope.get("headway.csrf", ""))
        if not expected or not hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace")):
            raise Forbidden("The form is not from this page, or too old.", hint="Load the page again and repeat it.")

    def flash(self, kind: str, text: str) -> str:
        """Encode and sign a message for the flash cookie."""
        body = (
            base64.urlsafe_b64encode(json.dumps([kind, text[:500]], ensure_ascii=False).encode("utf-8", "replace"))
            .decode()
            .rstrip("=")
        )
        return f"{body}.{self._sign('flash', body)}"

    def read_flash(self, cookie: str) -> Flash | None:
        """Decode a flash cookie; None if its signature is wrong."""
        body, _, signature = cookie.partition(".")
        if not body or not hmac.compare_digest(self._sign("flash", body).encode(), signature.encode()):
            return None
        kind, text = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return Flash("failed" if kind == "failed" else "done", str(text))

    def _sign(self, purpose: str, text: str) -> str:
        assert self.key is not None
        return hmac.new(self.key, f"{purpose}:{text}".encode("utf-8", "replace"), "sha256").hexdigest()


def root_of(scope: Scope) -> str:
    """Return the path under which the application is mounted."""
    return str(scope.get("root_path", "")).rstrip("/")


def _is_encrypted(scope: Scope) -> bool:
    """Return whether the browser uses TLS, also if a proxy terminates it.

    A client that forges the header only gets a cookie that its browser sends less often.
    """
    said = Headers(scope=scope).get("x-forwarded-proto", "")
    return scope.get("scheme") in ("https", "wss") or said.partition(",")[0].strip().lower() == "https"


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _bearer(header: str | None) -> str | None:
    """Return the token or ticket of an Authorization header; None if it has none of ours."""
    kind, _, text = (header or "").partition(" ")
    text = text.strip()
    return text if kind.lower() == "bearer" and text.startswith((tokens.PREFIX, tickets.PREFIX)) else None


def _checked(user: object) -> User:
    """Validate the user that the application's function returned.

    Its name becomes part of queries that cover many users at once.
    """
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
    found = tokens.find(database, text)  # type: ignore[arg-type]  # a Database, passed through unchanged
    return None if found is None else found[0]

"""The stores, users and thread pools that all pages and routes share.

    async def jobs(request):
        found = await site.read(site.reader.jobs)                    # a view; runs in a bounded thread pool
        runs = await site.read(lambda: my_view(site.reader.ledger))  # any function over the open store
        user = site.user(request)                                    # user.name, user.role, user.may("retry")
        ...
        form: <input type="hidden" name="csrf" value="{{ site.csrf(request) }}">  posts to site.url(request, "/actions/retry")

The first read opens the stores, in its thread. The server therefore starts, and reports an outage, without them.

**Live.** A page opens a WebSocket at `Site.live` (``?since=SEQ`` resumes after a reconnect). It receives two kinds of messages:

    {"seq": "k3f9.17", "at": "2026-11-16T15:00:00.000Z", "full":  {"jobs": {"ads": {...}}, "queues": {"low": {...}}, ...}}
    {"seq": "k3f9.18", "at": "...",                      "delta": {"jobs": {"ads": {...}, "old": null}}}

A section (``jobs queues workers causes tasks store``) maps an id to a complete view, as in the API. In a delta, ``null``
removes the entry. ``seq`` is opaque; a client sends it back as ``since``. A message is sent at least every 2 s, with an
empty delta if nothing changed. During an outage the section ``store`` has the entry ``{"database": {"error": "..."}}``, and
the other sections keep their last known content. A user with the role ``user`` receives only ``tasks`` and ``store``. With
``?states=JOB`` the sections are ``states`` (``JOB/TASK/TAG`` to the state, without its payload) and ``store``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from headway.errors import HeadwayError, Unavailable
from headway.telemetry import metrics

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from headway.config import Config
    from headway.views.reading import Reader

T = TypeVar("T")

Role = Literal["viewer", "operator", "admin", "user"]

#: Concurrent reads, and the maximum queue of reads. Further reads are refused, which bounds the wait.
THREADS: Final = 8
WAITING: Final = 256
#: Concurrent changes. They have a separate pool: changes wait while another process locks the store, reads must not.
CHANGES: Final = 4
#: Timeout in seconds for an answer, and for a change to start. The call has its own limit and keeps its thread until then.
PATIENCE: Final = 15.0
#: Seconds for which `Site.view` shares an answer while more tasks wait than the setting ``web_backlog``.
SHARED: Final = 2.0

#: Rights by role. The role ``user`` is for an application's users, who see only their own tasks.
RIGHTS: Final[dict[Role, frozenset[str]]] = {
    "user": frozenset({"own", "cancel"}),
    "viewer": frozenset({"own", "read"}),
    "operator": frozenset({"own", "read", "payload", "retry", "cancel", "pause", "resume", "worker", "run", "alert"}),
    "admin": frozenset(
        {
            "own",
            "read",
            "payload",
            "retry",
            "cancel",
            "pause",
            "resume",
            "worker",
            "run",
            "alert",
            "forget",
            "export",
            "token",
        }
    ),
}


#: Maximum length of a user's name, in characters.
NAME: Final = 500


def is_name(name: object) -> bool:
    """Return whether ``name`` can be part of a query that covers many users."""
    return type(name) is str and 0 < len(name) <= NAME and name.isprintable()


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user."""

    name: str
    role: Role

    def may(self, action: str) -> bool:
        """Return whether the role has a right (see `RIGHTS`)."""
        return action in RIGHTS[self.role]

    @property
    def owner(self) -> str | None:
        """The user id whose tasks this user may see; None: all tasks."""
        return self.name if self.role == "user" else None


@dataclass(frozen=True, slots=True)
class Flash:
    """The result of an action, shown once on the next page."""

    kind: Literal["done", "failed"]
    text: str


class _Pool:
    """A thread pool with a bounded queue."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._under_way, self._room = 0, threads + WAITING

    def start(self, function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any]) -> Future[T]:
        """Run ``function`` in a thread. Raises `Unavailable` when the queue is full."""
        if self._under_way >= self._room:
            raise Unavailable("The server is overloaded.", hint="Try again in a moment.")
        self._under_way += 1
        began = time.perf_counter()

        def call() -> T:
            metrics.observe("headway_web_wait_seconds", time.perf_counter() - began)
            return function(*args, **options)

        return self._pool.submit(call)

    def over(self, done: asyncio.Future[Any]) -> None:
        """Count a call as finished. The event loop calls it."""
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # retrieved, or asyncio warns when the waiting request has gone

    def close(self) -> None:
        """Cancel queued calls. Running calls end at their own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _identity(function: Callable[..., Any]) -> Hashable:
    """Return a key that is equal for closures of the same code over the same values."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if (
        code is None
        or not cells
        or getattr(function, "__defaults__", None)
        or getattr(function, "__kwdefaults__", None)
    ):
        return function
    return (code, tuple(cell.cell_contents for cell in cells))


@dataclass(frozen=True, eq=False)
class Site:
    """The stores and limits of one application. `headway.web.app` creates it."""

    database: str
    redis: str | None
    settings: Config
    reader: Reader
    live: str = "/api/v1/live"
    _reading: _Pool = field(default_factory=lambda: _Pool(THREADS, "headway-web"), repr=False)
    _changing: _Pool = field(default_factory=lambda: _Pool(CHANGES, "headway-change"), repr=False)
    _under_way: dict[Hashable, asyncio.Future[Any]] = field(default_factory=dict, repr=False)
    _changes: list[int] = field(default_factory=lambda: [0], repr=False)  # one number: changes so far
    #: query -> (time until which its answer is shared, answer), oldest first
    _answers: dict[Hashable, tuple[float, Any]] = field(default_factory=dict, repr=False)
    _load: dict[str, float] = field(default_factory=dict, repr=False)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def read(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call ``function`` in a thread. Raises `Unavailable` after `PATIENCE` seconds.

        Equal concurrent calls share one answer. A call that starts after a change through this process is never
        answered with data from before it.
        """
        key = self._key(function, args, options)
        waiting = self._under_way.get(key) if key is not None else None
        if waiting is None:
            waiting = asyncio.wrap_future(self._reading.start(function, args, options))
            waiting.add_done_callback(self._reading.over)
            if key is not None:
                self._under_way[key] = waiting
                waiting.add_done_callback(lambda _: self._under_way.pop(key, None))
        try:
            # Shielded, because other requests may wait for the same answer.
            found: T = await asyncio.wait_for(asyncio.shield(waiting), PATIENCE)
        except TimeoutError:
            raise Unavailable(
                f"The store did not answer within {PATIENCE:.0f} s.", hint="Try again, or check it: headway doctor"
            ) from None
        return found

    async def view(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Read like `read`, but under load at most once per `SHARED` seconds.

        Under load means that more tasks wait than the setting ``web_backlog``. The database then serves workers first.
        A change through this process ends the sharing early.
        """
        key = self._key(function, args, options)
        now = time.monotonic()
        if key is not None:
            until, answer = self._answers.get(key, (0.0, None))
            if now < until:
                return cast("T", answer)
        found = await self.read(function, *args, **options)
        if key is not None and await self._is_loaded():
            while self._answers and (len(self._answers) >= WAITING or next(iter(self._answers.values()))[0] <= now):
                del self._answers[next(iter(self._answers))]
            self._answers.pop(key, None)
            self._answers[key] = (time.monotonic() + SHARED, found)
        return found

    async def _is_loaded(self) -> bool:
        """Return whether more tasks wait than ``web_backlog``, as counted within the last `SHARED` seconds."""
        most = self.settings["web_backlog"]
        if most is None:
            return False
        now = time.monotonic()
        if now >= self._load.get("until", 0.0):
            self._load["until"] = now + SHARED
            try:
                self._load["loaded"] = await self.read(self.reader.has_backlog, most)
            except HeadwayError:
                self._load["loaded"] = False
        return bool(self._load.get("loaded"))

    async def change(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a ``function`` that changes something; it is never shared.

        A change that does not start within `PATIENCE` seconds is cancelled. A change that started is awaited.
        """
        call = self._changing.start(function, args, options)
        waiting = asyncio.wrap_future(call)
        waiting.add_done_callback(self._changing.over)
        try:
            done, _ = await asyncio.wait((waiting,), timeout=PATIENCE)
            if not done and call.cancel():
                raise Unavailable(
                    f"The change did not start within {PATIENCE:.0f} s. Nothing was changed.",
                    hint="Try again, or check the store: headway doctor",
                )
            return await asyncio.shield(waiting)
        finally:
            self._changes[0] += 1

    def _key(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Hashable | None:
        key = (asyncio.get_running_loop(), self._changes[0], _identity(function), args, tuple(sorted(options.items())))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    # ---- the request -------------------------------------------------------------------------------------------------

    def user(self, request: HTTPConnection) -> User:
        """Return the authenticated user. The gate sets it before any route runs."""
        user = request.scope["headway.user"]
        assert isinstance(user, User)
        return user

    def csrf(self, request: HTTPConnection) -> str:
        """Return the CSRF token: the form field ``csrf``, or for a script the header ``X-CSRF-Token``."""
        return str(request.scope["headway.csrf"])

    def flash(self, request: HTTPConnection) -> Flash | None:
        """Return the result of the preceding action, if there was one."""
        found = request.scope.get("headway.flash")
        return found if isinstance(found, Flash) else None

    def url(self, request: HTTPConnection, path: str) -> str:
        """Prefix ``path`` with the path under which the application is mounted."""
        return str(request.scope.get("root_path", "")).rstrip("/") + path

    def close(self) -> None:
        """Close the pools and the stores."""
        self._reading.close()
        self._changing.close()
        self.reader.close()

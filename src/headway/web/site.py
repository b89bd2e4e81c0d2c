"""What every page and every route stands on: the stores, who is asking, and a way to read without blocking the loop.

    async def jobs(request):
        found = await site.read(site.reader.jobs)                    # a view; runs in a thread, bounded
        runs = await site.read(lambda: my_view(site.reader.ledger))  # a function of one's own over the open store
        user = site.user(request)                                    # user.name, user.role, user.may("retry")
        ...
        form: <input type="hidden" name="csrf" value="{{ site.csrf(request) }}">  posts to site.url(request, "/actions/retry")

The stores are opened by the first read, in its thread: the server starts, and says that they are away, without them.

**Live.** A page opens a WebSocket at `Site.live` (``?since=SEQ`` to go on where it was) and is sent messages of two kinds:

    {"seq": "k3f9.17", "at": "2026-11-16T15:00:00.000Z", "full":  {"jobs": {"ads": {...}}, "queues": {"low": {...}}, ...}}
    {"seq": "k3f9.18", "at": "...",                      "delta": {"jobs": {"ads": {...}, "old": null}}}

A section (``jobs queues workers causes tasks store``) maps an id to a whole view, as the API has it. In a delta ``null``
means that the entry is gone. ``seq`` is opaque: say it back. A message comes at least every 2 s, with an empty delta if
nothing changed. While the store is away, ``store`` has the entry ``{"database": {"error": "..."}}`` and the rest stays as it
was last known. A person who may see their own tasks only gets the section ``tasks`` alone. With ``?states=JOB`` the sections
are ``states`` (``JOB/TASK/TAG`` to the state, without its payload) and ``store``.
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

#: Questions to the stores at once, and those that may wait for their turn; more are refused, so that none waits for long.
THREADS: Final = 8
WAITING: Final = 256
#: Changes at once. They have threads of their own: while somebody else keeps the store locked, all of them wait for it, and
#: who only looks must not wait with them.
CHANGES: Final = 4
#: Seconds an answer may take, and a change until it begins. The call itself has a limit of its own, and keeps its thread
#: until then.
PATIENCE: Final = 15.0
#: Seconds for which an answer to `Site.view` is shared while more tasks wait than the setting ``web_backlog``.
SHARED: Final = 2.0

#: What a role may do. ``user`` is a person of an application: their own tasks, and nothing else.
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


#: Characters of a name that an application gives a user.
NAME: Final = 500


def is_name(name: object) -> bool:
    """Whether it can be part of a question that is asked for many people at once."""
    return type(name) is str and 0 < len(name) <= NAME and name.isprintable()


@dataclass(frozen=True, slots=True)
class User:
    """Who is asking."""

    name: str
    role: Role

    def may(self, action: str) -> bool:
        """Whether the role has the right: read, payload, retry, cancel, pause, resume, worker, run, forget, export,
        token."""
        return action in RIGHTS[self.role]

    @property
    def owner(self) -> str | None:
        """Whose tasks may be seen: only those of this user id, or with None everybody's."""
        return self.name if self.role == "user" else None


@dataclass(frozen=True, slots=True)
class Flash:
    """What an action did, told once on the page after it."""

    kind: Literal["done", "failed"]
    text: str


class _Desk:
    """Threads for one kind of call, and how many of these are under way."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._under_way, self._room = 0, threads + WAITING

    def start(self, function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any]) -> Future[T]:
        """Give it to a thread; refused when too many wait already."""
        if self._under_way >= self._room:
            raise Unavailable("The server has too much to do just now.", hint="Try again in a moment.")
        self._under_way += 1
        began = time.perf_counter()

        def call() -> T:
            metrics.observe("headway_web_wait_seconds", time.perf_counter() - began)
            return function(*args, **options)

        return self._pool.submit(call)

    def over(self, done: asyncio.Future[Any]) -> None:
        """On the loop, once it is known how it ended."""
        self._under_way -= 1
        if not done.cancelled():
            done.exception()  # seen: that nobody waits for it any more is no cause for a complaint

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _identity(function: Callable[..., Any]) -> Hashable:
    """Return what two functions have in common that were made by the same code over the same values."""
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
    """One application's stores and limits. It is made by `headway.web.app`."""

    database: str
    redis: str | None
    settings: Config
    reader: Reader
    live: str = "/api/v1/live"
    _reading: _Desk = field(default_factory=lambda: _Desk(THREADS, "headway-web"), repr=False)
    _changing: _Desk = field(default_factory=lambda: _Desk(CHANGES, "headway-change"), repr=False)
    _under_way: dict[Hashable, asyncio.Future[Any]] = field(default_factory=dict, repr=False)
    _changes: list[int] = field(default_factory=lambda: [0], repr=False)  # how many were made so far
    #: question -> (time until which it is shared, answer), the oldest first
    _answers: dict[Hashable, tuple[float, Any]] = field(default_factory=dict, repr=False)
    _load: dict[str, float] = field(default_factory=dict, repr=False)

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def read(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """``function(*args, **options)`` in a thread. The same question asked again meanwhile shares the first one's answer,
        unless something was changed through this process in between: then it may be older than that change."""
        key = self._key(function, args, options)
        waiting = self._under_way.get(key) if key is not None else None
        if waiting is None:
            waiting = asyncio.wrap_future(self._reading.start(function, args, options))
            waiting.add_done_callback(self._reading.over)
            if key is not None:
                self._under_way[key] = waiting
                waiting.add_done_callback(lambda _: self._under_way.pop(key, None))
        try:
            # Others may wait for it too: one who stops waiting must not take it from them.
            found: T = await asyncio.wait_for(asyncio.shield(waiting), PATIENCE)
        except TimeoutError:
            raise Unavailable(
                f"The store did not answer within {PATIENCE:.0f} s.", hint="Try again; see how it is: headway doctor"
            ) from None
        return found

    async def view(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Read for a person or program that administers: as `read`, but at most once per `SHARED` seconds under load.

        Under load means that more tasks wait than the setting ``web_backlog``. Then the database serves workers first: an
        answer is shared until it is `SHARED` seconds old or something was changed through this process.
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
        """The same for a call that changes something. It is never shared, and what is read after it is not older than it.
        One that does not begin in time is not made at all; one that began is waited for."""
        asked = self._changing.start(function, args, options)
        waiting = asyncio.wrap_future(asked)
        waiting.add_done_callback(self._changing.over)
        try:
            done, _ = await asyncio.wait((waiting,), timeout=PATIENCE)
            if not done and asked.cancel():
                raise Unavailable(
                    f"The change did not begin within {PATIENCE:.0f} s. Nothing was changed.",
                    hint="Try again; see how the store is: headway doctor",
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
        """Who is asking. No route is reached without it."""
        user = request.scope["headway.user"]
        assert isinstance(user, User)
        return user

    def csrf(self, request: HTTPConnection) -> str:
        """What a form sends back in its field ``csrf`` (a script: in the header ``X-CSRF-Token``)."""
        return str(request.scope["headway.csrf"])

    def flash(self, request: HTTPConnection) -> Flash | None:
        """What the action before this page did; told once."""
        found = request.scope.get("headway.flash")
        return found if isinstance(found, Flash) else None

    def url(self, request: HTTPConnection, path: str) -> str:
        """A path of this application, wherever it is mounted."""
        return str(request.scope.get("root_path", "")).rstrip("/") + path

    def close(self) -> None:
        self._reading.close()
        self._changing.close()
        self.reader.close()

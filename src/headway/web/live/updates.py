"""The live path: a publisher that sends changes to every open page once a second.

One publisher per process polls the stores while pages are connected. `Look` bounds the statements per poll, regardless of
the number of pages. The difference to the previous poll is a delta, encoded once for all connections. A connection has no
queue: it remembers the sequence number of its last message. When it is ready for more, it gets the changes since then, or a
full snapshot. A slow reader therefore skips to the latest state, needs no memory and delays no other connection.

A sequence number is valid within one epoch of its channel (`Channel.epoch`). The shared channel lives as long as the
process, a user's channel as long as one of their pages is open. After a reconnect ``since`` gets the changes if the channel
still has them, else a full snapshot.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from headway.errors import HeadwayError, Unavailable
from headway.telemetry import Log, error_message, metrics, redact
from headway.views.jobs.job import cause_view, read_speeds
from headway.views.jobs.listing import job_view
from headway.views.jobs.speed import Speed
from headway.views.queue import queue_views, read_workers, task_view
from headway.views.shape import Json, iso, plain
from headway.web.api import problems
from headway.web.live.monitor import Monitor, check_job

if TYPE_CHECKING:
    from headway.ledger.values import JobInfo
    from headway.views.jobs.series import Series
    from headway.views.reading import Reader
    from headway.web.auth.identity import Access
    from headway.web.auth.tokens import Pulse
    from headway.web.site import Site, User

log = Log("web")

#: Seconds between polls; maximum seconds between messages; poll timeout, after which the store is reported unreachable.
TICK: Final = 1.0
BEAT: Final = 2.0
LOOK: Final = 3.0
#: Seconds for the final message to be sent before connections are closed.
FAREWELL: Final = 0.1
#: Deltas that a channel keeps for reconnects.
KEPT: Final = 120
#: Maximum connections of a process.
MOST: Final = 5_000
MANY: Final = "Too many live connections are open."
#: Maximum jobs and tasks per snapshot, and jobs whose causes are read again in one poll.
JOBS: Final = 100
TASKS: Final = 100
CAUSES: Final = 3
#: Seconds for which a task that has changed stays in the snapshot.
WINDOW: Final = 60.0
#: Seconds after which a connection's user is authenticated again, even if no token or session changed.
RECHECK: Final = 300.0
#: Concurrent authentication checks of connections. It leaves threads for requests.
ASKING: Final = 4
#: Maximum jobs whose states are followed at once.
WATCHED: Final = 20
#: Maximum connections of one application user.
EACH: Final = 50

Sections = dict[str, dict[str, Any]]


@dataclass(slots=True)
class Look:
    """Reads the content of a snapshot. It caches the causes of unchanged jobs."""

    reader: Reader
    _causes: dict[str, tuple[tuple[int, int], dict[str, Json]]] = field(default_factory=dict)

    def __call__(self, *, everybody: bool, users: tuple[str, ...]) -> tuple[Sections, dict[str, Sections]]:
        """Return the sections for administrators, and those of each of ``users``."""
        from headway.queue.store import tasks as records

        began = time.perf_counter()
        database = self.reader.database
        sections: Sections = {"store": {"database": {"error": None}}}
        if everybody:
            jobs = self._jobs()
            speeds = read_speeds(database, jobs)
            sections["jobs"] = {info.id: _job(info, speeds.get(info.no)) for info in jobs}
            sections["causes"] = self._dead(jobs)
            sections["queues"] = {view.queue: plain(view) for view in queue_views(self.reader.queue)}
            sections["workers"] = {view.name: plain(view) for view in read_workers(self.reader.queue).workers}
        with database.read() as tx:
            stirring = records.astir(tx, since=tx.now() - WINDOW, limit=TASKS) if everybody else []
            own = records.newest_of(tx, users)
        if everybody:
            sections["tasks"] = {task.id: plain(task_view(task)) for task in stirring}
        theirs: dict[str, Sections] = {user: {"store": sections["store"], "tasks": {}} for user in users}
        for task in own:
            theirs[str(task.user_id)]["tasks"][task.id] = plain(task_view(task))
        metrics.observe("headway_web_snapshot_seconds", time.perf_counter() - began)
        return sections, theirs

    def _jobs(self) -> list[JobInfo]:
        from headway.ledger.store.report import find_jobs

        where = "WHERE archived = 0 ORDER BY CASE WHEN holder IS NULL THEN 1 ELSE 0 END, updated_at DESC LIMIT ?"
        found = find_jobs(self.reader.database, where, (JOBS,))
        ids = {info.id for info in found}
        for id in [id for id in self._causes if id not in ids]:
            del self._causes[id]
        return found

    def _dead(self, jobs: list[JobInfo]) -> dict[str, Json]:
        """Return the causes of dead letters. Each poll reads at most `CAUSES` jobs whose counts have changed."""
        from headway.ledger.job import Job

        changed = [info for info in jobs if self._causes.get(info.id, ((0, 0), {}))[0] != (info.dead, info.failures)]
        for info in changed[:CAUSES]:
            causes = Job(self.reader.database, info.no, info.id).causes() if info.dead else []
            views = {f"{info.id}/{one.no}": plain(cause_view(one)._replace(job=info.id)) for one in causes if one.dead}
            self._causes[info.id] = ((info.dead, info.failures), views)
        return {key: view for _, views in self._causes.values() for key, view in views.items()}


def _job(info: JobInfo, found: tuple[Series, Speed] | None) -> Json:
    """Return a job's view with its current rate and the seconds left, as its page defines them."""
    speed = found[1] if found else Speed()
    return {
        **plain(job_view(info)),
        "rate": None if speed.rate is None else round(speed.rate, 3),
        "eta_seconds": None if speed.forecast is None else round(speed.forecast.likely, 1),
    }


class Channel:
    """The content that a group of connections receives, with its latest deltas."""

    def __init__(self, epoch: str | None = None) -> None:
        self.epoch, self.number = epoch or secrets.token_hex(4), 0
        self.listeners = 0
        self._at = ""
        self._sections: Sections = {}
        self._deltas: deque[Sections] = deque(maxlen=KEPT)
        self._texts: dict[int | None, str] = {}
        self._changed = asyncio.Event()
        self._said = 0.0

    def publish(self, sections: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace these sections; others keep their content."""
        delta = {}
        for name, entries in sections.items():
            before = self._sections.get(name, {})
            changes = {key: view for key, view in entries.items() if before.get(key) != view}
            changes.update(dict.fromkeys(before.keys() - entries.keys()))
            if changes:
                delta[name] = changes
            self._sections[name] = dict(entries)
        now = time.monotonic()
        if delta or now - self._said >= BEAT - TICK / 2:
            self._said, self._at = now, iso(datetime.now(UTC)) or ""
            self.number += 1
            self._deltas.append(delta)
            self._texts.clear()
            self._changed.set()
            self._changed = asyncio.Event()

    def since(self, number: int | None) -> tuple[int, str]:
        """Return the current number and the message that leads to it from ``number``; None: a full snapshot.

        Each message is encoded once for all connections.
        """
        if number is not None and not self.number - len(self._deltas) <= number <= self.number:
            number = None
        text = self._texts.get(number)
        if text is None:
            head = {"seq": f"{self.epoch}.{self.number}", "at": self._at}
            content = {"full": self._sections} if number is None else {"delta": self._merged(number)}
            text = self._texts[number] = json.dumps({**head, **content}, separators=(",", ":"))
        return self.number, text

    def _merged(self, number: int) -> Sections:
        merged: Sections = {}
        missed = self.number - number
        for delta in list(self._deltas)[len(self._deltas) - missed :]:
            for name, changes in delta.items():
                merged.setdefault(name, {}).update(changes)
        return merged

    @property
    def is_current(self) -> bool:
        """Whether the content was published since the channel has listeners."""
        return self._said > 0

    def rest(self) -> None:
        """Mark the content as outdated, because polling stops without listeners."""
        self._said = 0.0

    async def news(self, number: int) -> None:
        """Wait for a message after ``number``."""
        while self.number <= number:
            await self._changed.wait()

    def number_of(self, seq: str) -> int | None:
        """Parse a client's ``seq``; None if it is from another epoch or malformed."""
        epoch, _, text = seq.partition(".")
        if epoch != self.epoch or not text.isdecimal() or len(text) > 15:
            return None
        number = int(text)
        return number if number <= self.number else None


class Watched:
    """The channel with the states of one job, and the task that fills it."""

    def __init__(self, store: str, job: str, threads: ThreadPoolExecutor, tick: float) -> None:
        self.channel = Channel()
        self._monitor, self._threads, self._tick = Monitor(store, job), threads, tick
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Poll until cancelled. It has its own task and threads, so that a hanging state store delays nothing else."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                reading = loop.run_in_executor(self._threads, self._monitor)
                try:
                    while not reading.done():
                        await asyncio.wait([reading], timeout=LOOK)
                        if not reading.done():
                            self._say(f"no answer for {LOOK:.0f} s")
                    self.channel.publish({"store": {"database": {"error": None}}, "states": reading.result()})
                except HeadwayError as error:
                    self._say(redact(str(error)))
                except Exception as error:  # noqa: BLE001 - shown on the page and retried
                    log.warning("failed to follow the states of a job", error=error_message(error))
                    self._say("the server failed to read it; see its log")
                await asyncio.sleep(self._tick)
        finally:
            # Queued behind a call that may still run; not awaited.
            with suppress(RuntimeError):  # the pool is shut down: the process ends and closes it
                loop.run_in_executor(self._threads, self._close).add_done_callback(_seen)

    def _close(self) -> None:
        self._monitor.close()

    def _say(self, error: str) -> None:
        self.channel.publish({"store": {"database": {"error": error}}})

    def end(self) -> None:
        """Stop following the job."""
        self._task.cancel()


class Publisher:
    """Polls the stores while pages are connected, and sends them the changes."""

    def __init__(self, site: Site, access: Access, *, tick: float = TICK) -> None:
        self._site, self._access, self._tick = site, access, tick
        self._look = Look(site.reader)
        self._everybody = Channel()
        self._users: dict[str, Channel] = {}
        self._watched: dict[str, Watched] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="headway-states")
        self._task: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[Any] | None = None
        self._pulse: Pulse | None = None
        self._asking = asyncio.Semaphore(ASKING)
        self._open: set[WebSocket] = set()
        self._answers = True  # whether the last poll succeeded

    # ---- connections -------------------------------------------------------------------------------------------------

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection until it ends."""
        user = self._site.user(websocket)
        try:
            channel = await self._admit(user, websocket.query_params.get("states"))
        except HeadwayError as error:
            await websocket.receive()  # the handshake
            await problems.deny(websocket.scope, websocket.receive, websocket.send, problems.answer(error))
            return
        self._open.add(websocket)
        channel.listeners += 1
        try:
            await websocket.accept()
            await self._converse(websocket, channel)
        finally:
            self._open.discard(websocket)
            channel.listeners -= 1
            if not channel.listeners:
                channel.rest()
            self._tidy()

    async def _admit(self, user: User, states: str | None) -> Channel:
        """Return the channel of a new connection. Raises `NotFound` or `Unavailable`."""
        if states is not None and user.owner is None and states not in self._watched:
            await self._site.read(check_job, self._site.settings.text("states"), states)
        channel = MANY if len(self._open) >= MOST else self._channel(user, states)
        if isinstance(channel, str):
            raise Unavailable(channel, hint="Close a page, or try again later.")
        return channel

    def _channel(self, user: User, states: str | None) -> Channel | str:
        """Return a connection's channel, or the reason for a refusal."""
        if user.owner is not None:  # only their own tasks, whatever the query says
            own = self._users.setdefault(user.owner, Channel())
            return own if own.listeners < EACH else "Too many live connections of yours are open."
        if states is None:
            return self._everybody
        if states not in self._watched:
            if len(self._watched) >= WATCHED:
                return "The states of too many jobs are shown."
            store = self._site.settings.text("states")
            self._watched[states] = Watched(store, states, self._threads, self._tick)
        return self._watched[states].channel

    def _tidy(self) -> None:
        """Stop polling for channels without listeners."""
        for owner in [owner for owner, channel in self._users.items() if not channel.listeners]:
            del self._users[owner]
        for job in [job for job, watched in self._watched.items() if not watched.channel.listeners]:
            self._watched.pop(job).end()
        metrics.gauge("headway_web_live", len(self._open))
        if not self._open and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _converse(self, websocket: WebSocket, channel: Channel) -> None:
        metrics.gauge("headway_web_live", len(self._open))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        sender, gone = asyncio.current_task(), asyncio.create_task(_until_gone(websocket))
        assert sender is not None

        def end(_: object) -> None:
            sender.cancel()

        gone.add_done_callback(end)
        try:
            await self._send(websocket, channel)
        except (WebSocketDisconnect, RuntimeError):  # the client disconnected during a write
            log.debug("a live connection was closed by the client")
        except asyncio.CancelledError:
            if not gone.done():
                raise  # the server shuts down
            sender.uncancel()
        finally:
            gone.remove_done_callback(end)
            gone.cancel()

    async def _send(self, websocket: WebSocket, channel: Channel) -> None:
        """Send messages until cancelled on disconnect, or until the user is no longer authenticated."""
        number = channel.number_of(websocket.query_params.get("since", ""))
        pulse: Pulse | None = websocket.scope["headway.pulse"]
        checked = time.monotonic()
        if not channel.is_current:
            await channel.news(channel.number)
        while True:
            number, text = channel.since(number)
            await websocket.send_text(text)
            await channel.news(number)
            now = self._pulse
            if pulse != now or time.monotonic() - checked > RECHECK:
                known = await self._still_known(websocket)
                if known is False:
                    await websocket.close(4401, "no longer authenticated")
                    return
                if known:  # None: the store could not tell; checked again with the next message
                    pulse, checked = now, time.monotonic()

    async def _still_known(self, websocket: WebSocket) -> bool | None:
        """Return whether the user is still authenticated; None if the store is unreachable."""
        async with self._asking:
            try:
                known = await self._access.who(websocket, again=True)
            except HeadwayError:
                return None
        return known is not None and known.user == self._site.user(websocket)

    # ---- polling -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, self._tick - (time.monotonic() - began)))

    async def look(self) -> None:
        """Poll the stores once and publish the changes, or the error."""
        with suppress(HeadwayError):  # the read below reports the outage
            self._pulse = await self._access.pulse()
        if self._reading is None or self._reading.done():
            everybody, users = self._everybody.listeners > 0, tuple(sorted(self._users))
            self._reading = asyncio.ensure_future(self._site.read(self._look, everybody=everybody, users=users))
            self._reading.add_done_callback(_seen)
        try:
            sections, theirs = await asyncio.wait_for(asyncio.shield(self._reading), LOOK)
        except TimeoutError:
            self._publish_error(f"no answer for {LOOK:.0f} s")
        except HeadwayError as error:
            self._publish_error(redact(str(error)))
        except Exception as error:  # noqa: BLE001 - one failed poll must neither end the live path nor pass unnoticed
            log.warning("failed to read for the live path", error=error_message(error))
            self._publish_error("the server failed to read it; see its log")
        else:
            self._answers = True
            if self._everybody.listeners:
                self._everybody.publish(sections)
            for user, found in theirs.items():
                if user in self._users:
                    self._users[user].publish(found)

    async def tell(self) -> None:
        """Send the final state to all pages before the server shuts down."""
        if not self._open or not self._answers:  # do not delay the shutdown for an unreachable store
            return
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LOOK)  # it may have started before the last change
        await self.look()
        await asyncio.sleep(FAREWELL)

    def _publish_error(self, error: str) -> None:
        self._answers = False
        for channel in (self._everybody, *self._users.values()):
            channel.publish({"store": {"database": {"error": error}}})

    async def close(self) -> None:
        """Stop polling and close all connections."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for watched in self._watched.values():
            watched.end()
        for websocket in list(self._open):
            with suppress(RuntimeError, WebSocketDisconnect):
                if websocket.application_state is WebSocketState.CONNECTED:
                    await websocket.close(1012, "the server is shutting down")


def route(publisher: Callable[[], Publisher]) -> Callable[[WebSocket], Any]:
    """Return the endpoint of the live path."""

    async def live(websocket: WebSocket) -> None:
        await publisher().serve(websocket)

    return live


async def _until_gone(websocket: WebSocket) -> None:
    """Return when the client disconnects. Its messages are ignored."""
    with suppress(WebSocketDisconnect, RuntimeError):
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return


def _seen(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # retrieved, or asyncio warns when no request waits for it

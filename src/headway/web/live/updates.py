"""The live path: what changed, to every open page, once a second.

One publisher per process looks at the stores while anybody listens, however many do: a bounded number of statements a second
(`Look`). What differs from the look before is a delta, encoded once and sent to all. A connection holds no queue: it
remembers the last number it was sent and is given what came since, or everything, when it is ready for more. So one that
reads slowly skips to the latest, costs no memory and delays nobody.

A number belongs to one channel's life (`Channel.epoch`): that of everybody lives as long as the process, that of a person as
long as a page of theirs is open. Said back after a reconnect, ``since`` gives the changes since then if they are still known
here, else everything.
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
from headway.views.jobs.job import cause_view
from headway.views.jobs.listing import job_view
from headway.views.jobs.speed import FORECAST_ITEMS
from headway.views.queue import read_queues, read_workers, task_view
from headway.views.shape import Json, iso, plain
from headway.web.api import problems
from headway.web.live.monitor import Monitor, check_job

if TYPE_CHECKING:
    from headway.ledger.values import JobInfo
    from headway.views.reading import Reader
    from headway.web.auth.identity import Access
    from headway.web.auth.tokens import Pulse
    from headway.web.site import Site, User

log = Log("web")

#: Seconds between two looks; between two messages, changed or not; that a look may take before the store is called away.
TICK: Final = 1.0
BEAT: Final = 2.0
LOOK: Final = 3.0
#: Seconds that the last message gets to leave before the connections are closed.
FAREWELL: Final = 0.1
#: Changes that are kept for those who come back.
KEPT: Final = 120
#: Connections one process takes.
MOST: Final = 5_000
MANY: Final = "Too many live connections are open."
#: Jobs, tasks and causes in what is sent; and jobs whose causes are read anew in one look.
JOBS: Final = 100
TASKS: Final = 100
CAUSES: Final = 3
#: Seconds of work that a rate is made of.
WINDOW: Final = 60.0
#: Seconds after which it is asked again who listens, also when no token or login was made or ended.
RECHECK: Final = 300.0
#: Listeners that are asked about at once: the others wait, and the store's threads stay free for requests.
ASKING: Final = 4
#: Jobs whose states are followed at once.
WATCHED: Final = 20
#: Connections that one person of an application may have, so that nobody takes those of all.
EACH: Final = 50

Sections = dict[str, dict[str, Any]]


@dataclass(slots=True)
class Look:
    """Reads what the pages show. It remembers what makes the next look cheaper: rates, and causes that did not change."""

    reader: Reader
    _done: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)
    _causes: dict[str, tuple[tuple[int, int], dict[str, Json]]] = field(default_factory=dict)

    def __call__(self, *, everybody: bool, users: tuple[str, ...]) -> tuple[Sections, dict[str, Sections]]:
        """What those see who may see everything, and what each of ``users`` sees."""
        from headway.queue.store import tasks as records

        began = time.perf_counter()
        database = self.reader.database
        sections: Sections = {"store": {"database": {"error": None}}}
        if everybody:
            jobs = self._jobs()
            sections["jobs"] = {info.id: self._job(info) for info in jobs}
            sections["causes"] = self._dead(jobs)
            sections["queues"] = {view.queue: plain(view) for view in read_queues(self.reader.queue).queues}
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
        for memory in (self._done, self._causes):
            for id in [id for id in memory if id not in ids]:
                del memory[id]
        return found

    def _job(self, info: JobInfo) -> Json:
        """The job's view with its rate, from what was seen here in the last minute, and the seconds left at that rate."""
        rate = left = None
        if info.held:
            seen = self._done.setdefault(info.id, deque(maxlen=int(WINDOW / TICK) + 2))
            seen.append((time.monotonic(), info.done))
            while seen[-1][0] - seen[0][0] > WINDOW or seen[0][1] > info.done:
                seen.popleft()
            seconds, done = seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]
            if seconds >= TICK and done:
                rate = done / seconds
                left = info.remaining / rate if done >= FORECAST_ITEMS else None
        else:
            self._done.pop(info.id, None)
        return {
            **plain(job_view(info)),
            "rate": None if rate is None else round(rate, 3),
            "eta_seconds": None if left is None else round(left, 1),
        }

    def _dead(self, jobs: list[JobInfo]) -> dict[str, Json]:
        """Causes of the jobs that have dead letters. Those of a job are read when its counts have changed, of a few jobs in
        one look; the others follow in the next."""
        from headway.ledger.job import Job

        changed = [info for info in jobs if self._causes.get(info.id, ((0, 0), {}))[0] != (info.dead, info.failures)]
        for info in changed[:CAUSES]:
            causes = Job(self.reader.database, info.no, info.id).causes() if info.dead else []
            views = {f"{info.id}/{one.no}": plain(cause_view(one)._replace(job=info.id)) for one in causes if one.dead}
            self._causes[info.id] = ((info.dead, info.failures), views)
        return {key: view for _, views in self._causes.values() for key, view in views.items()}


class Channel:
    """What some connections are sent: its content, and the last changes of it."""

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
        """Replace these sections; the others stay as they were last known."""
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
        """A message that brings somebody up to date, from that number or from nothing. Encoded once for all who need it."""
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
        return self._said > 0

    def rest(self) -> None:
        """The last listener left, and nobody looks any more: the next one is told nothing before somebody has looked."""
        self._said = 0.0

    async def news(self, number: int) -> None:
        while self.number <= number:
            await self._changed.wait()

    def place(self, seq: str) -> int | None:
        """The number somebody says they were at; None if it is not one that was sent here."""
        epoch, _, text = seq.partition(".")
        if epoch != self.epoch or not text.isdecimal() or len(text) > 15:
            return None
        number = int(text)
        return number if number <= self.number else None


class Watched:
    """A job's states, while pages show them: a channel, and who fills it."""

    def __init__(self, store: str, job: str, threads: ThreadPoolExecutor, tick: float) -> None:
        self.channel = Channel()
        self._monitor, self._threads, self._tick = Monitor(store, job), threads, tick
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        """Its own loop and threads: a store of states that hangs delays nobody else."""
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
                except Exception as error:  # noqa: BLE001 - said where a person looks, and tried again
                    log.warning("the states of a job cannot be followed", error=error_message(error))
                    self._say("the server could not read it; see its log")
                await asyncio.sleep(self._tick)
        finally:
            # Behind a call that may still be under way; nobody waits for it.
            with suppress(RuntimeError):  # the server ends, and with it what was open
                loop.run_in_executor(self._threads, self._close).add_done_callback(_seen)

    def _close(self) -> None:
        self._monitor.close()

    def _say(self, error: str) -> None:
        self.channel.publish({"store": {"database": {"error": error}}})

    def end(self) -> None:
        self._task.cancel()


class Publisher:
    """See the module. It works while anybody listens."""

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
        self._answers = True  # whether the store did when it was last asked

    # ---- connections -------------------------------------------------------------------------------------------------

    async def serve(self, websocket: WebSocket) -> None:
        """One connection, to its end."""
        user = self._site.user(websocket)
        try:
            channel = await self._admit(user, websocket.query_params.get("states"))
        except HeadwayError as error:
            await websocket.receive()  # its opening
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
        """Return what a connection is sent, or raise why there is no place for it."""
        if states is not None and user.owner is None and states not in self._watched:
            await self._site.read(
                check_job, self._site.settings.text("states"), states
            )  # an unknown job takes no place
        channel = MANY if len(self._open) >= MOST else self._channel(user, states)
        if isinstance(channel, str):
            raise Unavailable(channel, hint="Close a page, or try again later.")
        return channel

    def _channel(self, user: User, states: str | None) -> Channel | str:
        """What somebody is sent; or why nothing."""
        if user.owner is not None:  # their own tasks, whatever they ask for
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
        """What nobody listens to any more is no longer looked at."""
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
        except (WebSocketDisconnect, RuntimeError):  # it went away while it was being written to
            log.debug("a live connection went away")
        except asyncio.CancelledError:
            if not gone.done():
                raise  # it is the server that ends
            sender.uncancel()
        finally:
            gone.remove_done_callback(end)
            gone.cancel()

    async def _send(self, websocket: WebSocket, channel: Channel) -> None:
        """Until it is cancelled, because the other side has gone, or the other side is not known any more."""
        number = channel.place(websocket.query_params.get("since", ""))
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
                    await websocket.close(4401, "not known any more")
                    return
                if known:  # else nobody could say: it is asked again with the next message
                    pulse, checked = now, time.monotonic()

    async def _still_known(self, websocket: WebSocket) -> bool | None:
        """Return whether the listener is still known; None if the store cannot say."""
        async with self._asking:
            try:
                known = await self._access.who(websocket, again=True)
            except HeadwayError:
                return None
        return known is not None and known.user == self._site.user(websocket)

    # ---- looking -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, self._tick - (time.monotonic() - began)))

    async def look(self) -> None:
        """Read, and publish what changed; if the store does not answer, publish that."""
        with suppress(HeadwayError):  # said below
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
        except Exception as error:  # noqa: BLE001 - one bad look must not end the path for everybody, nor hide itself
            log.warning("the live path could not look", error=error_message(error))
            self._publish_error("the server could not read it; see its log")
        else:
            self._answers = True
            if self._everybody.listeners:
                self._everybody.publish(sections)
            for user, found in theirs.items():
                if user in self._users:
                    self._users[user].publish(found)

    async def tell(self) -> None:
        """Send everybody the state of this moment, because no later look will: the server is about to end."""
        if not self._open or not self._answers:  # who ends does not wait for a store that is away
            return
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LOOK)  # it may have begun before what is to be told
        await self.look()
        await asyncio.sleep(FAREWELL)

    def _publish_error(self, error: str) -> None:
        self._answers = False
        for channel in (self._everybody, *self._users.values()):
            channel.publish({"store": {"database": {"error": error}}})

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        for watched in self._watched.values():
            watched.end()
        for websocket in list(self._open):
            with suppress(RuntimeError, WebSocketDisconnect):
                if websocket.application_state is WebSocketState.CONNECTED:
                    await websocket.close(1012, "the server ends")


def route(publisher: Callable[[], Publisher]) -> Callable[[WebSocket], Any]:
    async def live(websocket: WebSocket) -> None:
        await publisher().serve(websocket)

    return live


async def _until_gone(websocket: WebSocket) -> None:
    """Nothing is expected from the other side but its end."""
    with suppress(WebSocketDisconnect, RuntimeError):
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return


def _seen(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()  # that nobody waited for it any more is no cause for a complaint

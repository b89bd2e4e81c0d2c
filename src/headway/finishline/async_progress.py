"""Progress for servers that live in an event loop: however many ask, one round trip at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Self

from headway import _redis, _sql
from headway._sql import Database
from headway.core.retry import CircuitBreaker
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.finishline.progress import NOT_FOUND, Progress, checked_project, corrupt, from_hash
from headway.finishline.store.records import Records
from headway.telemetry import Log, metrics

log = Log("finishline")

#: Projects asked about in one pipeline.
PIPELINE = 1_000


class AsyncProgress:
    """``await reader.progress(id)`` from any number of tasks.

    Questions that arrive while a round trip is under way, or in the same turn of the loop, share the next one; the
    same project is asked about once. While Redis is away they fail at once, but for one probe a second.
    """

    def __init__(
        self, state_url: str, database: str | Database | None = None, *, timeout: float = _redis.TIMEOUT
    ) -> None:
        """``database`` answers for projects that Redis no longer has. An address is opened here, which may block, and
        closed by `close`."""
        self._owned: Database | None = None
        if isinstance(database, str):
            database = self._owned = _sql.connect(database, create=False)
        self._records = Records(database) if database is not None else None
        self._url = state_url
        self._client: Any = _redis.connect_async(
            state_url, role="state", name="progress", timeout=timeout, connect_timeout=timeout
        )
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0, clock=time.monotonic)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: dict[str, asyncio.Future[Progress | None]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def progress(self, project_id: str) -> Progress:
        """As `FinishLine.progress`, but a project that Redis lost is answered from SQL and not rebuilt here."""
        project_id = checked_project(project_id)
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidInput(
                "This reader was used in another event loop, to which its connections belong.",
                hint="Make one for each loop: async with AsyncProgress(...) as reader",
            )
        self._loop = loop
        waiting = self._asked.get(project_id)
        if waiting is None:
            waiting = self._asked[project_id] = loop.create_future()
            if self._worker is None:
                self._worker = loop.create_task(self._work())
                self._worker.add_done_callback(self._ended)
        # Others wait for the same answer: one who stops waiting must not take it from them.
        found = await asyncio.shield(waiting)
        if found is not None:
            return found
        if self._records is None:
            return NOT_FOUND
        row = await asyncio.to_thread(self._records.find, project_id)
        return row.progress() if row is not None else NOT_FOUND

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """A worker that was ended (a loop does so at its end), be it before its first step, ends all that wait for it."""
        if self._worker is worker:
            self._worker = None
            asked, self._asked = self._asked, {}
            for waiting in asked.values():
                _fail(waiting, asyncio.CancelledError())

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker
        await self._client.aclose()
        if self._owned is not None:
            await asyncio.to_thread(self._owned.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _work(self) -> None:
        """Answer until nobody asks. It yields first, so that all who ask in this turn of the loop are in."""
        while self._asked:
            await asyncio.sleep(0)
            names = list(self._asked)[:PIPELINE]
            asked = {name: self._asked.pop(name) for name in names}
            await self._answer(asked)
        self._worker = None  # in the step that saw nobody: who asks next begins another

    async def _answer(self, asked: Mapping[str, asyncio.Future[Progress | None]]) -> None:
        """Everybody who asked gets an answer or an error, whatever happens."""
        try:
            if not self._breaker.allow():
                away = self._breaker.open_for or 0.0
                raise Unavailable(
                    f"Redis at {_redis.place(self._url)} is away since {away:.0f} s: the progress is not known.",
                    hint="It is asked again every second; the counts are not lost.",
                )
            replies = await self._ask(list(asked))
        except BaseException as error:
            for waiting in asked.values():
                _fail(waiting, error)
            if not isinstance(error, Exception):  # the loop ends
                raise
            return
        for (name, waiting), fields in zip(asked.items(), replies, strict=True):
            try:
                if isinstance(fields, Exception):  # this one key is not a hash; the others are answered all the same
                    raise corrupt(name) from fields
                found = from_hash(name, fields)
                if not waiting.done():
                    waiting.set_result(found)
            except HeadwayError as error:
                _fail(waiting, error)

    async def _ask(self, names: list[str]) -> list[Mapping[str, str] | Exception]:
        try:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(_redis.PROJECT(project_id=name))
            replies: list[Mapping[str, str] | Exception] = await pipeline.execute(raise_on_error=False)
        except _redis.failures() as error:
            trouble = _redis.translate(error, self._url)
            if _redis.is_transient(error):
                self._breaker.failed()
            log.warning("progress cannot be read", operation="progress", count=len(names), error=str(trouble))
            raise trouble from error
        self._breaker.succeeded()
        metrics.observe("headway_progress_batch", len(names))
        return replies


def _fail(waiting: asyncio.Future[Progress | None], error: BaseException) -> None:
    if not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # seen: that nobody waits any more is no cause for a complaint

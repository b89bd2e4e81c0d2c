"""Progress for asyncio programs: any number of queries, one round trip at a time."""

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

#: Projects in one pipeline.
PIPELINE = 1_000


class AsyncProgress:
    """Reads progress for any number of tasks of one event loop: ``await reader.progress(id)``.

    Queries that arrive during a round trip, or in the same turn of the loop, share the next one. Queries for one project
    share one command. While Redis is away they fail at once, except one probe per second.
    """

    def __init__(
        self, state_url: str, database: str | Database | None = None, *, timeout: float = _redis.TIMEOUT
    ) -> None:
        """Open a reader. ``database`` has the projects that Redis no longer has.

        A database address is opened here, which may block, and closed by `close`.
        """
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
        self._queries: dict[str, asyncio.Future[Progress | None]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def progress(self, project_id: str) -> Progress:
        """Return the progress as `FinishLine.progress` does. A project that Redis lost is read from SQL and not rebuilt."""
        project_id = checked_project(project_id)
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidInput(
                "This reader was used in another event loop, which owns its connections.",
                hint="Create one reader per loop: async with AsyncProgress(...) as reader",
            )
        self._loop = loop
        waiting = self._queries.get(project_id)
        if waiting is None:
            waiting = self._queries[project_id] = loop.create_future()
            if self._worker is None:
                self._worker = loop.create_task(self._work())
                self._worker.add_done_callback(self._ended)
        # Other tasks may wait for the same answer: a cancelled task must not cancel it.
        found = await asyncio.shield(waiting)
        if found is not None:
            return found
        if self._records is None:
            return NOT_FOUND
        row = await asyncio.to_thread(self._records.find, project_id)
        return row.progress() if row is not None else NOT_FOUND

    def _ended(self, worker: asyncio.Task[None]) -> None:
        """Cancel the waiting queries when the worker was cancelled, for example at the end of the loop."""
        if self._worker is worker:
            self._worker = None
            left, self._queries = self._queries, {}
            for waiting in left.values():
                _fail(waiting, asyncio.CancelledError())

    async def close(self) -> None:
        """Answer the waiting queries and close the connections."""
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
        """Answer until no query waits. Yields to the loop first, so that all queries of this turn share the round trip."""
        while self._queries:
            await asyncio.sleep(0)
            names = list(self._queries)[:PIPELINE]
            await self._answer({name: self._queries.pop(name) for name in names})
        self._worker = None  # without a yield since the check above: the next query starts another worker

    async def _answer(self, asked: Mapping[str, asyncio.Future[Progress | None]]) -> None:
        """Give every query an answer or an error."""
        try:
            if not self._breaker.allow():
                away = self._breaker.open_for or 0.0
                raise Unavailable(
                    f"Redis at {_redis.shown_address(self._url)} has been unreachable for {away:.0f} s. "
                    "The progress is unknown.",
                    hint="Headway tries again every second. The counts are not lost.",
                )
            replies = await self._read(list(asked))
        except BaseException as error:
            for waiting in asked.values():
                _fail(waiting, error)
            if not isinstance(error, Exception):  # the loop ends
                raise
            return
        for (name, waiting), fields in zip(asked.items(), replies, strict=True):
            try:
                if isinstance(fields, Exception):  # only this key is not a hash
                    raise corrupt(name) from fields
                found = from_hash(name, fields)
                if not waiting.done():
                    waiting.set_result(found)
            except HeadwayError as error:
                _fail(waiting, error)

    async def _read(self, names: list[str]) -> list[Mapping[str, str] | Exception]:
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
        waiting.exception()  # marks it as retrieved: asyncio must not log that no task awaited it

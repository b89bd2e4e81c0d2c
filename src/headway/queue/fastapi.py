"""The queue in a FastAPI or Starlette application.

    queue = TaskQueue(...)
    app = FastAPI(lifespan=lifespan(queue))

    @app.post("/captions", status_code=202)
    async def captions(send: Annotated[Submit, Depends(submitter(queue))]):
        task = await send("caption", {"image": 7}, user_id="anna")

A submission commits, which takes some milliseconds. `submitter` runs it in a thread, so the event loop is not blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from headway.queue.submission import Options
from headway.queue.task import Task
from headway.queue.task_queue import TaskQueue

Submit = Callable[..., Awaitable[Task]]


def lifespan(queue: TaskQueue) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a lifespan that closes the queue's connections when the application ends."""

    @asynccontextmanager
    async def run(_app: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(queue.close)

    return run


def submitter(queue: TaskQueue) -> Callable[[], Submit]:
    """Return a dependency that provides an async `TaskQueue.submit`."""

    def depend() -> Submit:
        async def submit(kind: str, payload: Any = None, **options: Unpack[Options]) -> Task:
            return await asyncio.to_thread(queue.submit, kind, payload, **options)

        return submit

    return depend

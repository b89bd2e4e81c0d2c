"""The routes of ``/api/v1`` that search and explain: one search, causes over all jobs, failures by host, marks."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from headway.views import failed, history, queue, search
from headway.web.api.routes import Api

Name = Annotated[str | None, Query(max_length=128)]
#: Longest period of failures and marks, in seconds (400 days, as long as the counts by the day are kept).
LONGEST = 400 * 86_400


def mount(api: Api) -> None:
    """Register the routes."""
    reader = api.site.reader

    @api.get("/search", search.Found)
    async def search_all(
        request: Request, q: Annotated[str, Query(min_length=1, max_length=search.LONGEST)]
    ) -> Response:
        """Find jobs, items, tasks, users, workers and causes."""
        return await api.answer(request, reader.search, q)

    @api.get("/causes", failed.CauseGroups)
    async def list_causes(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Response:
        """List the causes of dead letters, grouped over all jobs."""
        return await api.answer(request, reader.causes, limit=limit)

    @api.get("/failures-by-host", search.FailuresByHost)
    async def list_failures_by_host(
        request: Request, seconds: Annotated[float, Query(ge=60, le=LONGEST)] = 3600.0
    ) -> Response:
        """Count the failed attempts of the last ``seconds`` by machine."""
        return await api.answer(request, reader.failures_by_host, seconds=seconds)

    @api.get("/marks", history.Marks)
    async def list_marks(
        request: Request, seconds: Annotated[float, Query(ge=60, le=LONGEST)] = 86_400.0, job: Name = None
    ) -> Response:
        """List starts, ends, kills, pauses, changed settings and deploys of the last ``seconds``."""
        return await api.answer(request, reader.marks, seconds=seconds, job=job)

    @api.get("/queues/{name}/oldest", queue.Tasks)
    async def list_oldest_tasks(
        request: Request,
        name: Literal["urgent", "high", "normal", "low"],
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    ) -> Response:
        """List the tasks of a queue that have waited for longest, oldest first."""
        return await api.answer(request, reader.oldest_tasks, name, limit=limit)

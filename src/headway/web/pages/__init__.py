"""The pages of the dashboard, rendered on the server and complete without a script.

    render      templates, formatting of numbers and times
    draw        charts as SVG
    static      style sheets and scripts
    overview    Overview and search
    jobs        Jobs, Job, Items, Item
    dead        Dead letters by cause
    queues      Queues, Queue, Workers, Tasks, Task, My work
    system      Projects, States, Performance, Alerts, Activity, About

A page reads through `headway.views`, off the event loop, and changes nothing. Its forms post to ``/actions/NAME``
(`headway.web.api.actions`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from headway.errors import HeadwayError, NotFound, StorageError, Unavailable
from headway.telemetry import Log
from headway.web.pages.render import Pages

log = Log("web")

Endpoint = Callable[[Pages, Request], Awaitable[Response]]

#: Pages for the role ``user``. All others answer 404.
OWN = frozenset({"/me", "/tasks/{id}"})


def routes(pages: Pages) -> list[BaseRoute]:
    """Return the routes of all pages and static files."""
    from headway.web.pages import dead, jobs, overview, queues, system

    found: dict[str, Endpoint] = {
        **overview.PAGES, **jobs.PAGES, **dead.PAGES, **queues.PAGES, **system.PAGES
    }  # fmt: skip
    mounted: list[BaseRoute] = [
        Route(path, _guarded(pages, path, endpoint), methods=["GET"]) for path, endpoint in found.items()
    ]
    mounted.append(Route("/static/{name}", pages.assets.serve, methods=["GET"]))
    return mounted


def _guarded(pages: Pages, path: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        site = pages.site
        if site.user(request).role == "user" and path not in OWN:
            if path == "/":
                return RedirectResponse(site.url(request, "/me"), 303)
            return pages.failed(request, NotFound("There is no such page.", hint="Your own tasks are on My work."))
        if site.user(request).role != "user":
            await pages.count_dead()
        try:
            return await endpoint(pages, request)
        except HeadwayError as error:
            if isinstance(error, Unavailable | StorageError):
                log.warning("failed to read a page", error=str(error))
            return pages.failed(request, error)

    return answer

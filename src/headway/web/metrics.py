"""``/metrics``, ``/healthz`` and ``/readyz``: monitoring of the server process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import PlainTextResponse, Response

from headway.errors import HeadwayError
from headway.telemetry import exposition
from headway.web.api.actions import require

if TYPE_CHECKING:
    from starlette.requests import Request

    from headway.web.site import Site

#: Timeout in seconds for a store's ping.
READY: Final = 2.0

Endpoint = Callable[["Request"], Awaitable[Response]]


def prometheus(site: Site) -> Endpoint:
    """Return the endpoint of ``/metrics``. It needs the right ``read``, because labels contain names of queues and sinks."""

    async def get(request: Request) -> Response:
        require(site.user(request), "read")
        text = await site.read(exposition)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return get


async def alive(_: Request) -> Response:
    """Answer ``/healthz``. It queries no store: an unreachable store is no reason to restart the server."""
    return PlainTextResponse("ok\n")


def ready(site: Site) -> Endpoint:
    """Return the endpoint of ``/readyz``. It names the stores and whether they answer, but no addresses."""

    async def get(_: Request) -> Response:
        checks = {"database": await _answers(site, site.reader.ping_database)}
        if site.redis is not None:
            checks["redis"] = await _answers(site, site.reader.ping_redis)
        well = all(checks.values())
        body = {"ready": well, "checks": {name: "ok" if fine else "away" for name, fine in checks.items()}}
        return Response(json.dumps(body), 200 if well else 503, media_type="application/json")

    return get


async def _answers(site: Site, question: Callable[[], Any]) -> bool:
    try:
        await asyncio.wait_for(site.read(question), READY)
    except (TimeoutError, HeadwayError):
        return False
    return True

"""The pages behind a door of the test's own: who is asking, and a live line that can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.config import Config
from headway.views.reading import Reader
from headway.web.pages import routes
from headway.web.pages.render import Pages
from headway.web.site import Flash, Role, Site, User


@dataclass
class Stage:
    """One site, seen by whoever ``name`` and ``role`` say."""

    url: str
    role: Role = "operator"
    name: str = "ana"
    flash: Flash | None = None
    #: The live line says nothing, or that the store is away.
    silent: bool = False
    away: str = ""
    #: Settings beyond the database, as the command line would give them.
    given: dict[str, str | tuple[str, ...]] = field(default_factory=dict)
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        settings = Config(cli={"database": self.url, "states": self.url, **self.given})
        self.site = Site(self.url, None, settings, Reader(settings))

    def app(self) -> ASGIApp:
        inner = Starlette(routes=[WebSocketRoute("/api/v1/live", self._live), *routes(Pages(self.site))])

        async def door(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in ("http", "websocket"):
                scope["headway.user"] = User(self.name, self.role)
                scope["headway.csrf"] = "0123456789abcdef" * 2
                scope["headway.flash"] = self.flash
            await inner(scope, receive, send)

        return door

    async def _live(self, socket: WebSocket) -> None:
        await socket.accept()
        known: dict[str, Any] = {}
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            for number in range(100_000):
                found = await self.site.read(self.site.reader.jobs)
                jobs = {job["id"]: job for job in found.as_json()["jobs"]}
                store = {"database": {"error": self.away}} if self.away else {"database": {}}
                changed = {id: job for id, job in jobs.items() if known.get(id) != job}
                told = (
                    {"delta": {"jobs": changed, "store": store}} if number else {"full": {"jobs": jobs, "store": store}}
                )
                known = jobs
                if not self.silent:
                    await socket.send_json({"seq": f"s.{number}", "at": "2026-11-16T15:00:00.000Z", **told})
                await asyncio.sleep(0.1)

"""The pages behind a door of the test's own: who is asking, and a live line that can fall silent."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.config import Config
from headway.views.reading import Reader
from headway.web.pages import routes
from headway.web.site import Flash, Role, Site, User


@dataclass
class Stage:
    """One site, seen by whoever `user` says."""

    url: str
    role: Role = "operator"
    name: str = "ana"
    flash: Flash | None = None
    silent: bool = False
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = Config(cli={"database": self.url, "states": self.url})
        self.site = Site(self.url, None, settings, Reader(settings))

    def app(self) -> ASGIApp:
        inner = Starlette(routes=[WebSocketRoute("/api/v1/live", self._live), *routes(self.site)])

        async def door(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] in ("http", "websocket"):
                scope["headway.user"] = User(self.name, self.role)
                scope["headway.csrf"] = "token-of-the-form"
                scope["headway.flash"] = self.flash
            await inner(scope, receive, send)

        return door

    async def _live(self, socket: WebSocket) -> None:
        await socket.accept()
        full = {"jobs": {job["id"]: job for job in self.site.reader.jobs().as_json()["jobs"]}}
        number = 0
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while True:
                if not self.silent:
                    number += 1
                    await socket.send_json(
                        {
                            "seq": f"s.{number}",
                            "at": "2026-11-16T15:00:00.000Z",
                            **({"full": full} if number == 1 else {"delta": {}}),
                        }
                    )
                await asyncio.sleep(0.5)

    def close(self) -> None:
        self.site.close()

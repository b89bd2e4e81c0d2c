"""Declaration of API routes: the right each needs, its response schema and its ETag."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import NotFound
from headway.views.schemas import json_schema
from headway.views.shape import schema_of
from headway.views.system import access
from headway.web.api.problems import Forbidden
from headway.web.site import Site

if TYPE_CHECKING:
    from headway.views.shape import Document

F = TypeVar("F", bound=Callable[..., Any])

PREFIX: Final = "/api/v1"


def encoded(question: Callable[..., Document], *args: Any, **options: Any) -> tuple[bytes, str]:
    """Return a document as JSON, and its ETag. It runs in the reader's thread, off the event loop."""
    body = json.dumps(question(*args, **options).as_json(), separators=(",", ":")).encode()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


class Api:
    """Declares routes on the application's router.

    A router of its own would cost each request more time than the read.
    """

    def __init__(self, router: APIRouter, site: Site) -> None:
        self.site, self._router = site, router

    def get(self, path: str, view: type, *, right: str = "read") -> Callable[[F], F]:
        """Declare a read that answers with ``view``."""
        return self._declare("GET", path, view, right)

    def post(self, path: str, *, right: str) -> Callable[[F], F]:
        """Declare an action."""
        return self._declare("POST", path, access.Acted, right)

    def _declare(self, method: str, path: str, view: type, right: str) -> Callable[[F], F]:
        schema = json_schema(view, schema_of(view))
        answer = {
            "description": (view.__doc__ or "").split("\n")[0],
            "content": {"application/json": {"schema": schema}},
        }
        return self._router.api_route(
            PREFIX + path, methods=[method], responses={200: answer}, dependencies=[Depends(self._needs(right))],
            openapi_extra={"x-headway-right": right},
        )  # fmt: skip

    def _needs(self, right: str) -> Callable[[Request], Awaitable[None]]:
        # A coroutine, although it awaits nothing, because FastAPI would run a plain function in a thread per request.
        async def check(request: Request) -> None:
            user = self.site.user(request)
            if user.may(right):
                return
            if user.owner is not None and request.path_params:
                raise NotFound("You have nothing with this id.")
            raise Forbidden(f"The role {user.role} does not have the right {right}.", hint="Use a token that has it.")

        return check

    async def answer(self, request: Request, question: Callable[..., Document], *args: Any, **options: Any) -> Response:
        """Read a document in a thread and return it; status 304 if the client has the same version."""
        return tagged(request, *await self.site.view(encoded, question, *args, **options))

    async def act(self, request: Request, action: Callable[..., access.Acted], *args: Any, **options: Any) -> Response:
        """Execute an action in a thread and return its result."""
        acted = await self.site.change(action, self.site.reader, self.site.user(request), *args, **options)
        return Response(json.dumps(acted.as_json()), media_type="application/json")


def tagged(request: Request, body: bytes, tag: str) -> Response:
    """Return a JSON response with an ETag; status 304 without body if the client has this version."""
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")

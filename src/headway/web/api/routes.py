"""What every route of the API has in common: a right, the shape of its answer, the shape of its errors, a tag."""

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
    """A document as JSON, and the tag of exactly this content. It runs where the question is asked, not on the loop."""
    body = json.dumps(question(*args, **options).as_json(), separators=(",", ":")).encode()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


class Api:
    """Declares routes, each with its right and the shape of its answer."""

    def __init__(self, router: APIRouter, site: Site) -> None:
        """``router`` is the application's own: to find the way through a second one costs each request more than reading."""
        self.site, self._router = site, router

    def get(self, path: str, view: type, *, right: str = "read") -> Callable[[F], F]:
        return self._declare("GET", path, view, right)

    def post(self, path: str, *, right: str) -> Callable[[F], F]:
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
        # A coroutine, although it awaits nothing: FastAPI sends a plain function to a thread and back at every request,
        # and the threads and the loop then wait for each other.
        async def check(request: Request) -> None:
            user = self.site.user(request)
            if user.may(right):
                return
            if user.owner is not None and request.path_params:
                raise NotFound("There is nothing of yours under this id.")
            raise Forbidden(
                f"The role {user.role} has no right to this ({right}).", hint="Ask for a token that has it."
            )

        return check

    async def answer(self, request: Request, question: Callable[..., Document], *args: Any, **options: Any) -> Response:
        """Ask off the loop, and answer; with 304 and nothing if the asker has exactly this already."""
        return tagged(request, *await self.site.view(encoded, question, *args, **options))

    async def act(self, request: Request, action: Callable[..., access.Acted], *args: Any, **options: Any) -> Response:
        acted = await self.site.change(action, self.site.reader, self.site.user(request), *args, **options)
        return Response(json.dumps(acted.as_json()), media_type="application/json")


def tagged(request: Request, body: bytes, tag: str) -> Response:
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if tag in [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="application/json")

"""Logging in and out, and what every form has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote

from starlette.responses import HTMLResponse, RedirectResponse, Response

from headway.errors import UsageError
from headway.web import tokens
from headway.web.auth import root_of
from headway.web.problems import NotAcceptable, Unauthenticated

if TYPE_CHECKING:
    from starlette.requests import Request

    from headway.web.auth import Access
    from headway.web.pages.render import Pages


def page(pages: Pages) -> Callable[[Request], Awaitable[Response]]:
    async def get(request: Request) -> Response:
        back, wrong = local_path(request.query_params.get("next", "/")), "wrong" in request.query_params
        return pages.door(request.scope, title="Log in", csrf=request.scope["headway.csrf"], back=back, wrong=wrong)

    return get


def login(access: Access) -> Callable[[Request], Awaitable[Response]]:
    async def post(request: Request) -> Response:
        fields = await form(request)
        access.check_form(request, fields.get("csrf", ""))
        found = await access.log_in(fields.get("token", "").strip(), access.peer(request))
        back = local_path(fields.get("next", "/"))
        root = root_of(request.scope)
        if found is None:
            response: Response = RedirectResponse(f"{root}/login?wrong=1&next={quote(back, safe='/')}", 303)
            return response
        response = RedirectResponse(root + back, 303, headers={"Cache-Control": "no-store"})
        access.set_cookie(response, request.scope, "session", found[1], int(tokens.SESSION))
        return response

    return post


def enter(access: Access) -> Callable[[Request], Awaitable[Response]]:
    """``GET /enter?ticket=...&next=/jobs``: somebody of an application with users of its own comes in."""

    async def get(request: Request) -> Response:
        found = await access.enter(request.query_params.get("ticket", ""), access.peer(request))
        if found is None:
            raise Unauthenticated(
                "This ticket was used, has ended, or is none.", hint="Come from the application again."
            )
        there = root_of(request.scope) + local_path(request.query_params.get("next", "/"))
        # A page of ours, not a redirection: after one from another site a browser would keep a strict cookie to itself.
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>headway</title>'
            f'<meta http-equiv="refresh" content="0;url={_attribute(quote(there, safe="/?&=%#:,+@!"))}">'
            f'<p><a href="{_attribute(there)}">Go on</a></p></html>'
        )
        response = HTMLResponse(text, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
        access.set_cookie(response, request.scope, "session", found[1], int(tokens.SESSION))
        return response

    return get


def logout(access: Access) -> Callable[[Request], Awaitable[Response]]:
    async def post(request: Request) -> Response:
        access.check_form(request, (await form(request)).get("csrf", ""))
        cookie = access.cookie(request, "session")
        if cookie:
            await access.log_out(cookie)
        response = RedirectResponse(f"{root_of(request.scope)}/login", 303)
        access.set_cookie(response, request.scope, "session", "", 0)
        return response

    return post


async def form(request: Request) -> dict[str, str]:
    """The fields of a form; of a field that comes twice, the last."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise NotAcceptable("A form is needed.", hint="Send application/x-www-form-urlencoded")
    return dict(await form_pairs(request))


async def form_pairs(request: Request) -> list[tuple[str, str]]:
    try:
        return parse_qsl((await request.body()).decode("utf-8"), keep_blank_values=True, max_num_fields=1000)
    except ValueError as error:
        raise UsageError(f"The form cannot be read: {error}") from error


def local_path(text: str) -> str:
    """Where to go after logging in: a path of ours, never another site."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable() and "\\" not in text
    return text if plain else "/"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")

"""Login and logout, and the parsing of forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote

from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from headway.errors import UsageError
from headway.web.api.problems import NotAcceptable, Unauthenticated
from headway.web.auth.identity import root_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from headway.web.auth.identity import Access
    from headway.web.pages.render import Pages
    from headway.web.site import User


def page(pages: Pages) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of the login page."""

    async def get(request: Request) -> Response:
        back, wrong = local_path(request.query_params.get("next", "/")), "wrong" in request.query_params
        return pages.door(request.scope, title="Log in", csrf=request.scope["headway.csrf"], back=back, wrong=wrong)

    return get


def login(access: Access) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that opens a session by a token."""

    async def post(request: Request) -> Response:
        fields = await form(request)
        access.check_form(request, fields.get("csrf", ""))
        found = await access.log_in(fields.get("token", "").strip(), access.peer(request))
        back = local_path(fields.get("next", "/"))
        root = root_of(request.scope)
        if found is None:
            response: Response = RedirectResponse(f"{root}/login?wrong=1&next={quote(back, safe='/')}", 303)
            return response
        response = RedirectResponse(root + _allowed(found[0], back), 303, headers={"Cache-Control": "no-store"})
        access.set_session(response, request.scope, *found)
        return response

    return post


def enter(access: Access, pages: Pages) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint ``/enter?ticket=...&next=/jobs``: open a session by a ticket or a link of `headway serve`.

    Another site can send a browser here with a ticket of its own user. Such a ticket must not silently replace the
    browser's session: our page asks first, and its form (POST) continues. The gate refuses forms of other sites.
    """

    async def answer(request: Request) -> Response:
        if request.method == "HEAD":  # it would spend the ticket before the user's GET
            raise HTTPException(405, headers={"Allow": "GET, POST"})
        fields = request.query_params if request.method == "GET" else await form(request)
        text, back = fields.get("ticket", ""), local_path(fields.get("next", "/"))
        ticket = access.ticket(text, access.peer(request))
        if ticket is not None and request.method == "GET" and await access.replaces_another(request, ticket.user):
            return pages.door(request.scope, title="Log in", confirm=ticket.user, ticket=text, back=back)
        cookie = None if ticket is None else await access.enter(ticket)
        if ticket is None or cookie is None:
            raise Unauthenticated(
                "This link was used already, or has expired.",
                hint="Come from the application again; on the server's machine: headway open",
            )
        there = root_of(request.scope) + _allowed(ticket.user, back)
        # A page instead of a redirect: in a redirect chain from another site, browsers withhold the strict cookie.
        page = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>headway</title>'
            f'<meta http-equiv="refresh" content="0;url={_attribute(quote(there, safe="/?&=%#:,+@!"))}">'
            f'<p><a href="{_attribute(there)}">Continue</a></p></html>'
        )
        response = HTMLResponse(page, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
        access.set_session(response, request.scope, ticket.user, cookie)
        return response

    return answer


def logout(access: Access) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that ends the session."""

    async def post(request: Request) -> Response:
        access.check_form(request, (await form(request)).get("csrf", ""))
        cookie = access.cookie(request, "session")
        if cookie:
            await access.log_out(cookie)
        response = RedirectResponse(f"{root_of(request.scope)}/login", 303)
        access.clear_session(response, request.scope)
        return response

    return post


async def form(request: Request) -> dict[str, str]:
    """Return the fields of a form; of a repeated field, the last value."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise NotAcceptable(
            f"The content type must be application/x-www-form-urlencoded (got {kind[:60]!r}).", hint="Send a form."
        )
    return dict(await form_pairs(request))


async def form_pairs(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a form in order. Raises `UsageError` for a malformed or too large form."""
    try:
        return parse_qsl((await request.body()).decode("utf-8"), keep_blank_values=True, max_num_fields=1000)
    except ValueError as error:
        raise UsageError(f"The form cannot be read: {error}") from error


def local_path(text: str) -> str:
    """Return ``text`` if it is a path of this site, else ``/``. So no redirect leads to another site."""
    plain = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable() and "\\" not in text
    return text if plain else "/"


def _allowed(user: User, path: str) -> str:
    """Return ``path``, or for the role ``user`` their own page if ``path`` is not for them."""
    return "/me" if user.owner is not None and not path.startswith(("/me", "/tasks/")) else path


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")

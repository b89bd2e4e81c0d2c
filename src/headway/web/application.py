"""The ASGI application: the gate, the API, the live path, the pages and the health checks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from headway import __version__
from headway.config import Config
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, MissingExtra, UsageError
from headway.telemetry import redact
from headway.views.reading import Reader

try:
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Route, WebSocketRoute
except ImportError as error:
    raise MissingExtra("web", "The web application") from error

from headway.web import metrics, pages
from headway.web.api import actions, openapi, problems
from headway.web.api import v1 as api
from headway.web.api.problems import UnknownPath, WrongMethod
from headway.web.api.routes import PREFIX
from headway.web.auth import gate, login
from headway.web.auth.addresses import networks
from headway.web.auth.gate import Gate
from headway.web.auth.identity import Access, Users, root_of
from headway.web.live import updates as live
from headway.web.pages.render import Pages
from headway.web.site import Site

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from headway.config import Value
    from headway.finishline import AsyncProgress

#: Retries for an unreachable database server. Few, so that a page reports the outage within five seconds.
RETRY: Final = RetryPolicy(retries=2, base=0.05, jitter=0.5)


class Application:
    """An ASGI application, served alone or mounted in another one.

    It connects to its stores at the first request.
    """

    def __init__(self, site: Site, *, users: Users | None, hosts: Sequence[str]) -> None:
        self.site = site
        proxies = networks(site.settings.texts("web_proxies"))
        self.access = Access(site, users, frozenset(host.lower() for host in hosts), proxies)
        self._publisher: live.Publisher | None = None
        self._progress: AsyncProgress | None = None
        self._pages = Pages(site)
        self._inner = self._routes()
        self._gate = Gate(_Compressed(self._inner), self.access, self._failed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)

    async def tell(self) -> None:
        """Send the current state to the open pages."""
        if self._publisher is not None:
            await self._publisher.tell()

    async def close(self) -> None:
        """Close the live connections and the stores."""
        if self._publisher is not None:
            await self._publisher.close()
        if self._progress is not None:
            await self._progress.close()
        await asyncio.to_thread(self.site.close)

    def publisher(self) -> live.Publisher:
        """Return the publisher of the live path, created on first use."""
        if self._publisher is None:
            self._publisher = live.Publisher(self.site, self.access)
        return self._publisher

    def progress(self) -> AsyncProgress | None:
        """Return the reader of project counts in Redis; None if no Redis is configured."""
        if self._progress is None and self.site.redis is not None:
            from headway.finishline import AsyncProgress

            self._progress = AsyncProgress(self.site.settings.text("projects_redis"), None)
        return self._progress

    # ---- routes ------------------------------------------------------------------------------------------------------

    def _routes(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            # Created now: the first request would otherwise wait for it, and all requests behind that one too.
            await asyncio.to_thread(self.progress)
            try:
                yield
            finally:
                await self.close()

        app = FastAPI(
            title="headway",
            version=__version__,
            summary="Durable progress for long work in many processes.",
            openapi_url=f"{PREFIX}/openapi.json",
            servers=[{"url": "/"}],
            docs_url=None,  # the viewers load scripts from other hosts
            redoc_url=None,
            lifespan=lifespan,
            redirect_slashes=False,
            exception_handlers={
                HeadwayError: self._on_error,
                RequestValidationError: self._on_error,
                HTTPException: self._on_error,
                Exception: self._on_error,
            },
        )
        api.mount(app, self.site, self.progress)
        openapi.install(app)
        site, access = self.site, self.access
        routes: list[BaseRoute] = [
            WebSocketRoute(site.live, live.route(self.publisher)),
            Route("/metrics", metrics.prometheus(site), methods=["GET"]),
            Route("/healthz", metrics.alive, methods=["GET"]),
            Route("/readyz", metrics.ready(site), methods=["GET"]),
            Route("/actions/{name}", actions.handler(site, access), methods=["POST"]),
            Route("/login", login.login(access), methods=["POST"]),
            Route("/logout", login.logout(access), methods=["POST"]),
            Route("/enter", login.enter(access, self._pages), methods=["GET", "POST"]),
            *pages.routes(self._pages),
            Route("/login", login.page(self._pages), methods=["GET"]),
        ]
        app.router.routes.extend(routes)
        return app

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _failed(self, scope: Scope, error: HeadwayError) -> Response:
        if gate.is_for_programs(gate.path_of(scope)) or scope["type"] == "websocket":
            return problems.answer(error)
        return self._pages.failed(Request(scope), error)

    async def _on_error(self, request: Request, error: Exception) -> Response:
        request.scope["headway.explained"] = True
        response = self._failed(request.scope, _in_our_words(error, request))
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})  # such as Allow
        return response


class _Compressed:
    """Compresses pages with gzip, except for requests from other sites.

    A page contains secrets (its CSRF token) and reflects parameters. Compression would let another site that can make a
    browser request pages and measure their sizes guess the secrets (BREACH). Our cookies are strict, so such requests have
    no session; they are not compressed either. API answers stay uncompressed: their ETags name exact bytes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._plain, self._packed = app, GZipMiddleware(app, minimum_size=1024, compresslevel=5)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        packs = scope["type"] == "http" and not gate.is_for_programs(gate.path_of(scope))
        if packs and Headers(scope=scope).get("sec-fetch-site", "none") in ("none", "same-origin"):
            await self._packed(scope, receive, send)
        else:
            await self._plain(scope, receive, send)


def _in_our_words(error: Exception, request: Request) -> HeadwayError:
    match error:
        case RequestValidationError():
            return _invalid(error)
        case HTTPException(status_code=404):
            return UnknownPath(f"There is no page {redact(request.url.path)[:200]}.")
        case HTTPException(status_code=405):
            return WrongMethod(f"{redact(request.url.path)[:200]} does not support {request.method}.")
        case HTTPException(status_code=400):  # raised by the gate if the body was too large or too slow
            cause = error.__cause__
            return cause if isinstance(cause, HeadwayError) else UsageError("The request cannot be read.")
        case _:
            return problems.explained(error)


def _invalid(error: RequestValidationError) -> HeadwayError:
    """Name the first invalid field. The message does not repeat the submitted value."""
    first: Mapping[str, Any] = error.errors()[0] if error.errors() else {}
    where = ".".join(str(part) for part in first.get("loc", ())[1:])
    what = "The body" if not where else redact(where)[:100]
    return UsageError(f"{what} is invalid: {first.get('msg', 'it cannot be read')}.")


def app(
    *,
    database: str | None = None,
    redis: str | None = None,
    settings: Mapping[str, Value] | None = None,
    users: Users | None = None,
    hosts: Sequence[str] = (),
) -> Application:
    """Create the web application over the configured stores. A SQLite file is enough.

    ``database`` and ``redis`` override the settings of these names, ``settings`` any others. The rest comes from the
    environment and headway.toml. ``users`` maps a request to a user, for an application that has its own users.
    Without it, people log in with tokens (``headway token create``). ``hosts`` are further names of this machine that
    the ``Host`` header may contain. They matter only under `headway serve --no-auth`.
    """
    config = Config(cli={**(settings or {}), "database": database, "redis": redis})
    address = config.text("projects_redis") if config.is_set("projects_redis") else None
    reader = Reader(config, create=True, retry=RETRY)
    site = Site(config.text("database"), address, config, reader)
    return Application(site, users=users, hosts=hosts)


def with_flask(flask_app: Any, *, path: str = "/headway", **options: Any) -> Any:
    """Combine a Flask application and this one, under ``path``, into one ASGI application.

    The Flask application is called through WSGI in a thread and needs no change. Serve the result with any ASGI
    server, or with an ASGI worker of Gunicorn.
    """
    try:
        from a2wsgi import WSGIMiddleware
    except ImportError as error:
        raise MissingExtra("web", "Serving a Flask application") from error
    ours, theirs = app(**options), WSGIMiddleware(flask_app)
    root = "/" + path.strip("/")

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await ours(scope, receive, send)
            return
        below, outer = gate.path_of(scope), root_of(scope)
        if below == root or below.startswith(f"{root}/"):
            inner = f"{outer}{root}"
            await ours({**scope, "root_path": inner, "path": inner + (below[len(root) :] or "/")}, receive, send)
        else:
            await theirs(scope, receive, send)  # type: ignore[arg-type]  # a2wsgi has its own types for the same messages

    return both

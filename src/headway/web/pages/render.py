"""Rendering of pages: templates, formatting of numbers and times, and the common frame.

Templates escape all values, and an undefined name raises. The content security policy allows neither inline scripts and
styles nor other hosts.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.types import Scope

from headway import __version__
from headway.core.text import duration, pace, plural, roughly, took
from headway.errors import HeadwayError
from headway.telemetry import redact
from headway.views.jobs.series import Series
from headway.views.overview import JobLine, count_dead
from headway.web.api.problems import headers_of, status_of
from headway.web.auth.gate import path_of
from headway.web.auth.identity import root_of
from headway.web.pages import draw
from headway.web.pages.static import Assets
from headway.web.site import Site

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}

#: Placeholder for a missing value.
NOTHING = "\u2013"

#: The icon of browser tabs: the three bars of the logo.
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E"
    "%3Cpath fill='%234bb0bd' d='M0 2h7v4H0zM0 7h13v4H0zM0 12h18v4H0z'/%3E%3C/svg%3E"
)

#: The main navigation: (path, text, key after g).
LINKS = (
    ("/", "Overview", "o"),
    ("/alerts", "Alerts", "a"),
    ("/jobs", "Jobs", "j"),
    ("/dead", "Dead letters", "d"),
    ("/queues", "Queues", "q"),
    ("/tasks", "Tasks", "t"),
    ("/workers", "Workers", "w"),
    ("/states", "States", "s"),
    ("/performance", "Performance", "p"),
)
#: The navigation at the end of the page.
MORE = (
    ("/projects", "Projects"),
    ("/activity", "Activity"),
    ("/me", "My work"),
    ("/about", "About"),
)


@lru_cache(1)
def templates() -> Environment:
    """Return the template environment of this process."""
    made = Environment(
        loader=PackageLoader("headway.web.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(
        draw=draw,
        version=__version__,
        links=LINKS,
        more=MORE,
        sections=[*(link[:2] for link in LINKS[1:]), *MORE],
        plural=plural,
        query=query,
        icon=Markup(ICON),  # noqa: S704 - a constant
        top=highest_flow,
        top_of=highest_rate,
    )
    made.filters.update(
        num=num, dur=span, roughly=roughly, pace=pace, clock=clock, when=when, when_text=when_text,
        moment=moment, since=since, part=part,
        small=small, mb=mb, words=words, past=past, exact=exact, measured=measured, shell=shell,
        q=lambda text: quote(str(text), safe=""), dom=dom,
    )  # fmt: skip
    return made


#: Seconds for which the count of dead letters in the navigation is cached.
COUNTED_FOR = 5.0


class Pages:
    """Renders pages of one site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.assets = Assets()
        self._dead: tuple[float, int] | None = None

    async def count_dead(self) -> None:
        """Update the count of dead letters in the navigation; unknown while the store is unreachable."""
        if self._dead is not None and time.monotonic() - self._dead[0] < COUNTED_FOR:
            return
        self._dead = None
        with suppress(HeadwayError):
            self._dead = (time.monotonic(), await self.site.read(count_dead, self.site.reader))

    def answer(
        self,
        request: Request,
        template: str,
        *,
        status: int = 200,
        now: datetime | None = None,
        refresh: int = 0,
        **values: Any,
    ) -> HTMLResponse:
        """Render ``template`` with ``values``.

        ``refresh`` is the interval in seconds at which a script reloads content that the live path does not carry.
        """
        site, user = self.site, self.site.user(request)
        root = site.url(request, "")
        moment = now or datetime.now(UTC)

        def url(path: str) -> str:
            return root + path

        html = templates().get_template(template).render(
            request=request, user=user, csrf=site.csrf(request), flash=site.flash(request), url=url, live=site.live,
            asset=lambda name: root + self.assets.path(name), now=moment, refresh=refresh,
            store=redact(site.database),
            dead_letters=self._dead[1] if self._dead else 0, profile=site.settings.profile,
            later=lambda seconds: moment + timedelta(seconds=seconds),
            here="/" + path_of(request.scope).lstrip("/").partition("/")[0], **values,
        )  # fmt: skip
        return HTMLResponse(html, status, HEADERS)

    def door(
        self, scope: Scope, *, status: int = 200, headers: Mapping[str, str] | None = None, **values: Any
    ) -> HTMLResponse:
        """Render the login page, or the reason why access is refused."""
        root = root_of(scope)
        html = templates().get_template("door.html").render(
            {"error": None, "away": False, "confirm": None, **values}, url=lambda path: root + path,
            asset=lambda name: root + self.assets.path(name),
        )  # fmt: skip
        return HTMLResponse(html, status, {**HEADERS, **(headers or {})})

    def failed(self, request: Request, error: HeadwayError) -> HTMLResponse:
        """Render an error page. For an unreachable store it shows no numbers, which could be mistaken for zero."""
        status, headers = status_of(error), headers_of(error)
        if "headway.user" not in request.scope:
            title = "Store unreachable" if status == 503 else "Access denied"
            return self.door(
                request.scope, status=status, headers=headers, error=_shown(error), away=status == 503, title=title
            )
        away = status == 503
        answer = self.answer(
            request, "error.html", status=status, refresh=3 if away else 0, error=_shown(error), away=away
        )
        answer.headers.update(headers)
        return answer


def _shown(error: HeadwayError) -> HeadwayError:
    """Return the error with secrets masked."""
    return HeadwayError(redact(str(error)), hint=redact(error.hint))


# ---------------------------------------------------------------------------------------------------------------------
# Formatting


def num(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}"


def small(value: float | None) -> str:
    """Format a rate with up to two decimals."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.95 or value == 0 else f"{value:.2f}"


def part(done: float, total: float) -> str:
    """Format a percentage. It is 100% only for all, and 0% only for none."""
    if not total:
        return "0%"
    value = 100 * done / total
    if done < total:
        value = min(value, 99.9)
    return f"{value:.0f}%" if value in (0, 100) else f"{max(value, 0.1):.1f}%"


def span(seconds: float | None) -> str:
    """Format a duration."""
    return NOTHING if seconds is None else took(seconds)


def words(message: str) -> str:
    """Remove the coloured circle at the start of a message, because the page draws its own symbol."""
    return message.lstrip("\U0001f534\U0001f7e2\U0001f7e1⚫ ")


def past(series: Series, name: str = "done") -> list[int]:
    """Return one value of a series over time, without the incomplete last point."""
    return [getattr(point, name) for point in series.points[:-1]]


def highest_flow(flows: Mapping[str, tuple[Series, object]]) -> int:
    """Return the common scale of the queues' sparklines."""
    return max((value for series, _ in flows.values() for value in past(series)), default=0)


def highest_rate(lines: Iterable[JobLine]) -> int:
    """Return the common scale of the jobs' sparklines."""
    return max((value for line in lines if line.past for value in past(line.past)), default=0)


def measured(value: float | None, unit: str | None) -> str:
    """Format an alert value with its unit: seconds, a share or a count."""
    if value is None:
        return NOTHING
    return span(value) if unit == "s" else f"{100 * value:.0f}%" if unit == "share" else num(value)


def shell(words: Iterable[str]) -> str:
    """Quote a command for the shell. A key can neither start another command nor be read as an option."""
    head, *rest = words
    return shlex.join([head, *rest[:1], *(["--"] if any(word.startswith("-") for word in rest[1:]) else []), *rest[1:]])


def dom(name: object) -> str:
    """Return an element id for any name. It does not depend on the row's position."""
    return hashlib.sha256(str(name).encode("utf-8", "replace")).hexdigest()[:8]


def mb(size: int | None) -> str:
    """Format a size in bytes as megabytes."""
    return NOTHING if size is None else f"{size / 1e6:,.0f} MB"


def _time(at: datetime, text: str) -> Markup:
    """Return a time element. The script rewrites its text when the page shows local time."""
    return Markup("<time data-t={}>{}</time>").format(int(at.timestamp()), text)


def clock(at: datetime | None) -> str:
    """Return a time element with ``19:41``."""
    return NOTHING if at is None else _time(at, f"{at.astimezone(UTC):%H:%M}")


def moment(at: datetime) -> str:
    """Return a time element with ``19:41:07 UTC``."""
    return _time(at, f"{at.astimezone(UTC):%H:%M:%S} UTC")


def when(at: datetime | None, now: datetime) -> str:
    """Return a time element with the text of `when_text`."""
    return NOTHING if at is None else _time(at, when_text(at, now))


def when_text(at: datetime | None, now: datetime) -> str:
    """Format a time as ``15:31`` today, ``Friday 15:31`` this week, else ``2 Nov 15:31``."""
    if at is None:
        return NOTHING
    at = at.astimezone(UTC)
    days = (now.astimezone(UTC).date() - at.date()).days
    if days == 0:
        return f"{at:%H:%M}"
    if days == 1:
        return f"yesterday {at:%H:%M}"
    if 1 < days < 7:
        return f"{at:%A %H:%M}"
    return f"{at.day} {at:%b %H:%M}" if at.year == now.year else f"{at.day} {at:%b %Y}"


def exact(at: datetime | None, now: datetime) -> str:
    """Return a time element with the text of `when_text`, and seconds."""
    return NOTHING if at is None else _time(at, f"{when_text(at, now)}:{at.astimezone(UTC):%S}")


def since(at: datetime, now: datetime) -> str:
    """Format an age as ``14 s ago``; a future time as ``now``."""
    seconds = max(0.0, (now - at).total_seconds())
    return (
        "now" if seconds < 1 else f"{duration(round(seconds) if seconds < 10 else seconds).replace('.0 s', ' s')} ago"
    )


def query(request: Request, **changes: object) -> Markup:
    """Return the request's query string with ``changes``; an empty value removes its name."""
    values: Mapping[str, object] = {**request.query_params, **changes}
    kept = {name: value for name, value in values.items() if value not in (None, "")}
    return Markup("?") + urlencode(kept)

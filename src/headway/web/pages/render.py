"""From values to HTML: the templates, the words for numbers and times, and what every page has around it.

Templates escape everything, and a name that is missing is an error, not an empty place. A page is answered with a
content security policy that allows nothing inline and no other host.
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
from headway.views.overview import count_dead
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

#: What stands where there is no value.
NOTHING = "\u2013"

#: The links on top: (path, text, key after g). A phone shows the first four or five: the number of dead letters is among them.
LINKS = (
    ("/", "Overview", "o"),
    ("/jobs", "Jobs", "j"),
    ("/dead", "Dead letters", "d"),
    ("/queues", "Queues", "q"),
    ("/workers", "Workers", "w"),
    ("/states", "States", "s"),
    ("/performance", "Performance", "p"),
)
#: Below the page: what is asked for less often.
MORE = (
    ("/alerts", "Alerts"),
    ("/tasks", "Tasks"),
    ("/projects", "Projects"),
    ("/activity", "Activity"),
    ("/me", "My work"),
    ("/about", "About"),
)


@lru_cache(1)
def templates() -> Environment:
    """The templates, compiled once in a process."""
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
    )
    made.filters.update(
        num=num, dur=span, roughly=roughly, pace=pace, clock=clock, when=when, moment=moment, since=since, part=part,
        small=small, mb=mb, words=words, past=past, exact=exact, measured=measured, shell=shell,
        q=lambda text: quote(str(text), safe=""), dom=dom,
    )  # fmt: skip
    return made


#: Seconds for which the number beside *Dead letters* is good.
COUNTED_FOR = 5.0


class Pages:
    """What pages are made with: the site, the templates, the assets."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.assets = Assets()
        self._dead: tuple[float, int] | None = None

    async def count_dead(self) -> None:
        """How many dead letters there are, for the link on top of every page; unknown while the store is away."""
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
        """``template`` with ``values``. ``refresh``: seconds after which a script looks for what the socket does not say."""
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
        """What somebody sees who is not known yet: the login, or why they are not let in."""
        root = root_of(scope)
        html = templates().get_template("door.html").render(
            {"error": None, "away": False, "confirm": None, **values}, url=lambda path: root + path,
            asset=lambda name: root + self.assets.path(name),
        )  # fmt: skip
        return HTMLResponse(html, status, {**HEADERS, **(headers or {})})

    def failed(self, request: Request, error: HeadwayError) -> HTMLResponse:
        """A page about an error. A store that is away is not an empty one: nothing is shown that could be taken for zero."""
        status, headers = status_of(error), headers_of(error)
        if "headway.user" not in request.scope:
            title = "The store does not answer" if status == 503 else "Not let in"
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
    """Without what must not be seen."""
    return HeadwayError(redact(str(error)), hint=redact(error.hint))


# ---------------------------------------------------------------------------------------------------------------------
# Words


def num(value: float) -> str:
    return f"{value:,.0f}"


def small(value: float | None) -> str:
    """A rate with as many digits as it deserves."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.95 or value == 0 else f"{value:.2f}"


def part(done: float, total: float) -> str:
    """A percentage that never says 100 before it is all, nor 0 when there is something."""
    if not total:
        return "0%"
    value = 100 * done / total
    if done < total:
        value = min(value, 99.9)
    return f"{value:.0f}%" if value in (0, 100) else f"{max(value, 0.1):.1f}%"


def span(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return took(seconds)


def words(message: str) -> str:
    """A message without the coloured circle it may begin with: the page has a sign of its own."""
    return message.lstrip("\U0001f534\U0001f7e2\U0001f7e1⚫ ")


def past(series: Series, name: str = "done") -> list[int]:
    """One number over time, without the last stretch: it is not over, and in a line it would look like a fall."""
    return [getattr(point, name) for point in series.points[:-1]]


def measured(value: float | None, unit: str | None) -> str:
    """A value of a rule in what it is measured in: time, a share, or a number of things."""
    if value is None:
        return NOTHING
    return span(value) if unit == "s" else f"{100 * value:.0f}%" if unit == "share" else num(value)


def shell(words: Iterable[str]) -> str:
    """A command to copy into a shell. What a key says there is a word of it, and never another command or an option."""
    head, *rest = words
    return shlex.join([head, *rest[:1], *(["--"] if any(word.startswith("-") for word in rest[1:]) else []), *rest[1:]])


def dom(name: object) -> str:
    """Return an element id for a name of any characters: the same on every page, wherever its row stands."""
    return hashlib.sha256(str(name).encode("utf-8", "replace")).hexdigest()[:8]


def mb(size: int | None) -> str:
    return NOTHING if size is None else f"{size / 1e6:,.0f} MB"


def clock(at: datetime | None) -> str:
    return NOTHING if at is None else f"{at.astimezone(UTC):%H:%M}"


def moment(at: datetime) -> str:
    """``19:41:07 UTC``: where one time stands for all others of a page, it says its zone."""
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"


def when(at: datetime | None, now: datetime) -> str:
    """``15:31`` today, ``Friday 15:31`` this week, else ``2 Nov 15:31``."""
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
    """The same with its seconds, where several things happen in a minute."""
    return when(at, now) if at is None or not f"{at:%S}" else f"{when(at, now)}:{at.astimezone(UTC):%S}"


def since(at: datetime, now: datetime) -> str:
    """``14 s ago``; nothing is ever in the future."""
    seconds = max(0.0, (now - at).total_seconds())
    return (
        "now" if seconds < 1 else f"{duration(round(seconds) if seconds < 10 else seconds).replace('.0 s', ' s')} ago"
    )


def query(request: Request, **changes: object) -> Markup:
    """The address's own question with ``changes``; an empty value leaves its name out."""
    values: Mapping[str, object] = {**request.query_params, **changes}
    kept = {name: value for name, value in values.items() if value not in (None, "")}
    return Markup("?") + urlencode(kept)

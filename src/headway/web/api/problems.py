"""Errors as HTTP answers for programs, in one shape; a page for people has the same status.

{"schema": "headway.error/1", "error": {"type": "NotFound", "message": "...", "hint": "...", "exit_code": 2}}
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from headway import errors
from headway.errors import HeadwayError, Refused, UsageError
from headway.telemetry import Log, error_message, redact

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from headway.views.shape import Json

log = Log("web")

SCHEMA: Final = "headway.error/1"


class Unauthenticated(UsageError):
    """Nobody knows who is asking."""


class Forbidden(Refused):
    """Whoever is asking may not do this."""


class Throttled(Refused):
    """Too many wrong tokens came from there."""


class TooLarge(UsageError):
    """What was sent is larger than anything that is asked for here."""


class TooSlow(UsageError):
    """What was sent did not come to its end in time."""


class NotAcceptable(UsageError):
    """What was sent is not of the kind that is asked for here."""


class UnknownPath(errors.NotFound):
    """There is nothing under this address."""


class WrongMethod(UsageError):
    """What is under this address is asked in another way."""


#: The status of each error; a class that is not here has that of the class above it.
STATUS: Final[dict[type[BaseException], int]] = {
    Unauthenticated: 401,
    Forbidden: 403,
    WrongMethod: 405,
    TooSlow: 408,
    TooLarge: 413,
    NotAcceptable: 415,
    Throttled: 429,
    UsageError: 400,
    errors.MissingExtra: 501,
    errors.ConfigError: 500,  # the server's own settings, not what was asked
    errors.NotFound: 404,
    Refused: 409,
    errors.Unavailable: 503,
    errors.Stopping: 503,
    errors.ServerRefused: 502,
    errors.StorageError: 503,  # full, damaged, moved away: nothing of it is to be seen until somebody put it right
    HeadwayError: 500,
}


def status_of(error: BaseException) -> int:
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def explained(error: Exception) -> HeadwayError:
    """An error in our words. One that nobody expected is logged in full, and tells a stranger nothing."""
    if isinstance(error, HeadwayError):
        return error
    log.warning("a request failed", error=error_message(error))
    return HeadwayError("The server failed at this request.", hint="What failed is in its log.")


def as_json(error: HeadwayError) -> Json:
    return {
        "schema": SCHEMA,
        "error": {
            "type": type(error).__name__,
            "message": redact(str(error)),
            "hint": redact(error.hint),
            "exit_code": error.exit_code,
        },
    }


def answer(error: Exception) -> Response:
    """For programs."""
    known = explained(error)
    text = json.dumps(as_json(known), ensure_ascii=True)
    return Response(text, status_of(known), headers_of(known), media_type="application/json")


async def deny(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    """Refuse a live connection as a plain request would be. A server that cannot say more than no says that (403)."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 4401 if response.status_code == 401 else 4403})


def headers_of(error: HeadwayError) -> dict[str, str]:
    """What an answer about it says besides."""
    status = status_of(error)
    found = {"Cache-Control": "no-store"}
    if status == 401:
        found["WWW-Authenticate"] = 'Bearer realm="headway"'
    if status in (429, 503):
        found["Retry-After"] = "60" if status == 429 else "1"
    return found

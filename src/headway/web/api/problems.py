"""Errors as HTTP responses. The API answers in JSON; an error page has the same status.

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
    """The request has no valid token, session or ticket."""


class Forbidden(Refused):
    """The user has no right to do this."""


class Throttled(Refused):
    """Too many wrong tokens came from this address."""


class TooLarge(UsageError):
    """The request body exceeds the size limit."""


class TooSlow(UsageError):
    """The request body did not arrive in time."""


class NotAcceptable(UsageError):
    """The request body has the wrong content type."""


class UnknownPath(errors.NotFound):
    """The path does not exist."""


class WrongMethod(UsageError):
    """The path does not support this method."""


#: The status of each error. Subclasses have the status of their nearest listed base class.
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
    errors.ConfigError: 500,  # the server's settings are wrong, not the request
    errors.NotFound: 404,
    Refused: 409,
    errors.Unavailable: 503,
    errors.Stopping: 503,
    errors.ServerRefused: 502,
    errors.StorageError: 503,  # full, damaged or missing: unavailable until an operator repairs it
    HeadwayError: 500,
}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def explained(error: Exception) -> HeadwayError:
    """Return an error that may be shown. An unexpected one is logged and replaced, because it may contain secrets."""
    if isinstance(error, HeadwayError):
        return error
    log.warning("a request failed", error=error_message(error))
    return HeadwayError("The server failed to process this request.", hint="See its log for the cause.")


def as_json(error: HeadwayError) -> Json:
    """Return the JSON document of an error, with secrets masked."""
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
    """Return the JSON response for an error."""
    known = explained(error)
    text = json.dumps(as_json(known), ensure_ascii=True)
    return Response(text, status_of(known), headers_of(known), media_type="application/json")


async def deny(scope: Scope, receive: Receive, send: Send, response: Response) -> None:
    """Refuse a WebSocket with an HTTP response, or with a close code if the server does not support that."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 4401 if response.status_code == 401 else 4403})


def headers_of(error: HeadwayError) -> dict[str, str]:
    """Return the headers of an error response."""
    status = status_of(error)
    found = {"Cache-Control": "no-store"}
    if status == 401:
        found["WWW-Authenticate"] = 'Bearer realm="headway"'
    if status in (429, 503):
        found["Retry-After"] = "60" if status == 429 else "1"
    return found

"""Turn HTTP responses that ask for patience into `headway.RetryLater`.

    response = headway.retry_after(client.get(url))    # 429 and 503 raise RetryLater

Works with the responses of httpx, requests, aiohttp, urllib3 and http.client, and imports none of them.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

from headway.errors import LONGEST_DELAY, InvalidInput, RetryLater, is_delay

T = TypeVar("T")

#: Too Many Requests, and Service Unavailable.
_LATER = (429, 503)


def retry_after(
    response: T, *, default: float = 30.0, cap: float = 3600.0, scope: Literal["item", "job"] = "item"
) -> T:
    """Return the response, or raise `RetryLater` for status 429 or 503.

    The delay is that of ``Retry-After``, in seconds or as an HTTP date, and at most ``cap`` seconds. Without a readable
    header it is ``default`` seconds. ``scope="job"`` makes the whole job wait.
    """
    for name, seconds in (("default", default), ("cap", cap)):
        if not is_delay(seconds):
            raise InvalidInput(f"{name} must be from 0 to {LONGEST_DELAY:,.0f} seconds (got {seconds!r:.60}).")
    status = getattr(response, "status_code", None)
    if status is None:
        status = getattr(response, "status", None)
    headers: Any = getattr(response, "headers", None)
    if isinstance(status, bool) or not isinstance(status, int) or not hasattr(headers, "get"):
        raise InvalidInput(
            f"retry_after needs an HTTP response with a status and headers (got {type(response).__name__}).",
            hint="Pass the response of httpx, requests, aiohttp or urllib3. Await it first if it is a coroutine.",
        )
    if status not in _LATER:
        return response
    asked = _seconds(str(headers.get("Retry-After") or ""), str(headers.get("Date") or ""))
    raise RetryLater(min(cap, default if asked is None else asked), f"the server answered {status}", scope)


def _seconds(text: str, server_date: str) -> float | None:
    """Return the seconds of a Retry-After header; None if it cannot be read.

    A date is compared with the server's own ``Date`` header, so that a wrong clock on either side does no harm.
    """
    if re.fullmatch(r"\s*\d{1,12}(\.\d{1,9})?\s*", text, re.ASCII):
        return float(text)
    wanted = _moment(text)
    if wanted is None:
        return None
    seconds = (wanted - (_moment(server_date) or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _moment(text: str) -> datetime | None:
    """Parse an HTTP date; it is in UTC."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment

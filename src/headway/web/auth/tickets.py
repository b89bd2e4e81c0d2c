"""Tickets: short-lived signed logins that an application issues for its own users.

    KEY = os.environ["HEADWAY_WEB_KEYS"]                                  # shared with the server, 32 characters or more
    redirect("/headway/enter?ticket=" + headway.web.ticket(str(current_user.id), key=KEY))   # opens a browser's session
    {"Authorization": "Bearer " + headway.web.ticket("anna", key=KEY)}                       # one request of a program

A ticket is JSON with an HMAC-SHA256 signature. It contains the user's name and role, the server it is for (``audience``), its
expiry and an id. The server accepts each id once, for one session or one request, so a ticket may appear in a URL.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from headway.core.ids import UserId, user_text
from headway.errors import ConfigError, InvalidInput
from headway.web.site import NAME, RIGHTS, Role, User, is_name

PREFIX: Final = "hwt_"
AUDIENCE: Final = "headway"
#: Maximum lifetime of a ticket, and tolerated clock difference, in seconds.
LONGEST: Final = 300.0
SKEW: Final = 60.0
#: Minimum length of a key, and maximum length of a ticket, in characters.
KEY: Final = 32
SIZE: Final = 8192


class Ticket(NamedTuple):
    """The content of a valid ticket."""

    id: str
    user: User


def ticket(name: UserId, role: Role = "user", *, key: str, audience: str = AUDIENCE, seconds: float = 60.0) -> str:
    """Return a ticket for a user. ``name`` is the ``user_id`` of their tasks; ``seconds`` is the ticket's lifetime."""
    name = user_text(name)  # type: ignore[assignment]  # checked next
    if not is_name(name):
        raise InvalidInput(
            f"name must be a string of 1 to {NAME} printable characters.",
            hint="Use the user_id of submit(user_id=...).",
        )
    if role not in RIGHTS:
        raise InvalidInput(f"role must be {', '.join(RIGHTS)} (got {role!s:.40}).")
    if not (math.isfinite(seconds) and 0 < seconds <= LONGEST):
        raise InvalidInput(f"seconds must be above 0 and at most {LONGEST:.0f} (got {seconds:g}).")
    said = {"id": secrets.token_hex(16), "name": name, "role": role, "aud": audience, "exp": time.time() + seconds}
    body = base64.urlsafe_b64encode(json.dumps(said, ensure_ascii=True).encode()).decode().rstrip("=")
    return f"{PREFIX}{body}.{_signed(checked(key), body)}"


def read(keys: Sequence[str], text: str, *, audience: str = AUDIENCE) -> Ticket | None:
    """Return the content of a ticket; None unless one of ``keys`` signed it, for us, and it has not expired."""
    if not is_signed(keys, text):
        return None
    body = text.removeprefix(PREFIX).partition(".")[0]
    try:
        said = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return None
    return _ticket(said, audience) if isinstance(said, dict) else None


def is_signed(keys: Sequence[str], text: str) -> bool:
    """Return whether one of ``keys`` signed ``text``. The body is not parsed."""
    if not text.startswith(PREFIX) or len(text) > SIZE:
        return False
    body, _, signature = text.removeprefix(PREFIX).partition(".")
    signatures = [_signed(checked(key), body) for key in keys]
    return any(hmac.compare_digest(one.encode(), signature.encode("utf-8", "replace")) for one in signatures)


def _ticket(said: dict[str, Any], audience: str) -> Ticket | None:
    """Validate the content. A signature alone proves only that the key's owner wrote it."""
    id, name, role, end = said.get("id"), said.get("name"), said.get("role"), said.get("exp")
    well = (
        isinstance(id, str) and 16 <= len(id) <= 64 and id.isalnum() and id.isascii()
        and is_name(name) and isinstance(role, str) and role in RIGHTS
        and said.get("aud") == audience
        and isinstance(end, float) and time.time() < end <= time.time() + LONGEST + SKEW
    )  # fmt: skip
    return Ticket(str(id), User(str(name), role)) if well else None  # type: ignore[arg-type]  # one of the four


def checked(key: str) -> str:
    """Return a signing key. Raises `ConfigError` if it is too short."""
    if len(key) < KEY:
        raise ConfigError(
            f"A key in web_keys must have at least {KEY} characters (got {len(key)}).",
            hint="Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return key


def _signed(key: str, body: str) -> str:
    return hmac.new(key.encode(), f"ticket:{body}".encode("utf-8", "replace"), "sha256").hexdigest()

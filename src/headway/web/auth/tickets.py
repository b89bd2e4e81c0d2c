"""Tickets: an application tells the server who one of its own users is, for a minute, in a text that nobody else can write.

    KEY = os.environ["HEADWAY_WEB_KEYS"]                                  # shared with the server, 32 characters or more
    redirect("/headway/enter?ticket=" + headway.web.ticket(str(current_user.id), key=KEY))   # opens a browser's session
    {"Authorization": "Bearer " + headway.web.ticket("anna", key=KEY)}                       # one request of a program

A ticket is JSON and its HMAC-SHA256: the user's name and role, the server it is for (``audience``), its expiry, and an id by
which the server takes it once: for one session or one request. So it may appear in an address.
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
#: Seconds that a ticket is good for, at most; and by which two clocks may differ.
LONGEST: Final = 300.0
SKEW: Final = 60.0
#: Characters that a key has at least, and a ticket at most.
KEY: Final = 32
SIZE: Final = 8192


class Ticket(NamedTuple):
    """What a ticket says."""

    id: str
    user: User


def ticket(name: UserId, role: Role = "user", *, key: str, audience: str = AUDIENCE, seconds: float = 60.0) -> str:
    """A ticket for one of your users: ``name`` is the ``user_id`` that their tasks are submitted with."""
    name = user_text(name)  # type: ignore[assignment]  # checked next
    if not is_name(name):
        raise InvalidInput(
            f"A name is a text of 1 to {NAME} printable characters.",
            hint="Use the text that submit(user_id=...) is given.",
        )
    if role not in RIGHTS:
        raise InvalidInput(f"{role!s:.40} is no role.", hint=f"Use one of {', '.join(RIGHTS)}.")
    if not (math.isfinite(seconds) and 0 < seconds <= LONGEST):
        raise InvalidInput(f"A ticket is good for more than 0 and at most {LONGEST:.0f} s.")
    said = {"id": secrets.token_hex(16), "name": name, "role": role, "aud": audience, "exp": time.time() + seconds}
    body = base64.urlsafe_b64encode(json.dumps(said, ensure_ascii=True).encode()).decode().rstrip("=")
    return f"{PREFIX}{body}.{_signed(checked(key), body)}"


def read(keys: Sequence[str], text: str, *, audience: str = AUDIENCE) -> Ticket | None:
    """What a ticket says that one of ``keys`` signed for us and that has not ended; None for anything else."""
    if not is_signed(keys, text):
        return None
    body = text.removeprefix(PREFIX).partition(".")[0]
    try:
        said = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return None
    return _ticket(said, audience) if isinstance(said, dict) else None


def is_signed(keys: Sequence[str], text: str) -> bool:
    """Return whether one of ``keys`` signed it, whatever it says. Nothing of the body is read before."""
    if not text.startswith(PREFIX) or len(text) > SIZE:
        return False
    body, _, signature = text.removeprefix(PREFIX).partition(".")
    signatures = [_signed(checked(key), body) for key in keys]
    return any(hmac.compare_digest(one.encode(), signature.encode("utf-8", "replace")) for one in signatures)


def _ticket(said: dict[str, Any], audience: str) -> Ticket | None:
    """Of a text that was signed: another program with the key may have written something else into it."""
    id, name, role, end = said.get("id"), said.get("name"), said.get("role"), said.get("exp")
    well = (
        isinstance(id, str) and 16 <= len(id) <= 64 and id.isalnum() and id.isascii()
        and is_name(name) and isinstance(role, str) and role in RIGHTS
        and said.get("aud") == audience
        and isinstance(end, float) and time.time() < end <= time.time() + LONGEST + SKEW
    )  # fmt: skip
    return Ticket(str(id), User(str(name), role)) if well else None  # type: ignore[arg-type]  # one of the four


def checked(key: str) -> str:
    if len(key) < KEY:
        raise ConfigError(
            f"A key of the web application has {KEY} characters or more.",
            hint="Make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return key


def _signed(key: str, body: str) -> str:
    return hmac.new(key.encode(), f"ticket:{body}".encode("utf-8", "replace"), "sha256").hexdigest()

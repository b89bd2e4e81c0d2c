"""Signatures of webhooks: HMAC-SHA256 over the time and the body.

The header ``Headway-Signature`` is ``t=SECONDS,v1=HEX``: the Unix time of the delivery, and the HMAC-SHA256 of
``SECONDS.BODY`` under the setting ``webhook_secret``. The time keeps a recorded request from being sent again later.
"""

from __future__ import annotations

import hashlib
import hmac
import time

#: The header of a signed webhook.
HEADER = "Headway-Signature"
#: Seconds for which a receiver accepts a signature.
TOLERANCE = 300.0


def sign(secret: str, body: bytes, at: int) -> str:
    """Return the header's value for a body sent at a Unix time."""
    return f"t={at},v1={_digest(secret, body, str(at))}"


def verify(secret: str, header: str, body: bytes, *, tolerance: float = TOLERANCE, now: float | None = None) -> bool:
    """Return whether ``header`` signs ``body`` and is at most ``tolerance`` seconds old."""
    parts = dict(part.strip().partition("=")[::2] for part in header.split(","))
    at, given = parts.get("t", ""), parts.get("v1", "")
    if not (at.isascii() and at.isdecimal() and len(at) <= 12):
        return False
    fresh = abs((time.time() if now is None else now) - int(at)) <= tolerance
    return hmac.compare_digest(_digest(secret, body, at).encode(), given.encode("utf-8", "replace")) and fresh


def _digest(secret: str, body: bytes, at: str) -> str:
    return hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()

"""Bearer tokens of the shop: JSON Web Tokens signed by HMAC-SHA256. A real application would use PyJWT."""

from __future__ import annotations

import base64
import hmac
import json
import time
from typing import Any

AUDIENCE = "captions"
HEADER = {"alg": "HS256", "typ": "JWT"}


def issue(subject: str, *, secret: str, seconds: float = 3600) -> str:
    """Return a token that names an account."""
    claims = {"sub": subject, "aud": AUDIENCE, "exp": time.time() + seconds}
    body = f"{_encode(HEADER)}.{_encode(claims)}"
    return f"{body}.{_signature(body, secret)}"


def subject(token: str, *, secret: str) -> str | None:
    """Return the account that a valid token names, else None.

    The signature is checked before anything of the token is read, and always by HS256: what the token's header names
    as its algorithm decides nothing.
    """
    body, _, signature = token.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signature(body, secret).encode()):
        return None
    claims = _decode(body.partition(".")[2])
    if claims.get("aud") != AUDIENCE or claims.get("exp", 0) <= time.time():
        return None
    return str(claims["sub"])


def _signature(body: str, secret: str) -> str:
    return _text(hmac.digest(secret.encode(), body.encode(), "sha256"))


def _encode(value: dict[str, Any]) -> str:
    return _text(json.dumps(value, separators=(",", ":")).encode())


def _decode(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return found


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")

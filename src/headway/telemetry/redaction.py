"""Passwords, tokens and keys stay out of what is stored, logged and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache

_SENSITIVE = (
    r"(?:pass(?:words?|wd|phrase)?|pwd|secrets?|token|credentials?|auth|signature"
    r"|(?:api|access|private|secret|client|master|signing|encryption|account)[-_]?key)"
)
# No pattern begins with a repetition, and what comes from outside is repeated once: the time grows with the text, not
# with its square, so that an error of a megabyte cannot hold up a run.


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """What a secret looks like, and what is left of it. Compiled when first needed: that takes longer than a short command."""
    return (
        # scheme://user:password@host; a password may hold anything but spaces and quotes, a port is none
        (
            re.compile(r"""(://[^\s:/@'"]{0,256}):(?!\d{1,5}(?![^\s/?#,'"]))[^\s'"]{1,512}@""", re.IGNORECASE),
            r"\1:***@",
        ),
        (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "***"),
        (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/=._~-]{6,}", re.IGNORECASE), r"\1 ***"),
        (
            re.compile(
                r"""(\b(?:proxy-)?authorization\\*['"]?\s*[:=]\s*\\*['"]?\w{1,32}\s)\s*[^\s'"\\]+""", re.IGNORECASE
            ),
            r"\1***",
        ),
        (re.compile(r"""(\b(?:set-)?cookie\\*['"]?\s*[:=]\s*\\*['"]?)[^\r\n'"\\]+""", re.IGNORECASE), r"\1***"),
        # password=..., "api_key": "...", X-Auth-Token: ..., also as JSON inside JSON
        (
            re.compile(
                rf"""({_SENSITIVE}\b\\*['"]?\s*[:=]\s*)(?!(?:bearer|basic)\b)"""
                r"""(\\*"[^"]*"|\\*'[^']*'|[^\s,;&)}\]]+)""",
                re.IGNORECASE,
            ),
            r"\1***",
        ),
        # Well-known shapes of keys.
        (re.compile(r"\b(?:sk|pk|rk)[-_](?:live|test|proj|ant)?[-_A-Za-z0-9]{16,}"), "***"),
        (
            re.compile(
                r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abposr]-[\w-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16})"
            ),
            "***",
        ),
        (re.compile(r"\bAIza[\w-]{30,64}"), "***"),
        (re.compile(r"\beyJ[\w-]{8,512}\.[\w-]{8,8192}\.[\w-]{0,4096}"), "***"),
    )


# Nothing but a digit or a separator may follow: an author, a passenger and a count of tokens are no secrets.
_SECRET_VARIABLE = re.compile(rf"{_SENSITIVE}(?![a-z])|[_-]key$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values of environment variables whose name says *secret*; short ones would blank out ordinary words."""
    values = {
        value for name, value in environment.items() if len(value) >= 8 and value[0] != "/" and names_a_secret(name)
    }
    return tuple(sorted(values, key=len, reverse=True))


def names_a_secret(name: str) -> bool:
    """Whether what goes by this name is not to be shown: ``password``, ``API_TOKEN``, ``ENCRYPTION_KEY``."""
    return _SECRET_VARIABLE.search(_CAMEL.sub("_", name)) is not None


_known_secrets: tuple[str, ...] | None = None


def redact(text: str) -> str:
    """``text`` without passwords, tokens and keys: by shape, by name, and by the value of secret variables."""
    global _known_secrets
    if _known_secrets is None:
        _known_secrets = _secret_values(os.environ)
    for secret in _known_secrets:
        text = text.replace(secret, "***")
    for pattern, replacement in _patterns():
        text = pattern.sub(replacement, text)
    return text


def forget_secrets() -> None:
    """Read the environment again at the next `redact` (after settings were reloaded)."""
    global _known_secrets
    _known_secrets = None

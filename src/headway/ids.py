"""Names that come from outside, checked once, at the edge."""

from __future__ import annotations

import re

from headway.errors import InvalidInput

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = re.compile(r"\.{1,2}|__.*__")


def check_id(value: object, what: str) -> str:
    """``value`` if it can be an id in every store we have (SQL, Redis keys, Firestore documents, file names, URLs)."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or _RESERVED.fullmatch(value):
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        raise InvalidInput(
            f"{shown} cannot be {what}.",
            hint="Use 1 to 128 letters, digits, dots, dashes or underscores (not '.', '..' or '__x__').",
        )
    return value

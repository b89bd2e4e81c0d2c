"""Names that come from outside, checked once, at the edge."""

from __future__ import annotations

import re

from headway.errors import InvalidInput

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = re.compile(r"\.{1,2}|__.*__")


def check_id(value: object, what: str) -> str:
    """``value`` if it can be an id in every store we have (SQL, Redis keys, Firestore documents, file names, URLs)."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or _RESERVED.fullmatch(value):
        # Only a text is shown: another object's repr may be endless, or fail (an int of 5000 digits).
        shown = f"A {type(value).__name__}" if not isinstance(value, str) else repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidInput(
            f"{shown} cannot be {what}.",
            hint="Use 1 to 128 letters, digits, dots, dashes or underscores (not '.', '..' or '__x__').",
        )
    return value

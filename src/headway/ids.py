"""Names that come from outside, checked once, at the edge."""

from __future__ import annotations

import re
from uuid import UUID

from headway.errors import InvalidInput

#: A user as applications know one. An int or UUID and its text are the same user.
UserId = str | int | UUID
#: Characters of a user id.
USER_ID_LIMIT = 256

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = re.compile(r"\.{1,2}|__.*__")


def check_id(value: object, what: str) -> str:
    """``value`` if it can be an id in every store we have (SQL, Redis keys, Firestore documents, file names, URLs)."""
    if not isinstance(value, str) or not _ID.fullmatch(value) or _RESERVED.fullmatch(value):
        raise _refused(
            value, what, "Use 1 to 128 letters, digits, dots, dashes or underscores (not '.', '..' or '__x__')."
        )
    return value


def user_text(value: object) -> object:
    """Return an int or a UUID as the text that is stored for this user, anything else unchanged."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**USER_ID_LIMIT:
        return str(int(value))
    return value


def check_user_id(value: object, what: str = "a user id") -> str:
    """Return the text that is stored for a user, or raise `InvalidInput`. Texts are compared exactly."""
    text = user_text(value)
    if not isinstance(text, str) or not 1 <= len(text) <= USER_ID_LIMIT or not text.isprintable():
        raise _refused(
            value, what, f"Use an int, a UUID, or a text of 1 to {USER_ID_LIMIT} characters without control characters."
        )
    return str.__str__(text)  # a subclass, as a member of an enum, may write itself differently


def _refused(value: object, what: str, hint: str) -> InvalidInput:
    # Only a text is shown: another object's repr may be endless, or fail (an int of 5000 digits).
    shown = f"A {type(value).__name__}" if not isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidInput(f"{shown} cannot be {what}.", hint=hint)

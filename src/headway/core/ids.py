"""Validate ids that come from outside."""

from __future__ import annotations

import re
from uuid import UUID

from headway.errors import InvalidInput

#: A user id. An int or a UUID and its text are the same user.
UserId = str | int | UUID
#: Maximum characters of a user id.
USER_ID_LIMIT = 256

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = re.compile(r"\.{1,2}|__.*__")


def check_id(value: object, what: str) -> str:
    """Return ``value`` if it is a valid id in every store, else raise `InvalidInput`.

    The same rule covers SQL, Redis keys, Firestore documents, file names and URLs. ``what`` describes the value in the
    error message.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value) or _RESERVED.fullmatch(value):
        raise _refused(
            value, what, "Use 1 to 128 letters, digits, dots, dashes or underscores (not '.', '..' or '__x__')."
        )
    return value


def user_text(value: object) -> object:
    """Convert an int or a UUID to the stored text. Return any other value unchanged."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**USER_ID_LIMIT:
        return str(int(value))
    return value


def check_user_id(value: object, what: str = "a user id") -> str:
    """Return the text stored for a user, or raise `InvalidInput`. User ids are compared exactly."""
    text = user_text(value)
    if not isinstance(text, str) or not 1 <= len(text) <= USER_ID_LIMIT or not text.isprintable():
        raise _refused(
            value, what, f"Use an int, a UUID, or a text of 1 to {USER_ID_LIMIT} characters without control characters."
        )
    return str.__str__(text)  # a subclass such as an enum member may override __str__


def _refused(value: object, what: str, hint: str) -> InvalidInput:
    # Only texts are shown: the repr of other objects may be huge or raise (an int of 5000 digits).
    shown = f"A {type(value).__name__}" if not isinstance(value, str) else repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidInput(f"{shown} cannot be {what}.", hint=hint)

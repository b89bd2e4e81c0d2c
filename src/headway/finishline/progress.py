"""Values of the finish line: statuses, outcomes, progress and the identity of items."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from headway.core.ids import check_id
from headway.errors import InvalidInput, StoreCorrupt

#: Item numbers below this may be bits of a bitmap of at most 8 MB. Larger numbers are stored as text.
BITMAP_LIMIT = 2**26
#: Numbers from here on lose digits in Lua, whose numbers are doubles.
TOTAL_LIMIT = 2**53


class Status(StrEnum):
    """The status of a project. Each comment names what sets it."""

    INITIALIZING = "INITIALIZING"  # create
    CRAWLING = "CRAWLING"  # set_status, while items are discovered; the project cannot complete
    PROCESSING = "PROCESSING"  # finish_crawl, or set_status
    DONE = "DONE"  # the finish line only, and for good
    FAILED = "FAILED"  # set_status, by an operator; the project cannot complete
    NOT_FOUND = "NOT_FOUND"  # the answer for an unknown project; never stored


class Outcome(StrEnum):
    """The result of a call."""

    CREATED = "CREATED"  # create: the project is new
    EXISTS = "EXISTS"  # create: the project existed and is unchanged
    COUNTED = "COUNTED"  # an item was counted
    DUPLICATE = "DUPLICATE"  # the item had been counted before; nothing changed
    UPDATED = "UPDATED"  # total or status were set
    COMPLETED = "COMPLETED"  # this call completed the project; exactly one call per project returns it
    LATE = "LATE"  # the project was DONE already; nothing changed


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call. ``done`` is the count after it, ``counted`` the number of new items."""

    outcome: Outcome
    done: int
    counted: int

    @property
    def completed(self) -> bool:
        """Whether this call completed the project."""
        return self.outcome is Outcome.COMPLETED


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a project. ``live`` is False if it comes from the SQL record because Redis no longer has it.

    ``restored`` is the time of the checkpoint from which the counts were rebuilt. Counts between it and the loss of Redis
    are missing.
    """

    status: Status
    total: int = 0
    done: int = 0
    errors: int = 0
    live: bool = True
    restored: datetime | None = None

    @property
    def percent(self) -> float:
        """Percentage of the total, at most 100; 0 while the total is unknown."""
        return min(100.0, self.done / self.total * 100) if self.total > 0 else 0.0

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
        """Return the progress as JSON values."""
        return {
            "status": self.status.value,
            "total": self.total,
            "done": self.done,
            "errors": self.errors,
            "percent": round(self.percent, 2),
            "live": self.live,
            "restored": self.restored.isoformat() if self.restored else None,
        }


NOT_FOUND = Progress(Status.NOT_FOUND, live=False)


def from_hash(project_id: str, fields: Mapping[str, str]) -> Progress | None:
    """Parse the hash of a project; None if it is empty. Raises `StoreCorrupt` for a damaged hash, never a wrong zero."""
    if not fields:
        return None
    try:
        restored = float(fields["restored"]) if "restored" in fields else None
        return Progress(
            Status(fields["status"]),
            _whole(fields["total"]),
            _whole(fields["done"]),
            _whole(fields["errors"]),
            restored=datetime.fromtimestamp(restored, UTC) if restored is not None else None,
        )
    except (KeyError, ValueError, OverflowError, OSError) as error:
        raise corrupt(project_id) from error


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,16}", text):
        raise ValueError(text)
    return int(text)


def corrupt(project_id: str) -> StoreCorrupt:
    """Return the error for a project whose keys in Redis are damaged."""
    return StoreCorrupt(
        f"The state of project {project_id!r} in Redis is damaged.",
        hint=f"Delete the key smap:proj:{project_id}. With a database the project is rebuilt from there.",
    )


def checked_project(project_id: str) -> str:
    """Check a project id and return it as an exact `str`: the member of a StrEnum has two spellings."""
    return str.__str__(check_id(project_id, "a project id"))


def identity(item_id: int | str) -> str:
    """Return the identity of an item: ``#17`` or ``$text``. 17 and "17" are the same item, as JSON may change the type."""
    if type(item_id) is int and 0 <= item_id < BITMAP_LIMIT:
        return f"#{item_id}"
    text = _text(item_id)
    if not 1 <= len(text) <= 512 or not (text.isprintable() or not any(map(_is_control, text))):
        raise InvalidInput(
            f"{text[:40]!r} cannot be an item id.", hint="Use 1 to 512 characters, none of them a control character."
        )
    if text.isascii() and text.isdecimal() and len(text) <= 8 and (text[0] != "0" or text == "0"):
        number = int(text)
        if number < BITMAP_LIMIT:
            return f"#{number}"
    raw = text.encode()
    if len(raw) > 32:  # a digest, so that a URL costs as much as a short id; no short id has 33 characters
        return "$=" + hashlib.blake2b(raw, digest_size=16).hexdigest()
    return "$" + text


def _text(item_id: object) -> str:
    """Return the id as an exact `str`, without calling methods of a subclass such as an enum."""
    if isinstance(item_id, str):
        return str.__str__(item_id)
    if isinstance(item_id, int) and not isinstance(item_id, bool):
        if abs(int(item_id)) >= 10**512:  # too long anyway, and Python refuses to convert such numbers
            raise InvalidInput("The item id has too many digits.", hint="Use up to 512 digits.")
        return int.__repr__(item_id)
    raise InvalidInput(f"A {type(item_id).__name__} cannot be an item id.", hint="Use an integer or a string.")


def _is_control(character: str) -> bool:
    """Return whether it is a control character, a surrogate or a line separator. Joiners and direction marks are allowed."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def checked_total(total: int) -> int:
    """Check a total. Raises `InvalidInput` unless it is an integer from 0 to 2^53."""
    if type(total) is not int or not 0 <= total < TOTAL_LIMIT:
        shown = (
            str(total)
            if type(total) is int and -TOTAL_LIMIT < total < 2 * TOTAL_LIMIT
            else f"This {type(total).__name__}"
        )
        raise InvalidInput(f"{shown} cannot be a total.", hint="Use an integer from 0 to 2^53.")
    return total


def checked_status(status: Status | str) -> Status:
    """Check a status that callers may set. Raises `InvalidInput` for DONE, NOT_FOUND and unknown words."""
    try:
        known = Status(status)
    except ValueError:
        known = Status.NOT_FOUND
    if known in (Status.DONE, Status.NOT_FOUND):
        raise InvalidInput(
            f"{status!s:.40} cannot be set as a status.",
            hint="Use INITIALIZING, CRAWLING, PROCESSING or FAILED. The finish line itself sets DONE.",
        )
    return known

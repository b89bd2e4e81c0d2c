"""The words of the finish line: statuses, outcomes, progress, and what makes an item the same item."""

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

#: Item numbers below this may be kept in a bitmap, of at most 8 MB; larger ones are texts.
BITMAP_LIMIT = 2**26
#: A total beyond this would lose its last digit in Lua, whose numbers are doubles.
TOTAL_LIMIT = 2**53


class Status(StrEnum):
    """Where a project stands."""

    INITIALIZING = "INITIALIZING"  # create
    CRAWLING = "CRAWLING"  # set_status, by whoever discovers items; it cannot complete while it is here
    PROCESSING = "PROCESSING"  # finish_crawl, or set_status
    DONE = "DONE"  # the finish line alone, once and for good
    FAILED = "FAILED"  # set_status, by an operator who gave up; it does not complete from here
    NOT_FOUND = "NOT_FOUND"  # nobody: it is the answer about a project that is not there


class Outcome(StrEnum):
    """What a call did."""

    CREATED = "CREATED"  # create: it was not there before
    EXISTS = "EXISTS"  # create: it was there and was left as it is
    COUNTED = "COUNTED"  # an item was counted
    DUPLICATE = "DUPLICATE"  # the item had been counted before; nothing changed
    UPDATED = "UPDATED"  # total or status were set
    COMPLETED = "COMPLETED"  # the project became DONE by this call; one call per project answers so
    LATE = "LATE"  # total or status came when the project was DONE; nothing changed


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call did, and ``done`` right after it, by the same step. ``counted``: items that were new."""

    outcome: Outcome
    done: int
    counted: int

    @property
    def completed(self) -> bool:
        return self.outcome is Outcome.COMPLETED


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a project is. ``live`` is False when the SQL record answers for a project Redis has let go.

    ``restored`` is set when the counts were rebuilt from a checkpoint of that time: what was counted between it
    and the loss is missing.
    """

    status: Status
    total: int = 0
    done: int = 0
    errors: int = 0
    live: bool = True
    restored: datetime | None = None

    @property
    def percent(self) -> float:
        """Share of the total that is through, at most 100; 0 while the total is not known."""
        return min(100.0, self.done / self.total * 100) if self.total > 0 else 0.0

    def as_dict(self) -> dict[str, str | int | float | bool | None]:
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
    """What the hash says; None when there is none. A hash that is not ours is an error, never a zero."""
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
    return StoreCorrupt(
        f"The state of project {project_id!r} in Redis is damaged.",
        hint=f"Delete the key smap:proj:{project_id}: with a database it is rebuilt from there.",
    )


def checked_project(project_id: str) -> str:
    """An id as a plain text: that of an enum's member would be written by its name in one place, its value in another."""
    return str.__str__(check_id(project_id, "a project id"))


def identity(item_id: int | str) -> str:
    """``#17`` or ``$text``. 17 and "17" are the same item, for an id that went through JSON may be either."""
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
    if len(raw) > 32:  # a URL costs what a short id costs; a short id never looks like this, for 33 is too long
        return "$=" + hashlib.blake2b(raw, digest_size=16).hexdigest()
    return "$" + text


def _text(item_id: object) -> str:
    """As a plain text, also from a subclass (an enum's member); its own methods are not asked."""
    if isinstance(item_id, str):
        return str.__str__(item_id)
    if isinstance(item_id, int) and not isinstance(item_id, bool):
        if abs(int(item_id)) >= 10**512:  # its text would be refused, and Python refuses to make it
            raise InvalidInput("This number cannot be an item id: it is too long.", hint="Use up to 512 digits.")
        return int.__repr__(item_id)
    raise InvalidInput(f"A {type(item_id).__name__} cannot be an item id.", hint="Use a whole number or a text.")


def _is_control(character: str) -> bool:
    """Control characters, surrogates, line separators. Joiners and marks of direction belong to texts."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def checked_total(total: int) -> int:
    if type(total) is not int or not 0 <= total < TOTAL_LIMIT:
        shown = (
            str(total)
            if type(total) is int and -TOTAL_LIMIT < total < 2 * TOTAL_LIMIT
            else f"This {type(total).__name__}"
        )
        raise InvalidInput(f"{shown} cannot be a total.", hint="Use a whole number from 0 to 2^53.")
    return total


def checked_status(status: Status | str) -> Status:
    try:
        known = Status(status)
    except ValueError:
        known = Status.NOT_FOUND
    if known in (Status.DONE, Status.NOT_FOUND):
        raise InvalidInput(
            f"{status!s:.40} cannot be set as a status.",
            hint="Use INITIALIZING, CRAWLING, PROCESSING or FAILED; DONE is decided by the finish line.",
        )
    return known

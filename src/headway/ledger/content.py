"""What an item consists of: JSON in a form that is the same for equal values, its fingerprint, and bounded meta."""

from __future__ import annotations

import json
import re
from hashlib import blake2b

from headway.errors import InvalidInput
from headway.telemetry import error_message

#: Bytes of JSON kept as an item's meta.
META_LIMIT = 600

#: A NUL character in JSON text. After an even number of backslashes: the six characters backslash u0000 are no NUL.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: object, what: str = "A payload") -> str:
    """``value`` as JSON text that is the same for equal values: keys sorted, no spaces, no NaN, no lone surrogates."""
    try:
        text = _ENCODER.encode(value)
        text.encode()
    except Exception as error:  # also what a class of its own raises while it is read
        raise InvalidInput(
            f"{what} cannot be kept as JSON: {error_message(error)}.", hint="Use dicts, lists, strings and numbers."
        ) from error
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidInput(f"{what} contains a NUL character, which PostgreSQL cannot keep.", hint="Remove it.")
    return text


def fingerprint(text: str) -> int:
    """63 bits of the content's hash: a changed item is noticed, and the number fits both engines."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_intact(payload: object, mark: int | None) -> bool:
    """Whether a stored payload is the one whose fingerprint was stored beside it; without a fingerprint, whether it is
    JSON at all. A foreign hand or a flipped bit changes one and not the other. (SQLite keeps bytes in a column of texts
    if somebody puts them there.)"""
    if payload is None:
        return mark is None
    if not isinstance(payload, str):
        return False
    if mark is not None:
        return fingerprint(payload) == mark
    try:
        json.loads(payload)
    except (ValueError, RecursionError):
        return False
    return True


def bounded_meta(meta: object) -> str | None:
    """Meta as JSON of at most `META_LIMIT` bytes; what is longer is cut and says so."""
    if meta is None:
        return None
    text = canonical(meta, "Meta")
    size = len(text.encode())
    if size <= META_LIMIT:
        return text
    cut = text.encode()[: META_LIMIT - 80].decode(errors="ignore")
    while len((short := canonical({"truncated": size, "text": cut})).encode()) > META_LIMIT:
        cut = cut[: len(cut) * 9 // 10]  # quotes inside the text grow when they are escaped
    return short

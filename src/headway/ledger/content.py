"""The content of an item: canonical JSON, its fingerprint, and bounded meta."""

from __future__ import annotations

import json
import re
from hashlib import blake2b

from headway.errors import InvalidInput
from headway.telemetry import error_message

#: Bytes of JSON kept as an item's meta.
META_LIMIT = 600

#: A NUL escape in JSON text. After an odd number of further backslashes, the characters ``u0000`` are not an escape.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical(value: object, what: str = "A payload") -> str:
    """Encode ``value`` as JSON that is identical for equal values: keys sorted, no spaces, no NaN, no lone surrogates."""
    try:
        text = _ENCODER.encode(value)
        text.encode()
    except Exception as error:  # also whatever a custom class raises while it is encoded
        raise InvalidInput(
            f"{what} cannot be kept as JSON: {error_message(error)}.", hint="Use dicts, lists, strings and numbers."
        ) from error
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidInput(f"{what} contains a NUL character, which PostgreSQL cannot keep.", hint="Remove it.")
    return text


def fingerprint(text: str) -> int:
    """Return 63 bits of the content's hash, which fit both engines. A changed item has another fingerprint."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def is_intact(payload: object, mark: int | None) -> bool:
    """Return whether a stored payload matches its fingerprint. Without one, check that it is valid JSON.

    An outside edit or a flipped bit changes one but not the other. SQLite may also return bytes from a text column.
    """
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
    """Encode meta as JSON of at most `META_LIMIT` bytes. Longer meta is truncated and marked."""
    if meta is None:
        return None
    text = canonical(meta, "Meta")
    size = len(text.encode())
    if size <= META_LIMIT:
        return text
    cut = text.encode()[: META_LIMIT - 80].decode(errors="ignore")
    while len((short := canonical({"truncated": size, "text": cut})).encode()) > META_LIMIT:
        cut = cut[: len(cut) * 9 // 10]  # escaping quotes makes the text longer
    return short

"""How a payload is kept: as JSON, or encrypted and bound to its task.

With keys, the text is Fernet's (AES and HMAC): altered, truncated, or moved to another task it is refused. The first key
writes, all of them read, so a key is rotated by putting the new one first. Nothing is ever unpickled.

Beside the payload stands its fingerprint, by which a task that is submitted again is recognised. A bare digest of a short
payload can be guessed, so with keys it is an HMAC, under a key derived from the payload's and bound to the task: it tells
nobody what the payload is, nor that two tasks have the same.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from headway.errors import InvalidInput, MissingExtra, StorageError

#: Bytes of a payload as JSON.
PAYLOAD_LIMIT = 262_144


class Codec(Protocol):
    """Turns a payload's JSON into what is stored, and back. ``task_id`` is what it is bound to."""

    def encode(self, task_id: str, text: str) -> str: ...

    def decode(self, task_id: str, stored: str) -> str: ...

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        """What recognises this content: the first is stored, and a stored one that is any of them is the same."""
        ...


class PlainCodec:
    """JSON as it is: for a database that is trusted with it."""

    def encode(self, task_id: str, text: str) -> str:
        return text

    def decode(self, task_id: str, stored: str) -> str:
        if stored.startswith("fernet:"):
            raise StorageError(
                f"The payload of task {task_id} is encrypted and there is no key.",
                hint="Give the keys it was written with: HEADWAY_QUEUE_KEYS",
            )
        return stored

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        return [_digest(kind, text)]


class FernetCodec:
    """See the module. ``keys`` are Fernet keys (``Fernet.generate_key()``), the newest first."""

    def __init__(self, keys: Sequence[str | bytes]) -> None:
        try:
            from cryptography.fernet import Fernet, MultiFernet
        except ImportError as error:
            raise MissingExtra("crypto", "Encryption of payloads") from error
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except (ValueError, TypeError):
            # The key itself is never shown, nor the library's error, which may show it.
            raise InvalidInput(
                "A key for payloads is not a Fernet key.",
                hint='Make one: python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"',
            ) from None
        self._for_fingerprints = [
            hmac.digest(base64.urlsafe_b64decode(key), b"headway: fingerprints of tasks", "sha256") for key in keys
        ]

    def encode(self, task_id: str, text: str) -> str:
        return "fernet:" + self._fernet.encrypt(f"{task_id}\n{text}".encode()).decode("ascii")

    def decode(self, task_id: str, stored: str) -> str:
        from cryptography.fernet import InvalidToken

        if not stored.startswith("fernet:"):
            raise _refused(task_id, "is not encrypted although keys are set")
        try:
            owner, _, text = self._fernet.decrypt(stored.removeprefix("fernet:")).decode().partition("\n")
        except (InvalidToken, UnicodeDecodeError):
            raise _refused(task_id, "was altered, or written with a key that is not given") from None
        if owner != task_id:
            raise _refused(task_id, "belongs to another task")
        return text

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        """Under every key, so that a task is recognised after a rotation; and the bare one, of the time before keys."""
        said = f"{task_id}\n{kind}\n{text}".encode()
        keyed = [f"hmac:{hmac.digest(key, said, 'sha256').hex()[:32]}" for key in self._for_fingerprints]
        return [*keyed, _digest(kind, text)]


def _refused(task_id: str, why: str) -> StorageError:
    return StorageError(
        f"The payload of task {task_id} {why}.",
        hint="It is not run. Check HEADWAY_QUEUE_KEYS, and who writes to the store.",
    )


def write_payload(payload: Any, *, limit: int = PAYLOAD_LIMIT) -> str:
    """The payload as JSON text, or one clear error."""
    try:
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
        size = len(text.encode())
    except RecursionError:
        raise InvalidInput("The payload is nested too deeply, or contains itself.") from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The payload is not JSON: {error}.",
            hint="Use dicts with text keys, lists, texts, numbers, booleans, None.",
        ) from None
    if size > limit:
        raise InvalidInput(
            f"The payload has {size:,} bytes; at most {limit:,} are taken.",
            hint="Put large data into a file or an object store and give its address.",
        )
    if holds_zero(text):
        raise InvalidInput("The payload holds the character U+0000, which PostgreSQL cannot keep.")
    return text


def holds_zero(text: str) -> bool:
    """Whether JSON holds the character U+0000: written by an escape whose backslash is not itself escaped."""
    return "\\u0000" in text and _ZERO.search(text) is not None


_ZERO = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()[:32]

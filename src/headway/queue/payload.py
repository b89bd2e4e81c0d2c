"""Payloads as they are stored: as JSON, or encrypted and bound to their task. Nothing is ever unpickled.

With keys, the text is encrypted with Fernet (AES and HMAC). A text that was altered, truncated or moved to another task is
refused. The first key encrypts and all of them decrypt, so a key is rotated by adding the new one in front.

A fingerprint is stored beside the payload. It recognises a task that is submitted again. A plain digest of a short payload
can be guessed, so with keys it is an HMAC, under a derived key and bound to the task. It reveals neither the payload nor that
two tasks have the same one.
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

#: Maximum bytes of a payload as JSON.
PAYLOAD_LIMIT = 262_144


class Codec(Protocol):
    """Converts JSON text to the stored text and back. The stored text is bound to ``task_id``."""

    def encode(self, task_id: str, text: str) -> str:
        """Return the text to store."""
        ...

    def decode(self, task_id: str, stored: str) -> str:
        """Return the JSON text. Raises `StorageError` if the stored text was altered or belongs to another task."""
        ...

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        """Return the fingerprints of this content. The first is stored; a stored one equal to any of them matches."""
        ...


class PlainCodec:
    """Stores JSON unencrypted, for a trusted database."""

    def encode(self, task_id: str, text: str) -> str:
        return text

    def decode(self, task_id: str, stored: str) -> str:
        if stored.startswith("fernet:"):
            raise StorageError(
                f"The payload of task {task_id} is encrypted, and no key is set.",
                hint="Set the keys it was written with: HEADWAY_QUEUE_KEYS",
            )
        return stored

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        return [_digest(kind, text)]


class FernetCodec:
    """Encrypts with Fernet; see the module. ``keys``: Fernet keys (``Fernet.generate_key()``), the newest first."""

    def __init__(self, keys: Sequence[str | bytes]) -> None:
        try:
            from cryptography.fernet import Fernet, MultiFernet
        except ImportError as error:
            raise MissingExtra("crypto", "Encryption of payloads") from error
        try:
            self._fernet = MultiFernet([Fernet(key) for key in keys])
        except (ValueError, TypeError):
            # Show neither the key nor the library's error, which may contain it.
            raise InvalidInput(
                "A payload key is not a Fernet key.",
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
            raise _refused(task_id, "was altered, or encrypted with a key that is not set") from None
        if owner != task_id:
            raise _refused(task_id, "belongs to another task")
        return text

    def fingerprints(self, task_id: str, kind: str, text: str) -> Sequence[str]:
        """Return one per key, for tasks from before a rotation, and the plain digest, for tasks from before encryption."""
        content = f"{task_id}\n{kind}\n{text}".encode()
        keyed = [f"hmac:{hmac.digest(key, content, 'sha256').hex()[:32]}" for key in self._for_fingerprints]
        return [*keyed, _digest(kind, text)]


def _refused(task_id: str, why: str) -> StorageError:
    return StorageError(
        f"The payload of task {task_id} {why}.",
        hint="It is not run. Check HEADWAY_QUEUE_KEYS, and who writes to the database.",
    )


def write_payload(payload: Any, *, limit: int = PAYLOAD_LIMIT) -> str:
    """Encode a payload as JSON text. Raises `InvalidInput`."""
    try:
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
        size = len(text.encode())
    except RecursionError:
        raise InvalidInput("The payload is nested too deeply, or contains itself.") from None
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"The payload is not JSON: {error}.",
            hint="Use dicts with text keys, lists, strings, numbers, booleans and None.",
        ) from None
    if size > limit:
        raise InvalidInput(
            f"The payload has {size:,} bytes; at most {limit:,} are allowed.",
            hint="Put large data into a file or an object store, and submit its address.",
        )
    if holds_zero(text):
        raise InvalidInput("The payload contains the character U+0000, which PostgreSQL cannot store.")
    return text


def holds_zero(text: str) -> bool:
    """Return whether JSON text contains U+0000: an escape whose backslash is not itself escaped."""
    return "\\u0000" in text and _ZERO.search(text) is not None


_ZERO = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def result_id(task_id: str) -> str:
    """Return the id that a stored result is bound to. Task ids have no space, so a result cannot pass as a payload."""
    return f"{task_id} result"


def _digest(kind: str, text: str) -> str:
    return hashlib.sha256(f"{kind}\n{text}".encode()).hexdigest()[:32]

"""The stream ``smap:events``: reading entries, and the order of their ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from headway._redis import EVENTS
from headway.errors import InvalidInput
from headway.events.envelope import Event, from_fields

CONSUMER = "relay"

#: Exceptions from reading an entry that is not a valid event.
DAMAGE = (KeyError, ValueError, TypeError, OverflowError, OSError, RecursionError, InvalidInput)

Entry = tuple[str, Mapping[bytes, bytes]]


class Stream:
    """Reads of the stream. Replies are bytes: any program may append bytes that are not UTF-8."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.key = EVENTS()

    def raw(self, *words: object) -> Any:
        """Run a command and return its reply undecoded."""
        return self._client.execute_command(*words, NEVER_DECODE=True)

    def range(self, first: str, last: str, count: int) -> list[Entry]:
        """Return up to ``count`` entries between two ids."""
        reply = self.raw("XRANGE", self.key, first, last, "COUNT", count)
        return [(handle.decode(), fields or {}) for handle, fields in reply]

    def read(self, sink: str, since: str, limit: int) -> list[Entry]:
        """Read entries as a sink: those behind ``since`` that it has not acknowledged, or with ``>`` new ones."""
        reply = self.raw("XREADGROUP", "GROUP", sink, CONSUMER, "COUNT", limit, "STREAMS", self.key, since)
        return [(handle.decode(), fields or {}) for _, entries in reply or [] for handle, fields in entries]

    def unsettled(self, group: Mapping[str, Any]) -> str:
        """Return the first entry id that the group may not have settled."""
        pending = self._client.xpending(self.key, group["name"])
        return str(pending["min"] if pending["pending"] else after(group["last-delivered-id"]))


def readable(entries: Sequence[Entry]) -> Iterator[Event]:
    """Yield the events of the valid entries."""
    for _, fields in entries:
        try:
            yield event_of(fields)
        except DAMAGE:
            continue  # it was put aside and logged


def event_of(fields: Mapping[bytes, bytes]) -> Event:
    """Return the event of an entry. Raises one of `DAMAGE` for an invalid one."""
    known = {name.decode(): value.decode() for name, value in fields.items()}
    return from_fields(known, datetime.fromtimestamp(float(known["at"]), UTC), json.loads(known["data"]))


def position(entry: str) -> tuple[int, int]:
    """Return an entry id as numbers, in the order of the stream."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def after(entry: str) -> str:
    """Return the smallest id behind ``entry``."""
    milliseconds, number = position(entry)
    return f"{milliseconds}-{number + 1}"

"""Remove settled entries from the stream, after their deliveries are recorded in SQL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headway._redis import EVENTS_HOLD
from headway.events.envelope import Event
from headway.events.store.redis_stream import Entry, Stream, after, position, readable
from headway.telemetry import Log

log = Log("events")

#: Entries removed at a time.
TRIM = 1_000


class SinkNotes(Protocol):
    """Records outside Redis which sink took which event."""

    def note(self, sink: str, events: Sequence[Event]) -> None:
        """Record that the sink took these events."""
        ...

    def taken(self, sink: str, events: Sequence[Event]) -> set[str]:
        """Return the ids of those events that the sink took before."""
        ...


class Trimmer:
    """Removes entries that every sink has settled. ``jobs`` maps the sinks of this outbox to their job.

    ``subscribe`` creates the group of a sink again after Redis lost the stream.
    """

    def __init__(
        self,
        client: Any,
        jobs: Mapping[str, str | None],
        subscribe: Callable[[str], None],
        on_delivered: Callable[[Sequence[Event]], None] | None,
        notes: SinkNotes | None,
    ) -> None:
        self._client, self._stream = client, Stream(client)
        self._key = self._stream.key
        self._jobs, self._subscribe = jobs, subscribe
        self._on_delivered, self._notes = on_delivered, notes
        self._noted: dict[str, str] = {}  # sink -> last entry recorded in `notes`
        self._lock = threading.Lock()
        self._noting: threading.Thread | None = None
        self._noting_since = 0.0

    def forget_notes(self, sink: str) -> None:
        """Record the deliveries of a sink from the start of the stream again."""
        self._noted.pop(sink, None)

    def trim(self, patience: float) -> None:
        """Remove the entries that every group has settled. Wait up to ``patience`` seconds until they are noted."""
        with self._lock:
            noting = self._noting
            if noting is None or not noting.is_alive():
                settled = self._settled()
                if self._on_delivered is None:
                    if settled:
                        self._remove(settled[-1][0])
                    return
                taken = self._taken(settled[-1][0] if settled else "0-0")
                if not settled and not taken:
                    return
                noting = threading.Thread(
                    target=self._note, args=(settled, taken), name="headway-events-note", daemon=True
                )
                noting.start()
                self._noting, self._noting_since = noting, time.monotonic()
            # The note may wait for a database, and sinks must not: each note is waited for only once.
            left = self._noting_since + patience - time.monotonic()
        noting.join(max(0.0, left))

    def _settled(self) -> list[Entry]:
        if not self._client.xlen(self._key):  # XINFO fails if the stream does not exist
            return []
        groups = self._client.xinfo_groups(self._key)
        if not groups:
            return []
        missing = self._jobs.keys() - {str(group["name"]) for group in groups}
        if missing:
            # The server lost the stream. These sinks were not served since, so its entries wait for them too.
            for sink in missing:
                self._subscribe(sink)
            return []
        if self._client.exists(EVENTS_HOLD()):
            return []  # sinks of other relays may not have subscribed again yet
        bounds = [self._stream.unsettled(group) for group in groups]
        return self._stream.range("-", f"({min(bounds, key=position)}", TRIM)

    def _taken(self, after: str) -> dict[str, list[Entry]]:
        """Return per sink the entries behind ``after`` that it has settled and `notes` does not have yet."""
        if self._notes is None or not self._client.xlen(self._key):
            return {}
        found = {}
        for group in self._client.xinfo_groups(self._key):
            sink = str(group["name"])
            if sink in self._jobs:
                first = max(after, self._noted.get(sink, after), key=position)
                found[sink] = self._stream.range(f"({first}", f"({self._stream.unsettled(group)}", TRIM)
        return {sink: entries for sink, entries in found.items() if entries}

    def _note(self, settled: Sequence[Entry], taken: Mapping[str, Sequence[Entry]]) -> None:
        """Note deliveries, then remove settled entries. Runs in its own thread: the database may not answer."""
        assert self._on_delivered is not None
        try:
            for sink, entries in taken.items():
                assert self._notes is not None
                self._notes.note(sink, list(readable(entries)))
                self._noted[sink] = entries[-1][0]
            if not settled:
                return
            self._on_delivered(list(readable(settled)))
            still = self._settled()  # again: a sink that subscribed meanwhile waits for what it found
            if still:
                self._remove(min(settled[-1][0], still[-1][0], key=position))
        except Exception as error:  # noqa: BLE001  # on any error the entries stay here and are noted later
            log.warning("delivered events stay in the stream until they are noted", key=self._key, error=str(error))

    def _remove(self, last: str) -> None:
        self._client.xtrim(self._key, minid=after(last), approximate=False)

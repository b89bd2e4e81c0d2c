"""The sink ``https://user:password@host/path``: POST of the event."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from headway.events import signature
from headway.events.deadline import Watchdog
from headway.events.envelope import Event
from headway.events.sinks.sink import DEADLINE, digest


class WebhookSink:
    """Sends the event as JSON by POST. Any 2xx answer means delivered. ``Headway-Event-Id`` has the event id.

    With a ``secret`` the request is signed (see `headway.events.signature`).
    """

    job: str | None = None
    types: Sequence[str] | None = None

    def __init__(self, url: str, timeout: float = DEADLINE, *, secret: str | None = None) -> None:
        from headway.events.sinks import http  # imported late: http.client takes a quarter of a command's start

        self._post = http.post
        self._address = http.Address(url)
        self._timeout = timeout
        self._secret = secret
        self._watchdog = Watchdog()
        self.name = f"webhook {self._address.host} {digest(url)}"

    def deliver(self, event: Event) -> None:
        """Send the event. Raises when the receiver did not answer 2xx within the deadline."""
        # A header holds printable ASCII only. The body has the exact id.
        id = event.id.encode("ascii", "backslashreplace").decode()
        headers = {
            "Content-Type": "application/json", "Headway-Event-Id": re.sub(r"[^\x20-\x7e]", "?", id),
            "User-Agent": "headway",
        }  # fmt: skip
        body = event.as_json().encode()
        if self._secret:
            headers[signature.HEADER] = signature.sign(self._secret, body, int(time.time()))
        self._post(self._address, body, headers, seconds=self._timeout, watchdog=self._watchdog)

    def close(self) -> None:
        """Abort a running request."""
        self._watchdog.abort()

"""The sink ``slack://HOST/PATH``: a message to an incoming webhook of Slack, Mattermost, Rocket.Chat or Zulip."""

from __future__ import annotations

import json
from collections.abc import Sequence

from headway.errors import InvalidInput
from headway.events.deadline import Watchdog
from headway.events.envelope import Event
from headway.events.sinks.messages import NOTIFIED, message_of
from headway.events.sinks.sink import DEADLINE, digest

#: Address scheme -> scheme of the request. Plain HTTP is for servers in the own network.
SCHEMES = {"slack": "https", "slack+http": "http"}


class SlackSink:
    """Sends one sentence per event as ``{"text": ...}``. Takes the types in `NOTIFIED` unless the address names others.

    The path of the address is the secret of the webhook. Names, logs and errors show the host only.
    """

    job: str | None = None

    def __init__(self, address: str, timeout: float = DEADLINE, *, web_url: str | None = None) -> None:
        from headway.events.sinks import http  # imported late: http.client takes a quarter of a command's start

        scheme, _, rest = address.partition("://")
        if not rest.partition("/")[2]:
            raise InvalidInput(
                "A Slack address has no path.", hint="Use slack://hooks.slack.com/services/T000/B000/SECRET"
            )
        self._post = http.post
        self._address = http.Address(f"{SCHEMES[scheme]}://{rest}")
        self._timeout = timeout
        self._web_url = web_url
        self._watchdog = Watchdog()
        self.types: Sequence[str] | None = NOTIFIED
        self.name = f"slack {self._address.host} {digest(address)}"

    def deliver(self, event: Event) -> None:
        """Send the message. Raises when the server did not answer 2xx within the deadline."""
        message = message_of(event, self._web_url)
        text = "\n".join((message.sentence, *message.actions))
        # Slack reads these three characters as markup; with them escaped no text can mention @channel.
        for character, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(character, escaped)
        body = json.dumps({"text": text}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "headway"}
        self._post(self._address, body, headers, seconds=self._timeout, watchdog=self._watchdog)

    def close(self) -> None:
        """Abort a running request."""
        self._watchdog.abort()

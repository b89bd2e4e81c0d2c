"""Events: decided once, delivered at least once to every sink, always with the same id.

One path for all of them: an envelope (`Event`) is written to an outbox where the decision is made, and a `Relay` takes
it to every sink, each at its own pace. docs/reference/events.md has the types, the guarantees and how to write a receiver.

    with events.start(database=database, sinks=events.open_sinks("log: https://example.org/hook")):
        ...

What decides events (`Event`, `append`) is loaded at once, what delivers them when it is first used: every command
decides, few deliver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.events.envelope import Event as Event
from headway.events.envelope import Json as Json
from headway.events.sql import SqlOutbox as SqlOutbox
from headway.events.sql import append as append
from headway.events.sql import append_all as append_all
from headway.events.sql import purge as purge
from headway.events.sql import purge_page as purge_page

if TYPE_CHECKING:
    from headway.events.outbox import Backlog as Backlog
    from headway.events.outbox import EventRefused as EventRefused
    from headway.events.outbox import Outbox as Outbox
    from headway.events.outbox import Refused as Refused
    from headway.events.redis import RedisOutbox as RedisOutbox
    from headway.events.relay import Relay as Relay
    from headway.events.relay import start as start
    from headway.events.schema import TYPES as TYPES
    from headway.events.schema import schema as schema
    from headway.events.signature import verify as verify
    from headway.events.sinks import CallableSink as CallableSink
    from headway.events.sinks import CommandSink as CommandSink
    from headway.events.sinks import LogSink as LogSink
    from headway.events.sinks import RedisChannelSink as RedisChannelSink
    from headway.events.sinks import RedisStreamSink as RedisStreamSink
    from headway.events.sinks import Sink as Sink
    from headway.events.sinks import WebhookSink as WebhookSink
    from headway.events.sinks import open_sink as open_sink
    from headway.events.sinks import open_sinks as open_sinks

#: name -> the module it comes from.
_PLACES = {
    "Backlog": "outbox",
    "CallableSink": "sinks",
    "CommandSink": "sinks",
    "EventRefused": "outbox",
    "LogSink": "sinks",
    "Outbox": "outbox",
    "RedisChannelSink": "sinks",
    "RedisOutbox": "redis",
    "RedisStreamSink": "sinks",
    "Refused": "outbox",
    "Relay": "relay",
    "Sink": "sinks",
    "TYPES": "schema",
    "WebhookSink": "sinks",
    "open_sink": "sinks",
    "open_sinks": "sinks",
    "schema": "schema",
    "start": "relay",
    "verify": "signature",
}

__all__ = [  # noqa: PLE0604 - exactly the names above
    "Event",
    "Json",
    "SqlOutbox",
    "append",
    "append_all",
    "purge",
    "purge_page",
    *_PLACES,
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'headway.events' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"headway.events.{_PLACES[name]}"), name)
    globals()[name] = value
    return value

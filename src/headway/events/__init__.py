"""Events: decided once, delivered at least once to every sink, always with the same id.

An `Event` is appended to an outbox by the transaction that decides it. A `Relay` delivers it to every sink, each at its
own pace. docs/reference/events.md has the types, the guarantees and how to write a receiver.

    with events.start(database=database, sinks=events.open_sinks("log: https://example.org/hook")):
        ...

    envelope   what an event looks like          outbox     the contract of an outbox
    store      outboxes in SQL and in Redis      relay      delivers from outboxes to sinks
    sinks      receivers, by their address       deadline   a time limit for a whole delivery

Only what appends events is imported at once; what delivers them is imported on first use. Every command appends, few
deliver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.events.envelope import Event as Event
from headway.events.envelope import Json as Json
from headway.events.store.sql import SqlOutbox as SqlOutbox
from headway.events.store.sql import append as append
from headway.events.store.sql import append_all as append_all
from headway.events.store.sql import purge as purge
from headway.events.store.sql import purge_page as purge_page

if TYPE_CHECKING:
    from headway.events.outbox import Backlog as Backlog
    from headway.events.outbox import EventRefused as EventRefused
    from headway.events.outbox import Outbox as Outbox
    from headway.events.outbox import Refused as Refused
    from headway.events.relay import Relay as Relay
    from headway.events.relay import start as start
    from headway.events.schema import TYPES as TYPES
    from headway.events.schema import schema as schema
    from headway.events.signature import verify as verify
    from headway.events.sinks import CallableSink as CallableSink
    from headway.events.sinks import CommandSink as CommandSink
    from headway.events.sinks import LogSink as LogSink
    from headway.events.sinks import MailSink as MailSink
    from headway.events.sinks import RedisChannelSink as RedisChannelSink
    from headway.events.sinks import RedisStreamSink as RedisStreamSink
    from headway.events.sinks import Sink as Sink
    from headway.events.sinks import SlackSink as SlackSink
    from headway.events.sinks import WebhookSink as WebhookSink
    from headway.events.sinks import configured_sinks as configured_sinks
    from headway.events.sinks import open_configured as open_configured
    from headway.events.sinks import open_sink as open_sink
    from headway.events.sinks import open_sinks as open_sinks
    from headway.events.sinks import test_event as test_event
    from headway.events.store.redis import RedisOutbox as RedisOutbox

#: Name -> the module that is imported when the name is first used.
_LAZY = {
    "Backlog": "outbox",
    "CallableSink": "sinks",
    "CommandSink": "sinks",
    "EventRefused": "outbox",
    "LogSink": "sinks",
    "MailSink": "sinks",
    "Outbox": "outbox",
    "RedisChannelSink": "sinks",
    "RedisOutbox": "store.redis",
    "RedisStreamSink": "sinks",
    "Refused": "outbox",
    "Relay": "relay",
    "Sink": "sinks",
    "SlackSink": "sinks",
    "TYPES": "schema",
    "WebhookSink": "sinks",
    "configured_sinks": "sinks",
    "open_configured": "sinks",
    "open_sink": "sinks",
    "open_sinks": "sinks",
    "test_event": "sinks",
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
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headway.events' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"headway.events.{_LAZY[name]}"), name)
    globals()[name] = value
    return value

"""Sinks: receivers of events. Each delivers one event at a time, within its deadline, and raises when that failed.

sink        the contract of a sink, and sinks that are functions of the program or the log
webhook     POST of the event                  slack   a chat message
redis       a channel or a stream              mail    an e-mail
command     a program with the event on stdin
addresses   from an address to its sink        http    one POST within one deadline
"""

from headway.events.sinks.addresses import SinkSettings, configured_sinks, open_configured, open_sink, open_sinks
from headway.events.sinks.command import CommandSink
from headway.events.sinks.mail import MailServer, MailSink
from headway.events.sinks.messages import test_event
from headway.events.sinks.redis import RedisChannelSink, RedisStreamSink
from headway.events.sinks.sink import CallableSink, ConfiguredSink, LogSink, Sink, wants
from headway.events.sinks.slack import SlackSink
from headway.events.sinks.webhook import WebhookSink

__all__ = [
    "CallableSink",
    "CommandSink",
    "ConfiguredSink",
    "LogSink",
    "MailServer",
    "MailSink",
    "RedisChannelSink",
    "RedisStreamSink",
    "Sink",
    "SinkSettings",
    "SlackSink",
    "WebhookSink",
    "configured_sinks",
    "open_configured",
    "open_sink",
    "open_sinks",
    "test_event",
    "wants",
]  # fmt: skip

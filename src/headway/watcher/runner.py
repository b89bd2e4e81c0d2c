"""The process: settings from the environment, one watcher, and an exit code a supervisor understands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway import telemetry
from headway._sql import Database, connect
from headway.errors import ConfigError, HeadwayError
from headway.events import Json
from headway.lifecycle import Shutdown, on_signals
from headway.telemetry import Log, redact
from headway.watcher.notify import NotificationWatcher, OpenStore, WatcherSettings
from headway.watcher.ports import RedisProto, WatcherPorts
from headway.watcher.publisher import EventForm
from headway.watcher.store import ProcessedStore, RedisHashes, RedisProcessedStore, SqlProcessedStore

log = Log("watcher")

REQUIRED = ("REDIS_URL", "RQ__QUEUE", "DIGITS_EVENTS_CHANNEL", "RQ_WATCHER_STUCK_TIMEOUT_SECONDS")

DEFAULT_STORE = "sqlite:///keyspace_watcher.db"

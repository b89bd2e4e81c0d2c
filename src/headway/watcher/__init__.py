"""One event per failed, canceled or stuck RQ job, by keyspace notifications instead of polling."""

from headway.watcher.logic import Report
from headway.watcher.notify import NotificationWatcher, WatcherSettings
from headway.watcher.ports import WatcherPorts
from headway.watcher.publisher import EventForm, Publisher
from headway.watcher.store import ProcessedStore, RedisProcessedStore, SqlProcessedStore

__all__ = [
    "EventForm",
    "NotificationWatcher",
    "ProcessedStore",
    "Publisher",
    "RedisProcessedStore",
    "Report",
    "SqlProcessedStore",
    "WatcherPorts",
    "WatcherSettings",
]

"""One event per failed, canceled or stuck RQ job, by keyspace notifications instead of polling."""

from headway.watcher.ports import WatcherPorts
from headway.watcher.publisher import EventForm, Publisher
from headway.watcher.reports import Report
from headway.watcher.store.contract import ProcessedStore
from headway.watcher.store.redis import RedisProcessedStore
from headway.watcher.store.sql import SqlProcessedStore
from headway.watcher.watcher import NotificationWatcher, WatcherSettings

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

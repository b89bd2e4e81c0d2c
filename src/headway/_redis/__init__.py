"""The door to Redis. Every part of headway uses it, and nothing else talks to a server.

    keys         every key we write
    address      what an address may say, and how it is shown
    connections  a request is answered or its connection is closed
    clients      `connect`: every limit said, nothing repeated behind the caller's back
    errors       `translate`: what a client raises, in our words
    preflight    what a server must be like
    scripts      ``lua/OWNER/NAME.lua``

Standalone servers, or a master behind Sentinel by an address that follows it; Redis Cluster has no database 1.
"""

from headway._redis.address import DATABASES, Role, database_of, place, read_address
from headway._redis.clients import TIMEOUT, connect, connect_async
from headway._redis.connections import Argument, borrow, make_ready
from headway._redis.errors import failures, is_transient, translate
from headway._redis.keys import (
    CHECKPOINTER,
    EVENTS,
    EVENTS_HOLD,
    EVENTS_LEASE,
    EVENTS_QUARANTINE,
    EVENTS_REFUSALS,
    KEYS,
    LEASE_TOKEN,
    PROBE,
    PROJECT,
    PROJECT_BITS,
    PROJECT_META,
    PROJECT_REBUILD,
    PROJECT_SEEN,
    STAGED_BITS,
    STAGED_SEEN,
    STATE_JOB,
    STATE_JOBS,
    STATE_LOG,
    STATE_WRITERS,
    STATES,
    WATCHED,
    WATCHED_AT,
    WATCHED_FOUND,
    WATCHER_BASELINE,
    WATCHER_FOLLOWED,
    Key,
    key,
)
from headway._redis.preflight import EvictionWatch, ServerFacts, facts, preflight
from headway._redis.scripts import Reply, Script, script

__all__ = [
    "CHECKPOINTER",
    "DATABASES",
    "EVENTS",
    "EVENTS_HOLD",
    "EVENTS_LEASE",
    "EVENTS_QUARANTINE",
    "EVENTS_REFUSALS",
    "KEYS",
    "LEASE_TOKEN",
    "PROBE",
    "PROJECT",
    "PROJECT_BITS",
    "PROJECT_META",
    "PROJECT_REBUILD",
    "PROJECT_SEEN",
    "STAGED_BITS",
    "STAGED_SEEN",
    "STATES",
    "STATE_JOB",
    "STATE_JOBS",
    "STATE_LOG",
    "STATE_WRITERS",
    "TIMEOUT",
    "WATCHED",
    "WATCHED_AT",
    "WATCHED_FOUND",
    "WATCHER_BASELINE",
    "WATCHER_FOLLOWED",
    "Argument",
    "EvictionWatch",
    "Key",
    "Reply",
    "Role",
    "Script",
    "ServerFacts",
    "borrow",
    "connect",
    "connect_async",
    "database_of",
    "facts",
    "failures",
    "is_transient",
    "key",
    "make_ready",
    "place",
    "preflight",
    "read_address",
    "script",
    "translate",
]

"""Every key headway writes, by family: its name, type and lifetime. Nothing else names a key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["hash", "string", "set", "zset", "list", "stream", "channel"]


@dataclass(frozen=True, slots=True)
class Key:
    """One family of keys: what it is called, its type, how long it lives. Called, it gives one name."""

    pattern: str
    kind: Kind
    lifetime: str
    holds: str

    def __call__(self, **parts: str) -> str:
        return self.pattern.format_map(parts)

    def matches(self, name: str) -> bool:
        pieces = re.split(r"(\{\w+\})", self.pattern)
        shape = "".join("[^:]+" if piece.startswith("{") else re.escape(piece) for piece in pieces)
        return re.fullmatch(shape, name) is not None


#: Every key headway writes. docs/reference/redis.md is compared with it, and so is what tests leave in a server.
KEYS: list[Key] = []


def key(pattern: str, kind: Kind, lifetime: str, holds: str) -> Key:
    """Add a family of keys to the list."""
    made = Key(pattern, kind, lifetime, holds)
    KEYS.append(made)
    return made


_WEEK = "7 days after the last write"
_LONGER = "2 hours longer"

PROJECT = key("smap:proj:{project_id}", "hash", _WEEK, "`status`, `total`, `done`, `errors` of a project")
PROJECT_META = key("smap:proj:{project_id}:meta", "hash", _LONGER, "epoch, version, ...; last call per caller")
PROJECT_BITS = key("smap:proj:{project_id}:bits", "string", _LONGER, "bitmap of the item numbers counted")
PROJECT_SEEN = key("smap:proj:{project_id}:seen", "set", _LONGER, "other item ids counted, long ones as a digest")
PROJECT_REBUILD = key("smap:proj:{project_id}:rebuild", "string", "30 s", "lease: who rebuilds or deletes the project")
STAGED_BITS = key("smap:proj:{project_id}:bits:{token}", "string", "10 min", "bits of a project being rebuilt")
STAGED_SEEN = key("smap:proj:{project_id}:seen:{token}", "set", "10 min", "ids of a project being rebuilt")
CHECKPOINTER = key("smap:checkpointer", "string", "4.5 s", "lease: who compares Redis with the SQL record just now")
EVENTS = key("smap:events", "stream", "an entry goes when every sink took it", "events on their way to the sinks")
EVENTS_QUARANTINE = key(
    "smap:events:quarantine", "stream", "until retried or discarded", "what a sink refused, or is no event"
)
EVENTS_REFUSALS = key(
    "smap:events:refusals:{sink}", "string", "1 day", "the entry that the sink refuses, how often, when last"
)
EVENTS_HOLD = key(
    "smap:events:hold", "string", "2 min", "the stream was lost: nothing leaves it until every relay has seen that"
)
EVENTS_LEASE = key("smap:events:lease:{sink}", "string", "30 s", "which relay serves the sink just now")

LEASE_TOKEN = key("headway:lease:token", "string", "for ever", "counter: the token of the lease acquired last")

_UNTIL_DELETED = "until the job is deleted"
STATE_JOBS = key("headway:states", "set", "for ever", "ids of the jobs whose states are here")
STATE_JOB = key("headway:states:{job_id}", "hash", _UNTIL_DELETED, "`num_tasks`, `created_at`, `deleted`, ... of a job")
STATES = key("headway:states:{job_id}:states", "hash", _UNTIL_DELETED, "the newest state of each task and tag")
STATE_WRITERS = key(
    "headway:states:{job_id}:writers",
    "hash",
    _UNTIL_DELETED,
    "who wrote each task and tag lately, and with which event",
)
STATE_LOG = key(
    "headway:states:{job_id}:log", "stream", _UNTIL_DELETED, "about 1,000 changes (all of them with history)"
)

QUEUE_USER = key(
    "headway:queue:user:{user}", "string", "1 hour", "id of the user's active task (`user`: a digest); SQL decides"
)

_WATCHED = "a day after the job left its registry and RQ keeps no result of it"
WATCHED = key("headway:watcher:{queue}:{registry}", "hash", _WATCHED, "how far each job was reported")
WATCHED_FOUND = key("headway:watcher:{queue}:{registry}:found", "zset", _WATCHED, "when it was last in its registry")
WATCHED_AT = key("headway:watcher:{queue}:{registry}:at", "zset", _WATCHED, "when it was looked at")
WATCHER_FOLLOWED = key("headway:watcher:{queue}:followed", "hash", "until it ended", "executions whose end is awaited")
WATCHER_BASELINE = key("headway:watcher:{queue}:baseline", "string", "for ever", "when the queue was first watched")
PROBE = key("headway:probe:{token}", "zset", "2 s", "the watcher tries out whether changes are announced")

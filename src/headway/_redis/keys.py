"""Every key that Headway writes: name, type and lifetime. No other module names a key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["hash", "string", "set", "zset", "list", "stream", "channel"]


@dataclass(frozen=True, slots=True)
class Key:
    """A family of keys: name pattern, type and lifetime. Calling it returns the name of one key."""

    pattern: str
    kind: Kind
    lifetime: str
    holds: str

    def __call__(self, **parts: str) -> str:
        return self.pattern.format_map(parts)

    def matches(self, name: str) -> bool:
        """Return whether ``name`` is a key of this family."""
        pieces = re.split(r"(\{\w+\})", self.pattern)
        shape = "".join("[^:]+" if piece.startswith("{") else re.escape(piece) for piece in pieces)
        return re.fullmatch(shape, name) is not None


#: All families. Tests compare docs/reference/redis.md, and the keys they leave in a server, with this list.
KEYS: list[Key] = []


def key(pattern: str, kind: Kind, lifetime: str, holds: str) -> Key:
    """Register a family of keys."""
    made = Key(pattern, kind, lifetime, holds)
    KEYS.append(made)
    return made


_WEEK = "7 days after the last write"
_LONGER = "2 hours longer"

PROJECT = key("smap:proj:{project_id}", "hash", _WEEK, "`status`, `total`, `done`, `errors` of a project")
PROJECT_META = key("smap:proj:{project_id}:meta", "hash", _LONGER, "epoch, version, ...; last call per caller")
PROJECT_BITS = key("smap:proj:{project_id}:bits", "string", _LONGER, "bitmap of the counted item numbers")
PROJECT_SEEN = key("smap:proj:{project_id}:seen", "set", _LONGER, "other counted item ids, long ones as a digest")
PROJECT_REBUILD = key(
    "smap:proj:{project_id}:rebuild", "string", "30 s", "lease for rebuilding or deleting the project"
)
STAGED_BITS = key("smap:proj:{project_id}:bits:{token}", "string", "10 min", "bits of a project being rebuilt")
STAGED_SEEN = key("smap:proj:{project_id}:seen:{token}", "set", "10 min", "ids of a project being rebuilt")
CHECKPOINTER = key(
    "smap:checkpointer", "string", "4.5 s", "lease of the process that compares Redis with the SQL record"
)
EVENTS = key("smap:events", "stream", "until every sink took the entry", "events that wait for sinks")
EVENTS_QUARANTINE = key(
    "smap:events:quarantine", "stream", "until retried or discarded", "refused events and invalid entries"
)
EVENTS_REFUSALS = key(
    "smap:events:refusals:{sink}",
    "string",
    "1 day",
    "the refused entry, the number of refusals, the time of the last one",
)
EVENTS_HOLD = key(
    "smap:events:hold",
    "string",
    "2 min",
    "after a loss of the stream: no entry leaves it until all relays subscribed again",
)
EVENTS_LEASE = key("smap:events:lease:{sink}", "string", "30 s", "lease of the relay that serves the sink")

LEASE_TOKEN = key("headway:lease:token", "string", "for ever", "counter: token of the last acquired lease")

_UNTIL_DELETED = "until the job is deleted"
STATE_JOBS = key("headway:states", "set", "for ever", "ids of the jobs with states in this Redis")
STATE_JOB = key("headway:states:{job_id}", "hash", _UNTIL_DELETED, "`num_tasks`, `created_at`, `deleted`, ... of a job")
STATES = key("headway:states:{job_id}:states", "hash", _UNTIL_DELETED, "the newest state of each task and tag")
STATE_WRITERS = key(
    "headway:states:{job_id}:writers",
    "hash",
    _UNTIL_DELETED,
    "recent writers of each task and tag, with their event ids",
)
STATE_LOG = key(
    "headway:states:{job_id}:log", "stream", _UNTIL_DELETED, "about 1,000 changes (all of them with history)"
)

QUEUE_USER = key(
    "headway:queue:user:{user}", "string", "1 hour", "id of the user's active task (`user`: a digest); SQL decides"
)

_WATCHED = "a day after the job left its registry and RQ keeps no result of it"
WATCHED = key("headway:watcher:{queue}:{registry}", "hash", _WATCHED, "how far each job was reported")
WATCHED_FOUND = key(
    "headway:watcher:{queue}:{registry}:found", "zset", _WATCHED, "time when it was last in its registry"
)
WATCHED_AT = key("headway:watcher:{queue}:{registry}:at", "zset", _WATCHED, "time of the last check")
WATCHER_FOLLOWED = key("headway:watcher:{queue}:followed", "hash", "until it ended", "running executions to follow")
WATCHER_BASELINE = key("headway:watcher:{queue}:baseline", "string", "for ever", "when the queue was first watched")
PROBE = key("headway:probe:{token}", "zset", "2 s", "test whether the server announces changes")

"""Quick check whether a user already has an active task: a Redis key with that task's id.

The check saves the transaction that would refuse a user who submits repeatedly. It never decides on its own. A key counts only
after the task's row was read and is active. If the key is missing or stale, the transaction and its unique index decide. So a
wrong key costs at most one read.

The key is written together with the hint in one round trip. It is read only for users whom this process refused before, so for
nearly all users the check is free.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable

from headway import _redis
from headway._redis.keys import QUEUE_USER
from headway._sql import Database
from headway.core.retry import CircuitBreaker
from headway.queue.store.insert import busy
from headway.queue.store.tasks import status_of
from headway.queue.task import Task
from headway.telemetry import Log, redact

log = Log("queue")

#: Seconds until a key expires. A task that takes longer is found by the transaction.
EXPIRE_SECONDS = 3600
#: Maximum refused users to remember.
MAX_REMEMBERED = 10_000


class UserKeys:
    """The users' Redis keys; see the module. While Redis is unreachable, every lookup returns None at once."""

    def __init__(self, url: str, *, timeout: float) -> None:
        self._client = _redis.connect(url, role="queue", name="user-keys", timeout=timeout, connect_timeout=timeout)
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, database: Database, user_id: str) -> None:
        """Raise `UserBusy` if the user's key names an active task, without starting a transaction."""
        known = self.known(user_id)
        if known is None:
            return
        status = status_of(database, known, user_id=user_id)
        if status is not None and not status.is_final:
            raise busy(user_id, 1, known, status)
        with self._lock:
            self._refused.pop(user_id, None)

    def known(self, user_id: str) -> str | None:
        """Return the task id in the user's key, if this process refused the user before."""
        if user_id not in self._refused:
            return None
        answer = self._call("GET", user_key(user_id))
        return answer if isinstance(answer, str) else None

    def remember(self, user_id: str, task_id: str) -> None:
        """Remember that the user was refused because of this task, and write the key."""
        with self._lock:
            self._refused[user_id] = None
            if len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)
        self._call("SET", user_key(user_id), task_id, "EX", EXPIRE_SECONDS)

    def keys_of(self, accepted: Iterable[Task]) -> list[tuple[str, str]]:
        """Return (key, task id) for each newly accepted task with a user. The caller writes them with the hints."""
        return [
            (user_key(task.user_id), task.id) for task in accepted if task.version == 1 and task.user_id is not None
        ]

    def delete(self, users: Iterable[str]) -> None:
        """Delete the keys of users whose tasks ended.

        If a user has submitted the next task meanwhile, its key is deleted too, which is harmless.
        """
        keys = [user_key(user) for user in users]
        if keys:
            self._call("DEL", *keys)

    def answers(self) -> bool:
        """Return whether Redis is reachable."""
        return self._call("PING") is not None

    def close(self) -> None:
        """Close the connection to Redis."""
        self._client.close()

    def _call(self, *command: str | int) -> object:
        if not self._breaker.allow():
            return None
        try:
            answer = self._client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        except _redis.failures() as error:
            if self._breaker.failed():
                log.info("the quick check of active users is unavailable; SQL decides", error=redact(str(error)))
            return None
        self._breaker.succeeded()
        return answer


def user_key(user_id: str) -> str:
    """Return the user's key. It contains a digest, so that readers of Redis do not learn who the users are."""
    return QUEUE_USER(user=hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest())

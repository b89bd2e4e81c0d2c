"""The quick check of a user's place: a key in Redis with the id of the user's active task.

It spares a user who asks again and again the transaction that would refuse them. It decides nothing: a key that says *busy*
is believed only after the row of that one task was read and is active; a key that is missing, stale, wiped or of an older
Redis leads to the transaction, where the unique index decides. So whatever happens to the key costs a read at the most.

The key is written with the hint, in one round trip, and is asked for only for users whom this process has refused before:
to the others, who are nearly all, the check costs nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable

from headway import _redis
from headway._redis.keys import QUEUE_USER
from headway._sql import Database
from headway.queue.admission import busy
from headway.queue.values import Status, Task
from headway.retry import CircuitBreaker
from headway.telemetry import Log, redact

log = Log("queue")

#: Seconds a key lives; a task that takes longer is found by the transaction.
KEPT = 3600
#: Users who were refused and are remembered.
REMEMBERED = 10_000


class Places:
    """See the module. While Redis is away every question is answered by *not known*, at once."""

    def __init__(self, url: str, *, timeout: float) -> None:
        self._client = _redis.connect(url, role="queue", name="places", timeout=timeout, connect_timeout=timeout)
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, database: Database, user_id: str) -> None:
        """Refuse a user whose active task is known without beginning to write."""
        known = self.known(user_id)
        if known is None:
            return
        row = database.one("SELECT status FROM tasks WHERE id = ? AND user_id = ?", (known, user_id))
        if row is not None and not Status(row[0]).is_final:
            raise busy(user_id, 1, known, row[0])
        self.free(user_id)

    def known(self, user_id: str) -> str | None:
        """The task that may be in the user's place, if this process has refused the user before."""
        if user_id not in self._refused:
            return None
        answer = self._ask("GET", place_key(user_id))
        return answer if isinstance(answer, str) else None

    def refused(self, user_id: str, task_id: str) -> None:
        """The user was refused because of that task; they may ask again."""
        with self._lock:
            self._refused[user_id] = None
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
        self._ask("SET", place_key(user_id), task_id, "EX", KEPT)

    def free(self, user_id: str) -> None:
        """The user was accepted after all."""
        with self._lock:
            self._refused.pop(user_id, None)

    def keys_of(self, accepted: Iterable[Task]) -> list[tuple[str, str]]:
        """The keys of the users whose tasks were accepted just now, each with its task: they are written with the hints."""
        return [
            (place_key(task.user_id), task.id) for task in accepted if task.version == 1 and task.user_id is not None
        ]

    def leave(self, users: Iterable[str]) -> None:
        """Their tasks ended. Should a user have submitted the next one meanwhile, its key is lost, which costs nothing."""
        keys = [place_key(user) for user in users]
        if keys:
            self._ask("DEL", *keys)

    def answers(self) -> bool:
        """Whether Redis is there."""
        return self._ask("PING") is not None

    def close(self) -> None:
        self._client.close()

    def _ask(self, *command: str | int) -> object:
        if not self._breaker.allow():
            return None
        try:
            answer = self._client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        except _redis.failures() as error:
            if self._breaker.failed():
                log.info("the quick check of users' places is not there; SQL decides", error=redact(str(error)))
            return None
        self._breaker.succeeded()
        return answer


def place_key(user_id: str) -> str:
    """By a digest: who uses the application is nobody's business who reads Redis."""
    return QUEUE_USER(user=hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest())

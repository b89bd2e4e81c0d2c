"""Concurrency and rate limits, and holds of kinds, enforced in the transaction that claims.

Limits are stored in SQL and can change while workers run. If there are limits, claims serialize on the limit rows;
otherwise two workers could each see the last free slot. Without limits nothing is locked.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from headway._sql import Tx, Value, listed
from headway.errors import LONGEST_DELAY, InvalidInput
from headway.queue.store.administration import audit
from headway.queue.task import PRIORITIES, Status, Task, check_text, is_number, moment

#: A rate's timestamp more than this many seconds ahead means that the clock was set back. No claim waits that long for
#: another: a statement may take 20 s.
CLOCK_SET_BACK = 30.0
SCOPES = ("queue", "user", "partition", "kind")
_COLUMN = {"user": "user_id", "partition": "party", "kind": "kind"}


class Limits:
    """The limits and the number of running tasks, as seen by one transaction."""

    def __init__(self, tx: Tx, now: float) -> None:
        self._tx, self._now = tx, now
        rows = tx.all(f"SELECT scope, key, concurrency, rate FROM task_limits ORDER BY scope, key{tx.for_update}")
        self._most = {(scope, key): most for scope, key, most, _ in rows if most is not None}
        self._rate = {(scope, key): rate for scope, key, _, rate in rows if rate is not None}
        self._running: dict[tuple[str, str], int] = {}
        self._allowance: dict[tuple[str, str], float] = {}
        self._full: set[tuple[str, str]] = set()
        if self._most:
            for queue, user, party, kind, count in tx.all(
                "SELECT queue, user_id, party, kind, count(*) FROM tasks WHERE status = 'RUNNING' "
                "GROUP BY queue, user_id, party, kind"
            ):
                for name in _names(queue, user, party, kind):
                    self._running[name] = self._running.get(name, 0) + int(count)
            self._full = {name for name in self._running if self._has_most(name)}
            self._full |= {name for name, most in self._most.items() if most == 0 and name[1] != "*"}
        if self._rate:
            # Exclude exhausted keys from the start, or their tasks would hide the ones behind them. One query is enough for
            # any number of users: an allowance older than this has grown back to a whole task.
            for scope, key, allowance, at in tx.all(
                "SELECT scope, key, allowance, at FROM task_rates WHERE at > ?",
                (now - 1.0 / min(self._rate.values()) - 1.0,),
            ):
                rate = self._limit(self._rate, (scope, key))
                if rate is not None and self._saved(rate, allowance, at) < 1.0:
                    self._full.add((scope, key))

    def is_full(self, scope: str, key: str) -> bool:
        """Return whether no task of this key can run now."""
        name = scope, key
        return name in self._full or (self._most.get((scope, "*")) == 0 and name not in self._most)

    def excluded(self) -> tuple[str, list[Value]]:
        """Return SQL conditions (each with a leading AND) and parameters that exclude users, parties and kinds at their limit.

        Their tasks would otherwise hide the ones behind them. Full queues are excluded by `is_full` instead.
        """
        # All keys are one parameter, because PostgreSQL accepts at most 65,535 parameters per statement.
        conditions = ""
        values: list[Value] = []
        for scope, column in _COLUMN.items():
            keys = sorted(key for found, key in self._full if found == scope)
            if keys:
                among, texts = listed(self._tx.engine, keys)
                conditions += f" AND coalesce({column}, '') NOT IN ({among})"
                values.append(texts)
            if self._most.get((scope, "*")) == 0:
                own = sorted(key for found, key in self._most if found == scope and key != "*")
                without_user = f"{column} IS NULL OR " if scope == "user" else ""
                among, texts = listed(self._tx.engine, own)
                conditions += f" AND ({without_user}{column} IN ({among}))"
                values.append(texts)
        return conditions, values

    def admits(self, queue: str, user: str | None, party: str, kind: str) -> bool:
        """Return whether one more task may run. If so, it is counted from now on."""
        names = _names(queue, user, party, kind)
        if any(name in self._full for name in names):
            return False
        rated = [(name, rate) for name in names if (rate := self._limit(self._rate, name)) is not None]
        short = [name for name, rate in rated if self._allowed(name, rate) < 1.0]
        if short:
            self._full.update(short)
            return False
        for name, _ in rated:
            self._allowance[name] -= 1.0
        for name in names:
            if self._most:
                self._running[name] = self._running.get(name, 0) + 1
                if self._has_most(name):
                    self._full.add(name)
        return True

    def close(self) -> None:
        """Store the remaining allowances."""
        for (scope, key), allowance in sorted(self._allowance.items()):
            self._tx.execute(
                "INSERT INTO task_rates (scope, key, allowance, at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (scope, key) DO UPDATE SET allowance = excluded.allowance, at = excluded.at",
                (scope, key, allowance, self._now),
            )

    def _has_most(self, name: tuple[str, str]) -> bool:
        most = self._limit(self._most, name)
        return most is not None and self._running.get(name, 0) >= most

    def _limit(self, limits: dict[tuple[str, str], float], name: tuple[str, str]) -> float | None:
        scope, key = name
        return limits.get((scope, key), limits.get((scope, "*")))

    def _allowed(self, name: tuple[str, str], rate: float) -> float:
        """Return the remaining allowance of a key in this transaction."""
        if name not in self._allowance:
            row = self._tx.one("SELECT allowance, at FROM task_rates WHERE scope = ? AND key = ?", name)
            self._allowance[name] = max(1.0, rate) if row is None else self._saved(rate, *row)
        return self._allowance[name]

    def _saved(self, rate: float, allowance: float, at: float) -> float:
        """Return the allowance accumulated since the last claim, capped at one second's worth and at least one task.

        A claim that waited for another has the earlier timestamp, so ``elapsed`` may be slightly negative. A timestamp far
        in the future means that the clock was set back.
        """
        most, elapsed = max(1.0, rate), self._now - at
        return most if elapsed < -CLOCK_SET_BACK else min(most, allowance + max(0.0, elapsed) * rate)


def _names(queue: str, user: str | None, party: str, kind: str) -> list[tuple[str, str]]:
    names = [("queue", queue), ("partition", party), ("kind", kind)]
    return names if user is None else [*names, ("user", user)]


def set_limit(
    tx: Tx, scope: str, key: str, *, concurrency: int | None, rate: float | None, by: str = "headway"
) -> None:
    """Set a limit, effective from the next claim; remove it if both values are None.

    ``rate`` is in tasks per second. The key ``*`` is the default for every key of the scope.
    """
    if scope not in SCOPES:
        raise InvalidInput(f"A limit is for one of {', '.join(SCOPES)} (got {scope!r}).")
    check_text(key, "the key of a limit")
    if scope == "queue" and key not in (*PRIORITIES, "*"):
        raise InvalidInput(f"There is no queue {key!r}.", hint=f"Use one of {', '.join(PRIORITIES)}, or *.")
    if concurrency is not None and (type(concurrency) is not int or not 0 <= concurrency <= 1_000_000):
        raise InvalidInput(f"concurrency must be an integer from 0 to 1,000,000 (got {concurrency!r}).")
    if rate is not None and (not is_number(rate) or not 0 < rate < 10**6):
        raise InvalidInput(f"rate must be tasks per second, above 0 and below 1,000,000 (got {rate!r}).")
    audit(tx, by, "queue.limit", {"scope": scope, "key": key, "concurrency": concurrency, "rate": rate})
    if concurrency is None and rate is None:
        tx.execute("DELETE FROM task_limits WHERE scope = ? AND key = ?", (scope, key))
        return
    tx.execute(
        "INSERT INTO task_limits (scope, key, concurrency, rate) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (scope, key) DO UPDATE SET concurrency = excluded.concurrency, rate = excluded.rate",
        (scope, key, concurrency, rate),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Holds: `RetryLater` with scope="job"


class Wait(NamedTuple):
    """Why a task or a kind does not start now, and until when."""

    until: datetime
    reason: str


class KindHold(NamedTuple):
    """A kind of which nothing starts now."""

    kind: str
    until: datetime
    reason: str


def hold(tx: Tx, kind: str, until: float, reason: str) -> None:
    """Start no task of a kind before ``until``. An earlier hold that ends later stays."""
    tx.execute(
        "INSERT INTO task_holds (kind, until, reason) VALUES (?, ?, ?) ON CONFLICT (kind) DO UPDATE "
        "SET until = excluded.until, reason = excluded.reason WHERE excluded.until > task_holds.until",
        (kind, until, reason),
    )


def held_kinds(tx: Tx, now: float) -> set[str]:
    """Return the kinds that are held, and delete the holds that are over.

    A hold of more than the longest delay was written before the clock was set back, and is over too.
    """
    held: set[str] = set()
    for kind, until in tx.all("SELECT kind, until FROM task_holds"):
        if now < until <= now + LONGEST_DELAY + 60.0:
            held.add(kind)
        else:
            tx.execute("DELETE FROM task_holds WHERE kind = ? AND until = ?", (kind, until))
    return held


def holds(tx: Tx) -> list[KindHold]:
    """Return the holds in force, by kind."""
    rows = tx.all("SELECT kind, until, reason FROM task_holds WHERE until > ? ORDER BY kind", (tx.now(),))
    return [KindHold(kind, moment(until), reason) for kind, until, reason in rows]


def wait_of(tx: Tx, task: Task) -> tuple[int, Wait | None]:
    """Return how often a task was postponed, and what a waiting one waits for: its own delay or a hold of its kind."""
    delay = tx.one(
        "SELECT times, until, reason FROM task_delays WHERE task = (SELECT no FROM tasks WHERE id = ?)", (task.id,)
    )
    kind = tx.one("SELECT until, reason FROM task_holds WHERE kind = ?", (task.kind,))
    times = int(delay[0]) if delay else 0
    if task.status is not Status.QUEUED:
        return times, None
    found = [row for row in (delay[1:] if delay else None, kind) if row is not None and row[0] > tx.now()]
    if not found:
        return times, None
    until, reason = max(found)
    return times, Wait(moment(until), reason)

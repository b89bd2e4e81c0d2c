"""The evaluator: evaluates the rules every few seconds. A lease ensures that a deployment has one active evaluator.

A round first reads, outside any transaction that writes. Then one transaction renews the lease, compares the readings with
the open alerts, and writes all changes, events, timers and evaluations. So a kill leaves either all of a round or nothing.
The transaction checks the lease's token: an evaluator that was suspended and replaced writes nothing. Even two active
evaluators would publish an alert once, because a unique index allows one open alert per subject.

While the store is unreachable, this process logs that. Afterwards the alert ``store_away`` states the time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headway._lease import Lease, Owner, SqlLeases, shorten
from headway._sql import Database, Tx
from headway.alerts.judgement import Change, Judgement
from headway.alerts.readings import judge, reading
from headway.alerts.rules import Reading, Rules
from headway.alerts.store import alerts
from headway.alerts.store.snapshot import fetch
from headway.core.failure import describe
from headway.core.retry import RetryPolicy
from headway.core.text import duration
from headway.errors import HeadwayError, Held, NotFound, StaleClaim, StorageError, Unavailable
from headway.telemetry import Log, metrics

if TYPE_CHECKING:
    from redis import Redis

log = Log("alerts")

#: Seconds between two rounds.
INTERVAL = 10.0
#: Seconds after which a killed evaluator is replaced. On the same machine it is replaced at once.
LEASE = 30.0
LEASE_NAME = "alerts"
PURGE_SECONDS = 3600.0
_AWAY = RetryPolicy(retries=0, base=1.0, cap=30.0, jitter=0.2)


class Evaluator:
    """Evaluates the rules. `tick` is one round, `run` is the loop.

    ``clock`` measures latency and outages of the store. The rules use the database's clock.
    """

    def __init__(
        self,
        database: Database,
        rules: Rules | Callable[[], Rules] = Rules,
        *,
        on_change: Callable[[Change], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._on_change, self._clock = database, on_change, clock
        self._rules: Callable[[], Rules] = (lambda: rules) if isinstance(rules, Rules) else rules
        self._leases = SqlLeases()
        self._lease: Lease | None = None
        self._took: float | None = None  # duration of the last transaction
        self._away_since: float | None = None  # start of the first round without the database
        self._redis: Redis | None = None
        self._redis_url: str | None = None  # in the last round
        self._redis_away_since: float | None = None
        self._purged_at: float | None = None
        self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether this was the active evaluator in its last round."""
        return self._lease is not None

    def run(self, stop: threading.Event) -> None:
        """Run rounds until ``stop`` is set. A failed round is logged and repeated."""
        failures, delay = 0, 0.0
        while not stop.wait(delay):
            try:
                delay, failures = self.tick(), 0
            except Exception as error:  # noqa: BLE001 - the loop must survive any error
                failures += 1
                delay = _AWAY.delay(failures)
                log.warning("the alerts could not be evaluated; retrying", attempt=failures, error=describe(error).text)
        self.close()

    def tick(self, *, at: float | None = None) -> float:
        """Run one round if this is the active evaluator. Return the seconds until the next.

        ``at`` replaces the database's time.
        """
        self._mind_fork()
        rules, began = self._rules(), self._clock()
        if rules.redis != self._redis_url:
            self._leave_redis()
            self._redis_url, self._redis_away_since = rules.redis, None
        if rules.redis is None:  # no Redis to check
            rules = replace(rules, limits={**rules.limits, "redis_memory": None})
        try:
            changes = self._round(rules, at)
        except (Unavailable, StorageError):
            if self._away_since is None:
                self._away_since = began
            raise
        self._away_since = None
        for change in changes:
            self._report(change)
        if self._lease is not None:
            self._purge(rules, at)
        return INTERVAL

    def close(self) -> None:
        """Release the lease, so that another evaluator can acquire it at once."""
        self._mind_fork()
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._database.run(lambda tx: self._leases.release(tx, lease), operation="alerts.release")
            except HeadwayError as error:  # it expires
                log.warning("the lease of the alerts could not be released", error=str(error))
        self._leave_redis()

    def _leave_redis(self) -> None:
        if self._redis is not None:
            self._redis.close()
            self._redis = None

    # ---- one round -------------------------------------------------------------------------------------------------

    def _round(self, rules: Rules, at: float | None) -> list[Change]:
        if self._lease is None and not self._acquire():
            return []
        lease = self._lease
        assert lease is not None
        rows = fetch(self._database, rules, at)
        rows.others = self._measure(rules)
        seen = judge(rows, rules)
        away = self._clock() - self._away_since if self._away_since is not None else 0.0

        def work(tx: Tx) -> list[Change]:
            self._leases.renew(tx, lease)
            # Without a waiting process, only this call notices a lease that ends too late after the clock was set back.
            shorten(tx, "jobs", "finished_at IS NULL")
            return Judgement(tx, rules, rows.now).write(seen, away)

        began = self._clock()
        try:
            changes = self._database.run(work, operation="alerts")
        except (StaleClaim, NotFound):
            self._lease = None  # another evaluator is active, or the database was restored to an earlier moment
            return []
        self._took = self._clock() - began
        return changes

    def _mind_fork(self) -> None:
        """Drop the lease and the connection in a forked child: they belong to the parent."""
        if self._pid != os.getpid():
            self._pid, self._lease, self._redis = os.getpid(), None, None

    def _acquire(self) -> bool:
        owner = Owner.current()  # outside the transaction, so that a repetition is the same acquisition
        found = self._database.run(
            lambda tx: self._leases.acquire(tx, LEASE_NAME, owner, LEASE), operation="alerts.acquire"
        )
        if isinstance(found, Held):
            return False
        self._lease = found
        log.info("this is the active evaluator of the alerts")
        return True

    def _measure(self, rules: Rules) -> dict[str, list[Reading]]:
        """Return the readings of the database's latency and of Redis. Rules without a known value are missing."""
        found: dict[str, list[Reading]] = {"store_away": []}
        if self._took is not None:
            text = f"A small transaction of the database took {duration(self._took)}."
            found["store_slow"] = [reading(rules, "store_slow", "database", self._took, text)]
        if self._redis_url is None:
            found["redis_memory"] = []
            return found
        began = self._clock()
        try:
            share = self._redis_share(rules)
        except HeadwayError as error:
            if self._redis_away_since is None:
                self._redis_away_since = began
            away = self._clock() - self._redis_away_since
            text = f"Redis has been unreachable for {duration(away)}: {error}"
            found["store_away"] = [reading(rules, "store_away", "redis", away, text, at_once=True)]
            log.warning("Redis did not report its memory", error=str(error))
            return found
        self._redis_away_since = None
        known = share is not None and rules.limits.get("redis_memory") is not None
        text = f"Redis uses {share or 0.0:.0%} of its memory."
        found["redis_memory"] = [reading(rules, "redis_memory", "redis", share or 0.0, text)] if known else []
        return found

    def _redis_share(self, rules: Rules) -> float | None:
        """Return the used share of Redis's memory limit, or None without a limit."""
        from headway import _redis

        assert self._redis_url is not None
        if self._redis is None:
            self._redis = _redis.connect(self._redis_url, role="queue", name="headway-alerts", max_connections=2)
        try:
            info: Any = self._redis.info("memory")
        except _redis.failures() as error:
            raise _redis.translate(error, self._redis_url) from error
        limit = rules.redis_bytes or int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / limit if limit else None

    def _purge(self, rules: Rules, at: float | None) -> None:
        now = self._clock()
        if self._purged_at is None or now - self._purged_at > PURGE_SECONDS:
            self._purged_at = now
            self._database.run(
                lambda tx: alerts.purge(tx, (tx.now() if at is None else at) - rules.kept), operation="alerts.purge"
            )

    def _report(self, change: Change) -> None:
        """Count and log a change, and pass it to `on_change`."""
        metrics.count("headway_alerts", rule=change.alert.rule, change=change.change)
        say = log.warning if change.change == "opened" and not change.muted else log.info
        say(f"alert {change.change}: {change.alert.text}", key=f"{change.alert.rule} {change.alert.no}")
        if self._on_change is not None:
            try:
                self._on_change(change)
            except Exception as error:  # noqa: BLE001 - the change is committed; the callback's error must not stop the loop
                log.error("the callback for alerts failed", error=describe(error).text)  # noqa: TRY400

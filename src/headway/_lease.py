"""Leases: exclusive rights that expire, with fencing tokens.

A lease has an *owner*, an expiry and a *token* that grows with every change of owner. The owner presents its token when it
records a result. After another process has acquired the lease, the store rejects the old token (the fence).

The store's clock decides when a lease expires. On the owner's own machine the kernel's monotonic clock decides instead,
because it cannot be set. An owner that is known to be dead on this machine is replaced at once.

A lease with more time left than its full duration was written before the store's clock was set back. The next process
that wants the lease shortens it to its full duration from now. A live owner renews it, a dead owner's lease expires.

`SqlLeases` keeps leases in table columns (``holder``, ``token``, ``lease_until``), `RedisLeases` in keys that expire.
Each `Owner` is created for one acquisition. Acquiring again with the same `Owner` returns the first answer, so a caller
can safely repeat a call whose answer was lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headway._sql import Tx, Value, listed
from headway.errors import HeadwayError, Held, NotFound, StaleClaim
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

log = Log("lease")

#: Seconds a lease may have left beyond its full duration. The clock and the row are not read at the same moment.
SLACK = 1.0


@dataclass(frozen=True, slots=True)
class Owner:
    """One acquisition by one process. Other processes on the same machine can detect that it died."""

    host: str
    machine: str  # boot id and time namespace: processes that share a monotonic clock
    space: str  # the pid namespace: two containers may each have a process 7
    pid: int
    started: str  # start time, because pids are reused
    claim: str  # unique for each acquisition

    @classmethod
    def current(cls) -> Owner:
        """Return a new owner for this process."""
        pid = os.getpid()
        host, machine, space = _here(pid)
        return cls(host, machine, space, pid, _own_start(pid), uuid.uuid4().hex[:16])

    @property
    def is_dead(self) -> bool:
        """Whether the process is known to have ended. False for processes on other machines: their leases must expire.

        Also False if the owner could not read its start time, because its pid may have been reused.
        """
        _, _, space = _here(os.getpid())
        return bool(self.space and self.started) and self.space == space and _is_gone(self.pid, self.started)

    @property
    def shares_our_clock(self) -> bool:
        return bool(self.machine) and self.machine == _here(os.getpid())[1]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def write_owner(owner: Owner, seconds: float | None = None, *, is_counted: bool = True) -> str:
    """Serialize an owner as JSON.

    ``seconds`` adds the duration of the lease. With ``is_counted`` the lease starts now, and its expiry on this machine's
    monotonic clock is added too.
    """
    known: dict[str, Any] = {name: getattr(owner, name) for name in Owner.__slots__}
    if seconds is not None:
        if is_counted:
            known["until"] = int((time.monotonic() + seconds) * 1000) / 1000  # rounded down, so it never ends late
        known["seconds"] = seconds
    return json.dumps(known, separators=(",", ":"))


class Written(NamedTuple):
    """A deserialized owner and the times of its lease."""

    owner: Owner
    until: float | None  # expiry on the monotonic clock of the owner's machine
    seconds: float | None  # full duration; None if written by an earlier release


def read_owner(text: str | None) -> Written | None:
    """Parse the JSON that `write_owner` wrote. Return None for any other text."""
    try:
        known = json.loads(text or "")
        until, seconds = known.get("until"), known.get("seconds")
        owner = Owner(**{name: known[name] for name in Owner.__slots__})
        if type(owner.pid) is not int or not 0 < owner.pid < 2**31:
            return None
        return Written(owner, None if until is None else float(until), None if seconds is None else float(seconds))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def stride() -> int:
    """Return a random increment for tokens that are checked without their owner.

    A store restored to an earlier moment (a backup, a failover that lost commits) gives the same row to another claimant.
    With increments of 1 both claimants would get the same token. The value is always between 2**30 and 2**31: PostgreSQL
    then plans for one type, and a row lasts for 2**32 claims.
    """
    return int.from_bytes(os.urandom(4), "big") >> 2 | 1 << 30


@dataclass(frozen=True, slots=True)
class Lease:
    """An acquired lease. ``key`` is the key of the SQL row or the name of the Redis key."""

    key: Value
    token: int
    owner: Owner
    seconds: float
    lapsed: bool = False  # the previous owner did not release it


class SqlLeases:
    """The leases in the rows of one table. ``key`` is the name of the table's key column.

    Every method runs in the caller's transaction, so the fence and the caller's writes commit together.
    """

    def __init__(self, table: str = "leases", key: str = "name") -> None:
        self._table, self._key = table, key

    def acquire(self, tx: Tx, key: Value, owner: Owner, seconds: float) -> Lease | Held:
        """Acquire the lease, or return a `Held` error that names its owner.

        The error is returned, not raised: the transaction may have shortened the lease and must be committed.
        In the table ``leases`` a missing row is inserted.
        """
        if self._table == "leases":
            tx.execute("INSERT INTO leases (name) VALUES (?) ON CONFLICT (name) DO NOTHING", (key,))
        holder, token, until = self._row(tx, key)
        found = read_owner(holder)
        if found is not None and found.owner.claim == owner.claim:
            self._write(tx, key, owner, token, seconds)  # a repeated call: its first answer was lost
            return Lease(key, token, owner, seconds)
        if holder is not None and not has_ended(holder, until, tx.now()):
            self.shorten(tx, key)
            return _held(found.owner if found else None)
        self._write(tx, key, owner, token + 1, seconds)
        return Lease(key, token + 1, owner, seconds, lapsed=holder is not None)

    def shorten(self, tx: Tx, key: Value) -> None:
        """Shorten a lease that expires too late (see the function `shorten`).

        For callers that are blocked by the lease but do not want to acquire it.
        """
        shorten(tx, self._table, f"{self._key} = ?", (key,))

    def holder(self, tx: Tx, key: Value) -> Owner | None:
        """Return the current owner, or None if the lease is free."""
        holder, _, until = self._row(tx, key)
        found = read_owner(holder)
        return None if found is None or has_ended(holder, until, tx.now()) else found.owner

    def renew(self, tx: Tx, lease: Lease) -> None:
        """Renew the lease from now, or raise `StaleClaim` if another owner has it.

        An expired lease that no other owner acquired can still be renewed.
        """
        self.check(tx, lease)
        self._write(tx, lease.key, lease.owner, lease.token, lease.seconds)

    def check(self, tx: Tx, lease: Lease) -> None:
        """Raise `StaleClaim` unless this owner still has the lease (the fence).

        The claim is compared as well as the token: a database restored to an earlier moment (a failover that lost commits)
        issues the same token twice.
        """
        holder, token, _ = self._row(tx, lease.key)
        if token != lease.token or holder is None or is_anothers(holder, lease.owner):
            raise StaleClaim("The lease expired and another process acquired it; nothing was recorded.")

    def release(self, tx: Tx, lease: Lease) -> bool:
        """Release the lease. Return False and change nothing if this owner no longer has it."""
        try:
            self.check(tx, lease)
        except (StaleClaim, NotFound):
            return False
        tx.execute(
            f"UPDATE {self._table} SET holder = NULL, lease_until = NULL WHERE {self._key} = ?",
            (lease.key,),
        )
        return True

    def _row(self, tx: Tx, key: Value) -> tuple[str | None, int, float | None]:
        sql = f"SELECT holder, token, lease_until FROM {self._table} WHERE {self._key} = ?{tx.for_update}"
        row = tx.one(sql, (key,))
        if row is None:
            raise NotFound("The leased row no longer exists.")
        return row[0], int(row[1]), row[2]

    def _write(self, tx: Tx, key: Value, owner: Owner, token: int, seconds: float) -> None:
        tx.execute(
            f"UPDATE {self._table} SET holder = ?, token = ?, lease_until = ? WHERE {self._key} = ?",
            (write_owner(owner, seconds), token, tx.now() + seconds, key),
        )


def _held(owner: Owner | None) -> Held:
    return Held(f"{owner or 'another process'} has it", hint="It is free again when that process ends or releases it.")


def is_anothers(holder: str, owner: Owner) -> bool:
    """Return whether ``holder`` names an acquisition other than ``owner``.

    A holder that names no acquisition (a fleet shares the lease) is not another owner.
    """
    if owner.claim in holder:
        return False
    found = read_owner(holder)
    return found is not None and found.owner.claim != owner.claim


def has_ended(holder: str | None, until: float | None, now: float) -> bool:
    """Return whether a lease has expired, given its columns and the store's time ``now``.

    The lease of an owner that is known to be dead has expired. If the owner shares our monotonic clock, that clock decides,
    so changes of the wall clock do not matter. More time left than the full duration means that the clock is a different
    one (a machine restored from a snapshot, a reused time namespace). Then, and for an owner that cannot be parsed,
    ``until`` decides.
    """
    found = read_owner(holder)
    if found is not None:
        if found.owner.is_dead:
            return True
        if found.owner.shares_our_clock and found.until is not None:
            left = found.until - time.monotonic()
            if found.seconds is None or left <= found.seconds + SLACK:
                return left < 0
    return until is None or until <= now


def shorten(
    tx: Tx,
    table: str,
    which: str,
    values: Sequence[Value] = (),
    *,
    ends: Sequence[str] = ("lease_until",),
    least: float = 0.0,
) -> None:
    """Shorten leases that expire too late because the store's clock was set back.

    They then expire after their full duration from now. Live owners renew them.

    ``which`` is an SQL condition with the parameters ``values``. ``ends`` lists the expiry columns to update. ``least`` is
    the shortest duration of these leases: rows that expire earlier are not read.
    """
    now = tx.now()
    rows = tx.all(
        f"SELECT holder, max(lease_until) FROM {table} WHERE {which} AND holder IS NOT NULL AND lease_until > ? "
        "GROUP BY holder",
        (*values, now + least),
    )
    too_long: dict[float, list[str]] = {}  # full duration -> holders with more time left
    owners: set[str] = set()
    for holder, until in rows:
        found = read_owner(holder)
        if found is not None and found.seconds is not None and until > now + found.seconds + SLACK:
            too_long.setdefault(found.seconds, []).append(holder)
            owners.add(str(found.owner))
    for seconds, holders in too_long.items():
        them, texts = listed(tx.engine, holders)  # one statement: every claim of an item has a different holder
        end = now + seconds
        tx.execute(
            f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in ends)} "
            f"WHERE {which} AND holder IN ({them}) AND lease_until > ?",
            (*[end] * len(ends), *values, texts, end),
        )
    for owner in sorted(owners):
        log.warning("the store's clock was set back: the leases of a process restart", key=table, worker=owner)


@contextmanager
def renewing(renew: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``renew`` in a thread, every third of ``seconds``, while the block runs.

    ``seconds`` is the duration of the lease. Renewal stops when another owner has the lease; the block finds out when it
    presents its token. The lease of a process that was stopped or killed expires.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds / 3):
            try:
                renew()
            except (StaleClaim, NotFound):
                return
            except HeadwayError:
                continue  # the store is busy or unreachable: the lease lasts for another try

    thread = threading.Thread(target=work, name="headway-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # the caller may fork next


class RedisLeases:
    """Leases in Redis keys that expire by the server's clock. Raises the errors of `headway._redis`."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        #: Calls without an answer, after which the server may hold a lease: key -> (owner, monotonic expiry).
        self._unanswered: dict[str, tuple[Owner, float]] = {}

    def acquire(self, key: str, owner: Owner, seconds: float) -> Lease:
        """Acquire the lease, or raise `Held` with the name of its owner.

        If an earlier call of this process got no answer, its owner is used again. The server may have granted that lease, or
        not released it. A new owner would then wait for a lease that no one uses.
        """
        earlier, _ = self._unanswered.pop(key, (owner, 0.0))
        owner = earlier if earlier.pid == owner.pid else owner  # a forked child inherits its parent's entries
        with self._noting_silence(key, owner, seconds):
            return self._acquire(key, owner, seconds)

    @contextmanager
    def _noting_silence(self, key: str, owner: Owner, seconds: float) -> Iterator[None]:
        try:
            yield
        except Held:
            raise
        except BaseException:  # including one raised by a signal handler between request and answer
            now = time.monotonic()
            for name, (_, until) in list(self._unanswered.items()):
                if until < now:
                    self._unanswered.pop(name, None)
            self._unanswered[key] = (owner, now + seconds)
            raise

    def _acquire(self, key: str, owner: Owner, seconds: float) -> Lease:
        from headway import _redis  # imported late: listing jobs reads leases and does not need Redis

        text, dead = write_owner(owner, seconds, is_counted=False), ""
        while True:
            word, found = _redis.script("lease/acquire")(
                self._client, [key, _redis.LEASE_TOKEN()], [text, _milliseconds(seconds), dead]
            )
            if word == "ACQUIRED":
                return Lease(key, int(found), owner, seconds, lapsed=bool(dead))
            known = read_owner(str(found).partition(" ")[2])
            if dead or known is None or not known.owner.is_dead:
                raise _held(known.owner if known else None)
            dead = str(found)  # the script replaces the lease only if it still has this value

    def renew(self, lease: Lease) -> None:
        """Renew the lease from now, or raise `StaleClaim` if it expired."""
        from headway import _redis

        arguments = (held_as(lease), _milliseconds(lease.seconds))
        if _redis.script("lease/renew")(self._client, [str(lease.key)], arguments) != "RENEWED":
            raise StaleClaim("The lease expired; another process may have it.")

    def release(self, lease: Lease) -> bool:
        """Release the lease. Return False and change nothing if this owner no longer has it."""
        from headway import _redis

        with self._noting_silence(str(lease.key), lease.owner, lease.seconds):
            return bool(_redis.script("lease/release")(self._client, [str(lease.key)], [held_as(lease)]) == "RELEASED")


def held_as(lease: Lease) -> str:
    """Return the value of the Redis key while this owner has the lease."""
    return f"{lease.token} {write_owner(lease.owner, lease.seconds, is_counted=False)}"


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


@lru_cache(maxsize=1)
def _here(pid: int) -> tuple[str, str, str]:
    """Return host name, machine id and pid namespace. Cached by pid: a forked child may enter another namespace."""
    import socket  # imported late: it takes milliseconds and is rarely needed

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {_time_namespace()}"
        # If /proc belongs to another namespace (unshare --pid without --mount-proc), its pids are not ours.
        ours = os.readlink("/proc/self") == str(pid)
        return socket.gethostname(), machine, f"{boot} {os.readlink('/proc/self/ns/pid')}" if ours else ""
    except OSError:  # not Linux: dead owners are not detected, their leases must expire
        return socket.gethostname(), "", ""


def _time_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/time")
    except FileNotFoundError:  # kernels before 5.6 have no time namespaces
        return ""


@lru_cache(maxsize=1)
def _own_start(pid: int) -> str:
    """Return the start time of this process. Cached, because every claim of items needs it."""
    return _started(pid) or ""


def _is_gone(pid: int, started: str) -> bool:
    """Return whether the process with this pid and start time has ended."""
    found = _started(pid)
    if found is not None:
        return found != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # alive, but owned by another user and hidden in /proc (hidepid)
    return False


def _started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot.

    An empty text means a zombie; None means that /proc does not show the process.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state[0] in "ZX" else state[19]

"""Leases: the right to do something alone, for a while.

A lease has an *owner*, a *token* that grows with every change of hands, and an end. Whoever does something under a
lease shows its token where the result is recorded; once somebody else has the lease, that token is refused (the fence).
The end is measured by the store's clock. On the owner's own machine the kernel's monotonic clock decides instead, which
nobody can set; and an owner that is seen to be dead there is replaced at once.

No lease has more left than its whole time. One that does was written before the store's clock was set back. Whoever wants it
gives it its whole time from now on: an owner that lives renews it, and that of a dead one ends.

`SqlLeases` keeps leases in columns of rows (``holder``, ``token``, ``lease_until``), `RedisLeases` in keys that expire.
Acquiring again with the same `Owner` gives the first answer: an owner is made for one acquisition, so a call that is
repeated because its answer was lost takes nothing from anybody.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headway._sql import Tx, Value
from headway.errors import HeadwayError, Held, NotFound, StaleClaim
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

log = Log("lease")

#: Seconds a lease may have left beyond its whole time and not be shortened: the two were read one after the other.
SLACK = 1.0


@dataclass(frozen=True, slots=True)
class Owner:
    """One acquisition by one process, described so that its death can be seen from the same machine."""

    host: str
    machine: str  # this boot of this kernel, with its clock
    space: str  # of process ids: two containers may each have a process 7
    pid: int
    started: str  # a reused pid is another process
    claim: str  # differs with every acquisition

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        host, machine, space = _here(pid)
        return cls(host, machine, space, pid, _own_start(pid), uuid.uuid4().hex[:16])

    @property
    def is_dead(self) -> bool:
        """Whether the process can be *seen* to be gone: only one of this machine; others are waited for."""
        _, _, space = _here(os.getpid())
        return bool(self.space) and self.space == space and _is_gone(self.pid, self.started)

    @property
    def shares_our_clock(self) -> bool:
        return bool(self.machine) and self.machine == _here(os.getpid())[1]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def write_owner(owner: Owner, seconds: float | None = None, *, is_counted: bool = True) -> str:
    """As JSON; with ``seconds`` also for how long the lease is, and its end by the machine's monotonic clock if it is counted
    from now."""
    known: dict[str, Any] = {name: getattr(owner, name) for name in Owner.__slots__}
    if seconds is not None:
        if is_counted:
            known["until"] = round(time.monotonic() + seconds, 3)
        known["seconds"] = seconds
    return json.dumps(known, separators=(",", ":"))


class Written(NamedTuple):
    """An owner as it was read, with what was written beside it."""

    owner: Owner
    until: float | None  # the end of its lease, by the monotonic clock of its machine
    seconds: float | None  # the whole time of its lease; an earlier headway wrote none


def read_owner(text: str | None) -> Written | None:
    """What `write_owner` wrote; None for a text that is no owner's."""
    try:
        known = json.loads(text or "")
        until, seconds = known.get("until"), known.get("seconds")
        owner = Owner(**{name: known[name] for name in Owner.__slots__})
        if type(owner.pid) is not int or not 0 < owner.pid < 2**31:
            return None
        return Written(owner, None if until is None else float(until), None if seconds is None else float(seconds))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def stride() -> int:
    """By how much the token of a claim grows that shows nothing but its token. A store that was put back to an earlier moment
    (a backup, a failover that lost the last commits) gives the same row to another claimant, and by steps of one the same
    token. Always between 2**30 and 2**31: PostgreSQL then plans for one type, and a row outlasts 2**32 claims."""
    return int.from_bytes(os.urandom(4), "big") >> 2 | 1 << 30


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was acquired. ``key`` is the row's or the key's name."""

    key: Value
    token: int
    owner: Owner
    seconds: float
    lapsed: bool = False  # somebody had it before and did not give it back


class SqlLeases:
    """The leases in one table. Its rows have ``holder``, ``token`` and ``lease_until``; ``key`` names the row.

    Every call works inside the caller's transaction, so that what is done under the lease is fenced by the same commit.
    """

    def __init__(self, table: str = "leases", key: str = "name") -> None:
        self._table, self._key = table, key

    def acquire(self, tx: Tx, key: Value, owner: Owner, seconds: float) -> Lease | Held:
        """Take the lease, or say who has it. That is not raised here: the transaction is to be committed, for a lease that
        ends too late was shortened by it. A row of the table ``leases`` is made when it is not there."""
        if self._table == "leases":
            tx.execute("INSERT INTO leases (name) VALUES (?) ON CONFLICT (name) DO NOTHING", (key,))
        holder, token, until = self._row(tx, key)
        found = read_owner(holder)
        if found is not None and found.owner.claim == owner.claim:
            self._write(tx, key, owner, token, seconds)  # the same acquisition again: its first answer was lost
            return Lease(key, token, owner, seconds)
        if holder is not None and not has_ended(holder, until, tx.now()):
            self.shorten(tx, key)
            return _held(found.owner if found else None)
        self._write(tx, key, owner, token + 1, seconds)
        return Lease(key, token + 1, owner, seconds, lapsed=holder is not None)

    def shorten(self, tx: Tx, key: Value) -> None:
        """See `shorten`: for whoever is refused something because of the lease, and does not want it for itself."""
        shorten(tx, self._table, f"{self._key} = ?", (key,))

    def holder(self, tx: Tx, key: Value) -> Owner | None:
        """Who has the lease now; None when nobody has."""
        holder, _, until = self._row(tx, key)
        found = read_owner(holder)
        return None if found is None or has_ended(holder, until, tx.now()) else found.owner

    def renew(self, tx: Tx, lease: Lease) -> None:
        """Prolong it from now, or raise `StaleClaim` because somebody else has it. One that lapsed and that nobody took
        is still its owner's."""
        self.check(tx, lease)
        self._write(tx, lease.key, lease.owner, lease.token, lease.seconds)

    def check(self, tx: Tx, lease: Lease) -> None:
        """The fence: raise `StaleClaim` unless the lease is still this owner's. By its claim too: a database that was put
        back to an earlier moment (a failover that lost the last commits) gives a token a second time."""
        holder, token, _ = self._row(tx, lease.key)
        if token != lease.token or holder is None or is_anothers(holder, lease.owner):
            raise StaleClaim("The lease lapsed and somebody else took it; nothing was recorded.")

    def release(self, tx: Tx, lease: Lease) -> bool:
        """Give it back; False when it was not this owner's any more, and then nothing changes."""
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
        locked = " FOR UPDATE" if tx.engine == "postgresql" else ""  # SQLite: the transaction has the write lock
        row = tx.one(
            f"SELECT holder, token, lease_until FROM {self._table} WHERE {self._key} = ?{locked}",
            (key,),
        )
        if row is None:
            raise NotFound("What was to be leased is not there any more.")
        return row[0], int(row[1]), row[2]

    def _write(self, tx: Tx, key: Value, owner: Owner, token: int, seconds: float) -> None:
        tx.execute(
            f"UPDATE {self._table} SET holder = ?, token = ?, lease_until = ? WHERE {self._key} = ?",
            (write_owner(owner, seconds), token, tx.now() + seconds, key),
        )


def _held(owner: Owner | None) -> Held:
    return Held(
        f"{owner or 'another process'} has it", hint="It is free again when that process ends or gives it back."
    )


def is_anothers(holder: str, owner: Owner) -> bool:
    """Whether a holder's text names another acquisition than ``owner``; one that names none (a fleet) is nobody's alone."""
    if owner.claim in holder:
        return False
    found = read_owner(holder)
    return found is not None and found.owner.claim != owner.claim


def has_ended(holder: str | None, until: float | None, now: float) -> bool:
    """Whether a lease has ended, by what its columns say and the store's time: also for one who only looks.

    An owner that can be seen to be dead has no lease. Where the owner's clock is ours, a wall clock that was set forward
    or back does not matter. An owner we cannot read (an earlier headway's) is believed until the end it wrote.
    """
    found = read_owner(holder)
    if found is not None:
        if found.owner.is_dead:
            return True
        if found.owner.shares_our_clock and found.until is not None:
            return time.monotonic() > found.until
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
    """Leases in those rows that end later than they can, because the store's clock was set back since, end after their whole
    time from now. Their owners renew them if they live.

    ``ends``: the columns that say when. ``least``: no lease of these rows is shorter, so only later ends are looked at.
    """
    now = tx.now()
    rows = tx.all(
        f"SELECT holder, max(lease_until) FROM {table} WHERE {which} AND holder IS NOT NULL AND lease_until > ? "
        "GROUP BY holder",
        (*values, now + least),
    )
    for holder, until in rows:
        found = read_owner(holder)
        if found is None or found.seconds is None or until <= now + found.seconds + SLACK:
            continue
        end = now + found.seconds
        log.warning("the store's clock was set back: a lease begins anew", key=table, worker=str(found.owner))
        tx.execute(
            f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in ends)} WHERE {which} AND holder = ? AND lease_until > ?",
            (*[end] * len(ends), *values, holder, end),
        )


@contextmanager
def renewing(renew: Callable[[], None], seconds: float) -> Iterator[None]:
    """Prolong a lease of so many seconds by ``renew`` while the block runs, however long one step of it takes.

    A lease that somebody else took is not renewed any more; the block learns of it where it shows its token. A process
    that is stopped or killed renews nothing, and its lease ends.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(seconds / 3):
            try:
                renew()
            except (StaleClaim, NotFound):
                return
            except HeadwayError:
                continue  # busy or away: the lease has time for another try

    thread = threading.Thread(target=work, name="headway-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # what follows may fork


class RedisLeases:
    """Leases as keys of Redis that expire by the server's clock. Raises what `headway._redis` raises.

    An acquisition or a release that did not come to its end may have left a lease that nobody acts under. Its claim is
    remembered, so that we do not wait for ourselves.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._unused: deque[str] = deque(maxlen=1_000)

    def acquire(self, key: str, owner: Owner, seconds: float) -> Lease:
        """Take the lease, or raise `Held` and say who has it."""
        try:
            return self._acquire(key, owner, seconds)
        except Held:
            raise
        except BaseException:
            self._unused.append(owner.claim)
            raise

    def _acquire(self, key: str, owner: Owner, seconds: float) -> Lease:
        from headway import _redis  # here and below: whoever lists jobs reads leases too, and needs no Redis

        text, dead = write_owner(owner, seconds, is_counted=False), ""
        while True:
            word, found = _redis.script("lease/acquire")(
                self._client, [key, _redis.LEASE_TOKEN()], [text, _milliseconds(seconds), dead]
            )
            if word == "ACQUIRED":
                return Lease(key, int(found), owner, seconds, lapsed=bool(dead))
            known = read_owner(str(found).partition(" ")[2])
            if dead or known is None or not (known.owner.is_dead or known.owner.claim in self._unused):
                raise _held(known.owner if known else None)
            dead = str(found)  # replaced only if it is still this one

    def renew(self, lease: Lease) -> None:
        """Prolong it from now, or raise `StaleClaim`: it ended, and may be somebody else's."""
        from headway import _redis

        arguments = (held_as(lease), _milliseconds(lease.seconds))
        if _redis.script("lease/renew")(self._client, [str(lease.key)], arguments) != "RENEWED":
            raise StaleClaim("The lease lapsed; somebody else may have it.")

    def release(self, lease: Lease) -> bool:
        """Give it back; False when it was not this owner's any more, and then nothing changes."""
        from headway import _redis

        try:
            return bool(_redis.script("lease/release")(self._client, [str(lease.key)], [held_as(lease)]) == "RELEASED")
        except BaseException:
            self._unused.append(lease.owner.claim)
            raise


def held_as(lease: Lease) -> str:
    """What the key of a lease says in Redis while it is this owner's."""
    return f"{lease.token} {write_owner(lease.owner, lease.seconds, is_counted=False)}"


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


@lru_cache(maxsize=1)
def _here(pid: int) -> tuple[str, str, str]:
    """Host name, machine and space of process ids; by pid, because a fork may enter another namespace."""
    import socket  # takes milliseconds, and most lists of jobs ask nothing of it

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/time')}"
        # A /proc of another namespace (unshare --pid without --mount-proc) shows other processes under our numbers.
        ours = os.readlink("/proc/self") == str(pid)
        return socket.gethostname(), machine, f"{boot} {os.readlink('/proc/self/ns/pid')}" if ours else ""
    except OSError:  # not Linux: every owner is waited for
        return socket.gethostname(), "", ""


@lru_cache(maxsize=1)
def _own_start(pid: int) -> str:
    """Of this process: it began once, and every claim of items asks."""
    return _started(pid) or ""


def _is_gone(pid: int, started: str) -> bool:
    """Whether the process that began at that moment is no more: there is none of that number, or another one."""
    found = _started(pid)
    if found is not None:
        return found != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's, which /proc does not show us (hidepid): it lives
    return False


def _started(pid: int) -> str | None:
    """When the process began, as the kernel counts; empty if it has ended and waits to be reaped, None if /proc shows no
    such process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if state[0] in "ZX" else state[19]

"""Leases: one owner, a token that grows, an end nobody's clock can move, release by the owner alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway import _lease, _redis
from headway._lease import Lease, Owner, RedisLeases, SqlLeases, read_owner, shorten, write_owner
from headway._sql import Database, Tx, Value, connect
from headway._sql.tx import Cursor
from headway.errors import Held, StaleClaim
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


class Store:
    """The same words over both forms."""

    def __init__(self, database: Database | None, leases: RedisLeases | None) -> None:
        self._database, self._redis, self._sql = database, leases, SqlLeases()

    def acquire(self, owner: Owner, seconds: float = 30.0) -> Lease:
        if self._redis is not None:
            return self._redis.acquire("headway:test:lease", owner, seconds)
        assert self._database is not None
        found = self._database.run(lambda tx: self._sql.acquire(tx, "x", owner, seconds))
        if isinstance(found, Held):
            raise found
        return found

    def renew(self, lease: Lease) -> None:
        if self._redis is not None:
            self._redis.renew(lease)
        else:
            assert self._database is not None
            self._database.run(lambda tx: self._sql.renew(tx, lease))

    def release(self, lease: Lease) -> bool:
        if self._redis is not None:
            return self._redis.release(lease)
        assert self._database is not None
        return self._database.run(lambda tx: self._sql.release(tx, lease))

    def go_back(self) -> None:
        """To before anything was acquired: as an older copy has it, or a server that took over and had not heard of it."""
        if self._redis is not None:
            self._redis._client.flushdb()
        else:
            assert self._database is not None
            self._database.run(lambda tx: tx.execute("DELETE FROM leases"))

    def set_clock(self, seconds: float) -> None:
        """What it looks like after the store's clock was set forward, or back if negative."""
        if self._redis is not None:
            left: Any = self._redis._client.pttl("headway:test:lease")
            self._redis._client.pexpire("headway:test:lease", left - int(seconds * 1000))
        else:
            assert self._database is not None
            self._database.write("UPDATE leases SET lease_until = lease_until - ?", (seconds,))


@pytest.fixture(params=["file", "memory", "postgresql", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        client = server.client(1)
        yield Store(None, RedisLeases(client))
        client.close()
        return
    url = {"file": f"sqlite:///{tmp_path}/l.db", "memory": "sqlite:///:memory:"}.get(request.param)
    with connect(url or request.getfixturevalue("postgres_with_tables")) as database:
        yield Store(database, None)


def test_two_owners_exclude_each_other_until_the_first_gives_it_back(store: Store):
    mine = store.acquire(Owner.current())
    with pytest.raises(Held, match=f"process {os.getpid()} on "):
        store.acquire(Owner.current())
    assert store.release(mine)
    theirs = store.acquire(Owner.current())
    assert theirs.token > mine.token


def test_an_acquisition_that_is_repeated_gets_the_first_answer(store: Store):
    owner = Owner.current()
    assert store.acquire(owner).token == store.acquire(owner).token


@pytest.mark.parametrize("step", ["acquire", "release"])
def test_a_lease_that_was_left_behind_because_an_answer_was_lost_is_waited_for_by_others_and_not_by_its_own_process(
    step: str, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy, state = tcp_proxy(redis_server.port), redis_server.client(1)
    with _redis.connect(f"redis://127.0.0.1:{proxy.port}/1", role="state") as client:
        leases = RedisLeases(client)
        leases.release(leases.acquire("headway:test:lease", Owner.current(), 30.0))  # the server knows the scripts
        if step == "acquire":
            proxy.drop_replies(to=_redis.script("lease/acquire").sha.encode())
            with pytest.raises(_redis.failures()):
                leases.acquire("headway:test:lease", Owner.current(), 30.0)
        else:
            mine = leases.acquire("headway:test:lease", Owner.current(), 30.0)
            proxy.refuse()
            proxy.cut()
            with pytest.raises(_redis.failures()):
                leases.release(mine)
        proxy.pass_through()
        assert state.exists("headway:test:lease")
        with pytest.raises(Held):
            RedisLeases(state).acquire("headway:test:lease", Owner.current(), 30.0)
        leases.acquire("headway:test:lease", Owner.current(), 30.0)
        with pytest.raises(Held):
            leases.acquire("headway:test:lease", Owner.current(), 30.0)


def test_a_stale_owner_can_neither_renew_nor_release(store: Store):
    mine = store.acquire(Owner.current())
    store.release(mine)
    theirs = store.acquire(Owner.current())
    with pytest.raises(StaleClaim):
        store.renew(mine)
    assert not store.release(mine)
    with pytest.raises(Held):
        store.acquire(Owner.current())
    store.renew(theirs)


def test_an_owner_whose_token_was_given_a_second_time_after_the_store_went_back_is_stale(store: Store):
    mine = store.acquire(Owner.current())
    store.go_back()
    theirs = store.acquire(Owner.current())
    assert theirs.token == mine.token
    with pytest.raises(StaleClaim):
        store.renew(mine)
    assert not store.release(mine)
    store.renew(theirs)
    assert store.release(theirs)


def test_a_lease_that_is_not_renewed_ends(store: Store):
    mine = store.acquire(Owner.current(), 0.2)
    taken = eventually(lambda: _try(store), timeout=5.0)
    assert taken.token > mine.token
    assert not store.release(mine)


def test_renewing_moves_the_end(store: Store):
    mine = store.acquire(Owner.current(), 1.5)
    time.sleep(1.0)
    store.renew(mine)
    with pytest.raises(AssertionError, match="not within"):
        eventually(lambda: _try(store), timeout=1.0)
    assert store.release(mine)


def test_an_owner_that_is_dead_on_this_machine_is_replaced_at_once(store: Store):
    program = "import os; from headway._lease import *; print(write_owner(Owner.current()))"
    text = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    found = read_owner(text)
    assert found is not None
    dead = store.acquire(found[0], 3600.0)
    assert store.acquire(Owner.current()).token > dead.token


def test_an_owner_whose_pid_was_given_to_another_process_is_dead():
    us = Owner.current()
    assert not us.is_dead
    assert replace(us, started="1").is_dead
    assert not replace(us, started="1", space="another machine").is_dead, "a process elsewhere cannot be seen"


def test_a_stopped_owner_is_not_dead():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGSTOP)
        stopped = replace(Owner.current(), pid=child.pid, started=_lease._started(child.pid) or "")
        assert not stopped.is_dead
        child.kill()
        child.wait()
        assert stopped.is_dead


#: Says of itself whether it is dead, when it had no descriptor left to read its own beginning.
EXHAUSTED = """
import os
from headway._lease import Owner
Owner("host", "", "", 1, "", "").is_dead  # as whoever lists jobs asks, before it has a lease of its own
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
owner = Owner.current()
for descriptor in taken:
    os.close(descriptor)
assert owner.space
print(owner.is_dead)
"""


def test_an_owner_that_could_open_no_file_when_it_asked_when_it_began_is_not_taken_for_dead():
    limited = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, "-c", EXHAUSTED]
    assert subprocess.check_output(limited, text=True) == "False\n"


#: As on a kernel before 5.6, which has no namespaces of time and no link to one.
OLDER_KERNEL = """
import os
from dataclasses import replace
readlink = os.readlink
def older(path):
    if path == "/proc/self/ns/time":
        raise FileNotFoundError(2, "No such file or directory", path)
    return readlink(path)
os.readlink = older
from headway._lease import Owner
us = Owner.current()
print(us.shares_our_clock, replace(us, started="1").is_dead)
"""


def test_dead_owners_are_detected_on_a_kernel_without_time_namespaces():
    assert subprocess.check_output([sys.executable, "-c", OLDER_KERNEL], text=True) == "True True\n"


@pytest.mark.parametrize(("proc", "seen"), [([], "False"), (["--mount-proc"], "True")])
def test_a_proc_of_another_namespace_shows_no_owner_as_dead(proc: list[str], seen: str):
    """Under our numbers it shows other processes: when one of them ends, a living owner would be taken for dead."""
    apart = ["unshare", *([] if os.getuid() == 0 else ["-Ur"]), "--pid", "--fork", *proc]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        pytest.skip("a namespace of processes cannot be had here")
    ask = (
        "from dataclasses import replace; from headway._lease import Owner; "
        "print(replace(Owner.current(), started='1').is_dead)"
    )
    assert subprocess.check_output([*apart, sys.executable, "-c", ask], text=True) == f"{seen}\n"


#: Covers /proc/PID of its first argument, as hidepid does for other users' processes, gives up root if it has it, and
#: says whether the owner it reads is dead while that process lives, and whether it is once the process was killed.
HIDING = """
import os, subprocess, sys
from headway._lease import Owner, read_owner
Owner.current()  # loads what that user may not read
owner = read_owner(sys.stdin.readline())[0]
subprocess.run(["mount", "-t", "tmpfs", "none", f"/proc/{owner.pid}"], check=True)
assert not os.path.exists(f"/proc/{owner.pid}/stat")
if sys.argv[1] == "another user":
    os.setuid(65534)
print(owner.is_dead, flush=True)
sys.stdin.readline()
print(owner.is_dead, flush=True)
"""


@pytest.mark.parametrize("who", ["the same user", "another user"])
def test_an_owner_that_hidepid_hides_is_not_taken_for_dead(who: str):
    rights = [] if os.getuid() == 0 else ["-Ur"]
    if subprocess.run(["unshare", *rights, "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a mount namespace cannot be had here")
    if who == "another user" and rights:
        pytest.skip("only root can become another user")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        hidden = replace(Owner.current(), pid=child.pid, started=_lease._started(child.pid) or "")
        with subprocess.Popen(
            ["unshare", *rights, "-m", sys.executable, "-c", HIDING, who],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as observer:  # fmt: skip
            assert observer.stdin is not None
            assert observer.stdout is not None
            observer.stdin.write(write_owner(hidden) + "\n")
            observer.stdin.flush()
            assert observer.stdout.readline() == "False\n"
            child.kill()
            child.wait()
            observer.stdin.write("\n")
            observer.stdin.flush()
            assert observer.stdout.readline() == "True\n"


@pytest.mark.parametrize("hours", [-1, 8 * 24])
def test_a_wall_clock_that_is_set_moves_no_lease_on_the_owners_machine(tmp_path: Path, hours: int):
    with connect(f"sqlite:///{tmp_path}/l.db") as database:
        leases, store = SqlLeases(), Store(database, None)
        mine = store.acquire(Owner.current(), 60.0)
        store.set_clock(hours * 3600)
        with pytest.raises(Held):
            store.acquire(Owner.current(), 60.0)
        database.run(lambda tx: leases.check(tx, mine))


@pytest.mark.parametrize("verb", ["acquire", "release"])
@pytest.mark.parametrize("arrives", ["arrives", "is lost"])
def test_a_lease_whose_answer_was_lost_is_not_waited_for_by_the_one_who_asked(
    redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy], verb: str, arrives: str
):
    proxy = tcp_proxy(redis_server.port)
    with _redis.connect(f"redis://127.0.0.1:{proxy.port}/1", role="state") as client:
        leases = RedisLeases(client)
        # The server knows the scripts: else the answer that is lost may be that it does not, and nothing was done.
        leases.release(leases.acquire("headway:test:other", Owner.current(), 600.0))
        first = leases.acquire("headway:test:lease", Owner.current(), 600.0) if verb == "release" else None
        if arrives == "arrives":
            proxy.drop_replies(to=b"headway:test:lease")
        else:
            proxy.refuse()
            proxy.cut()
        with pytest.raises(_redis.failures()):
            leases.release(first) if first else leases.acquire("headway:test:lease", Owner.current(), 600.0)
        proxy.pass_through()
        ours = leases.acquire("headway:test:lease", Owner.current(), 600.0)
        leases.renew(ours)
        with pytest.raises(Held):
            leases.acquire("headway:test:lease", Owner.current(), 600.0)
        assert leases.release(ours)


def elsewhere() -> Owner:
    """A process of another machine, which nobody here can see."""
    return replace(Owner.current(), machine="m", space="s", host="other")


def test_an_owner_elsewhere_is_judged_by_the_stores_clock(store: Store):
    store.acquire(elsewhere(), 60.0)
    with pytest.raises(Held, match="on other"):
        store.acquire(Owner.current(), 60.0)
    store.set_clock(61.0)
    store.acquire(Owner.current(), 60.0)


def test_a_machine_that_was_put_back_to_a_snapshot_keeps_no_lease_by_the_clock_it_had_before(tmp_path: Path):
    """Its boot and its number are the same, and its clock stands where it stood hours ago."""
    with connect(f"sqlite:///{tmp_path}/l.db") as database:
        store = Store(database, None)
        before = replace(Owner.current(), space="a container that is no more")
        store.acquire(before, 30.0)
        written = json.loads(write_owner(before, 30.0))
        written["until"] += 3600.0
        database.write("UPDATE leases SET holder = ?", (json.dumps(written),))
        with pytest.raises(Held):
            store.acquire(Owner.current(), 30.0)
        store.set_clock(31.0)
        store.acquire(Owner.current(), 30.0)


def test_a_clock_set_back_delays_by_at_most_one_lease(store: Store):
    store.acquire(elsewhere(), 60.0)
    store.set_clock(-3600.0)
    with pytest.raises(Held, match="on other"):  # it may live, and renew it
        store.acquire(Owner.current(), 60.0)
    store.set_clock(58.0)
    with pytest.raises(Held):
        store.acquire(Owner.current(), 60.0)
    store.set_clock(3.0)
    store.acquire(Owner.current(), 60.0)


def test_a_clock_that_was_set_back_takes_nothing_from_one_who_lives_elsewhere(store: Store):
    lease = store.acquire(elsewhere(), 60.0)
    store.set_clock(-3600.0)
    with pytest.raises(Held):
        store.acquire(Owner.current(), 60.0)
    store.set_clock(50.0)
    store.renew(lease)
    store.set_clock(50.0)
    with pytest.raises(Held):
        store.acquire(Owner.current(), 60.0)
    assert store.release(lease)


def test_however_many_leases_end_too_late_they_are_shortened_together(tmp_path: Path):
    """By a few statements, and said once of each process: each claim of an item has a holder of its own."""
    counts = {}
    with connect(f"sqlite:///{tmp_path}/l.db") as database:
        for many in (3, 300):
            names = [f"{many} {number}" for number in range(many)]
            for name in names:
                database.run(lambda tx, name=name: SqlLeases().acquire(tx, name, elsewhere(), 60.0))  # type: ignore[misc]
            database.write("UPDATE leases SET lease_until = lease_until + 3600")
            seen: list[str] = []

            def work(tx: Tx, seen: list[str] = seen) -> None:
                def execute(sql: str, parameters: Sequence[Value] = ()) -> Cursor:
                    seen.append(sql)
                    return tx._execute(sql, parameters)

                shorten(Tx(tx.engine, execute, tx._executemany), "leases", "holder IS NOT NULL")

            database.run(work)
            counts[many] = len(seen)
            (late,) = database.one("SELECT max(lease_until) FROM leases") or (0.0,)
            assert late <= database.now() + 60.0
    assert counts[3] == counts[300]


def test_who_wants_it_for_a_shorter_time_does_not_shorten_the_lease_of_another(store: Store):
    store.acquire(elsewhere(), 3600.0)
    with pytest.raises(Held):
        store.acquire(Owner.current(), 1.0)
    store.set_clock(3500.0)
    with pytest.raises(Held):
        store.acquire(Owner.current(), 1.0)


def test_an_owner_that_an_earlier_headway_wrote_is_believed_until_the_end_it_wrote(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/l.db") as database:
        store = Store(database, None)
        store.acquire(elsewhere(), 60.0)
        database.write("UPDATE leases SET holder = ?", (write_owner(elsewhere()),))
        store.set_clock(-3600.0)
        with pytest.raises(Held):
            store.acquire(Owner.current())
        store.set_clock(100.0)
        with pytest.raises(Held):
            store.acquire(Owner.current())


def test_no_two_claims_are_likely_to_have_the_same_token():
    strides = [_lease.stride() for _ in range(1000)]
    assert len(set(strides)) > 990
    assert {stride.bit_length() for stride in strides} == {31}


def odd_pids() -> list[str]:
    """Owners whose process could not be asked for: kill(2) takes 0 and -1 for many of them."""
    fields = dict.fromkeys(Owner.__slots__, "x")
    return [json.dumps({**fields, "pid": pid}) for pid in (0, -1, 2**31, True, "7", None, 1.0)]


def odd_ends() -> list[str]:
    """What a foreign hand may have written as the end of a lease, or as all of it."""
    fields = {**dict.fromkeys(Owner.__slots__, "x"), "pid": 7}
    return [json.dumps({**fields, name: 10**400}) for name in ("until", "seconds")] + ["[" * 100_000]


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "null", '{"pid": 1}', "no json", *odd_pids(), *odd_ends()])
def test_a_text_that_is_not_an_owner_is_recognised(text: str | None):
    assert read_owner(text) is None


def test_an_owner_survives_writing_and_reading():
    us = Owner.current()
    assert read_owner(write_owner(us)) == (us, None, None)
    found = read_owner(write_owner(us, 60.0))
    assert found is not None
    assert found.until is not None
    assert (found.owner, found.seconds) == (us, 60.0)


def _try(store: Store) -> Lease | None:
    try:
        return store.acquire(Owner.current())
    except Held:
        return None

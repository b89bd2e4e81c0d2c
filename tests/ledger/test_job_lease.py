"""Who holds what: the dead are seen to be dead, the fenced stay out, and no clock that is set makes a difference."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest

from headway._lease import Owner, read_owner, write_owner
from headway._sql import Tx, Value
from headway._sql.tx import Cursor
from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput, JobHeld, NotFound, Refused, StaleClaim
from headway.ledger import Done, Failed, Failure, Hold, Item, Job, Ledger, NewItem
from headway.ledger.fleet import claims
from headway.ledger.store.recorder import Recorder
from tests.core.databases import python
from tests.services.waiting import eventually

BOOM = Failure("ValueError", "boom")

#: Holds the job, notes an item and claims another one, says so, and waits to be killed.
HOLDER = """
import sys
from headway.ledger import Ledger
ledger = Ledger.open(sys.argv[1])
job = ledger.job("ads")
hold = ledger.hold(job, {}, lease=1000)
job.note_running(hold, [(3, f"{hold.mark} worker 1")])
job.claim("claimant", lease=1000)
print("held", flush=True)
sys.stdin.readline()
from headway.ledger import Done
try:
    job.record([Done(5)], hold=hold)
except Exception as error:
    print(type(error).__name__, flush=True)
"""

shared_engines = pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def dead_holder(url: str, job: Job) -> None:
    """Somebody on this machine held the job and was killed."""
    process = python(HOLDER, url)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()


# ---- killed on this machine -----------------------------------------------------------------------------------------


@shared_engines
def test_who_was_killed_on_this_machine_is_seen_to_be_gone_at_once(ledger: Ledger, job: Job, dead_holder: None):
    """No lease is waited for: every view says it, before anybody takes over."""
    info = job.info()
    assert (info.held, info.lost, info.status) == (False, True, "pending")
    assert [found.held for found in ledger.jobs()] == [False]
    assert [(run.outcome, run.ended_at) for run in job.runs()] == [("lost", None)]
    assert job.progress().running == 0
    assert job.items(status="processing") == []
    assert {item.status for item in job.items()} == {"pending"}
    assert job.item(3).status == "pending"


@shared_engines
@pytest.mark.parametrize("verb", ["archive", "forget", "hold"])
def test_a_holder_killed_on_this_machine_blocks_no_run(ledger: Ledger, job: Job, dead_holder: None, verb: str):
    if verb == "hold":
        assert ledger.hold(job, {}).run == 2
        assert [run.outcome for run in job.runs()] == ["lost", None]
        assert [run.outcome for run in job.history(3)] == ["lost"]
    else:
        assert getattr(ledger, verb)("ads")


@shared_engines
def test_claims_of_a_killed_process_are_taken_when_nothing_else_is_left(ledger: Ledger, job: Job, dead_holder: None):
    taken = [job.claim("other", lease=1000)[0].idx for _ in range(8)]
    assert 0 not in taken
    assert 3 not in taken, "it was noted under the hold, whose next holder charges it"
    (item,) = job.claim("other", lease=1000)
    assert (item.idx, item.attempts) == (0, 1)
    assert [(run.outcome, run.worker) for run in job.history(0)] == [("lost", "claimant")]
    assert job.claim("other") == []


def test_a_process_id_that_was_given_to_another_process_does_not_keep_the_job(ledger: Ledger, job: Job):
    """Our own id is alive, but it is not the process that took the job."""
    ledger.hold(job, {}, lease=1000)
    me = Owner.current()
    earlier = write_owner(Owner(me.host, me.machine, me.space, me.pid, "1", "earlier"), 1000.0)
    ledger.database.write("UPDATE jobs SET holder = ?", (earlier,))
    assert not job.info().held
    assert ledger.hold(job, {}).run == 2


def test_a_holder_of_another_machine_is_believed_until_its_lease_ends(ledger: Ledger, job: Job):
    ledger.hold(job, {}, lease=1000)
    elsewhere = write_owner(Owner("far", "boot 1", "boot 1", os.getpid(), "1", "theirs"), 1000.0)
    ledger.database.write("UPDATE jobs SET holder = ?", (elsewhere,))
    assert job.info().held
    with pytest.raises(JobHeld, match="on far"):
        ledger.hold(job, {})
    with pytest.raises(JobHeld):
        ledger.archive("ads")
    ledger.database.write("UPDATE jobs SET lease_until = lease_until - 1001")
    assert not job.info().held
    assert ledger.hold(job, {}).run == 2


def test_a_holder_that_an_earlier_version_wrote_is_believed_until_its_lease_ends(ledger: Ledger, job: Job):
    ledger.hold(job, {}, lease=1000)
    old = json.dumps({"host": "h", "space": "s", "pid": 1, "born": "1"})
    ledger.database.write("UPDATE jobs SET holder = ?", (old,))
    with pytest.raises(JobHeld):
        ledger.hold(job, {})
    with pytest.raises(JobHeld):
        ledger.forget("ads")
    ledger.database.write("UPDATE jobs SET lease_until = lease_until - 1001")
    assert ledger.hold(job, {}).run == 2


# ---- fences ---------------------------------------------------------------------------------------------------------


@shared_engines
@pytest.mark.parametrize("verb", ["archive", "forget"])
def test_a_stopped_holder_that_wakes_up_after_a_fresh_start_records_nothing(
    url: str, ledger: Ledger, job: Job, verb: str
):
    sleeper = python(HOLDER, url)
    assert sleeper.stdout is not None
    assert sleeper.stdin is not None
    assert sleeper.stdout.readline() == "held\n"
    sleeper.send_signal(signal.SIGSTOP)
    # Its lease lapses while it sleeps; for this machine's clock and for everybody else's.
    lapsed = write_owner(Owner("far", "", "", 1, "1", "theirs"))
    ledger.database.write("UPDATE jobs SET lease_until = 0, holder = ? WHERE no = ?", (lapsed, job.no))
    getattr(ledger, verb)("ads")
    fresh = ledger.create("ads")
    fresh.register(NewItem(idx) for idx in range(10))
    ledger.hold(fresh, {})  # with a token as the sleeper's was
    sleeper.send_signal(signal.SIGCONT)
    said, _ = sleeper.communicate("\n", 60)
    assert said.split() == ["StaleClaim" if verb == "archive" else "NotFound"]
    assert fresh.info().done == 0
    assert ledger.job("ads").no == fresh.no


#: Every write of whoever holds a job; what each of them would change is looked at below.
TABLES = ("jobs", "runs", "input_products", "progress", "outputs", "outbox")
WRITES: dict[str, Callable[[Ledger, Job, Hold], object]] = {
    "register": lambda _, job, __: job.register([NewItem(77)]),
    "drop": lambda _, job, __: job.drop([1]),
    "replace_items": lambda _, job, __: job.replace_items([NewItem(1, "[1]")]),
    "seal": lambda _, job, __: job.seal("another digest"),
    "rewrite_outputs": lambda _, job, __: job.rewrite_outputs(),
    "describe": lambda ledger, job, __: ledger.describe(
        job, function="f", source="s", command="c", keyed_by=None, max_retries=9
    ),
    "record": lambda _, job, __: job.record([Done(1)]),
    "finish": lambda _, job, __: job.finish(),
    "claim": lambda _, job, __: job.claim("w"),
    "note_running": lambda _, job, hold: job.note_running(hold, [(1, "w")]),
    "give_back": lambda _, job, __: job.give_back([2]),
    "renew": lambda ledger, _, hold: ledger.renew(hold),
    "release": lambda ledger, _, hold: ledger.release(hold, "failed"),
}


@pytest.mark.parametrize("verb", WRITES)
def test_a_former_holder_cannot_write(ledger: Ledger, job: Job, verb: str):
    ledger.database.write("INSERT INTO outputs (job, path, seq, size) VALUES (?, '/r', 5, 5)", (job.no,))
    paused = ledger.hold(job, {})
    ledger.database.write("UPDATE jobs SET holder = NULL, lease_until = NULL")  # its lease lapsed
    ledger.hold(job, {})
    before = [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES]
    with pytest.raises(StaleClaim, match="taken over"):
        WRITES[verb](ledger, job.held_by(paused), paused)
    assert [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES] == before


@pytest.mark.parametrize("verb", WRITES)
def test_nor_can_one_whose_token_was_given_a_second_time_after_the_database_went_back(
    ledger: Ledger, job: Job, verb: str
):
    ledger.database.write("INSERT INTO outputs (job, path, seq, size) VALUES (?, '/r', 5, 5)", (job.no,))
    lost = ledger.hold(job, {})
    ledger.database.write("UPDATE jobs SET holder = NULL, lease_until = NULL, token = token - 1")
    ledger.database.write("DELETE FROM runs")
    again = ledger.hold(job, {})
    assert (again.token, again.run) == (lost.token, lost.run)
    before = [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES]
    with pytest.raises(StaleClaim, match="taken over"):
        WRITES[verb](ledger, job.held_by(lost), lost)
    assert [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES] == before


@pytest.mark.parametrize(
    "write",
    [
        lambda job: job.record([Done(0), Done(1)]),
        lambda job: job.record([Failed(0, BOOM)]),
        lambda job: job.register([NewItem(50)]),
        lambda job: job.claim("w"),
        lambda job: job.drop([0]),
        lambda job: job.seal(),
    ],
)
def test_a_handle_whose_number_another_job_got_after_the_database_went_back_changes_nothing(
    ledger: Ledger, job: Job, write: Callable[[Job], object]
):
    ledger.database.write("UPDATE jobs SET id = 'another' WHERE no = ?", (job.no,))
    before = [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES]
    with pytest.raises(NotFound, match="another job has its number"):
        write(job)
    assert [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES] == before


def time_of(ledger: Ledger) -> float:
    with ledger.database.read() as tx:
        return tx.now()


@pytest.mark.parametrize("verb", [verb for verb in WRITES if verb != "release"])
def test_the_holder_can_write(ledger: Ledger, job: Job, verb: str):
    ledger.database.write("INSERT INTO outputs (job, path, seq, size) VALUES (?, '/r', 5, 5)", (job.no,))
    hold = ledger.hold(job, {})
    job.note_running(hold, [(2, "w")])
    ledger.database.write("UPDATE jobs SET lease_until = lease_until - 1")  # else a quick renewal changes nothing
    before = [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES]
    moment = time_of(ledger)
    eventually(lambda: time_of(ledger) > moment)  # of a renewal nothing else is seen
    WRITES[verb](ledger, job.held_by(hold), hold)
    assert [ledger.database.all(f"SELECT * FROM {table}") for table in TABLES] != before


def test_a_hold_is_renewed_while_items_are_registered_however_slowly_they_come(ledger: Ledger, job: Job):
    """The lease of 3 s is moved while the second item is awaited; without that, others would take the job over."""
    hold = ledger.hold(job, {}, lease=3.0)

    def end() -> float:
        row = ledger.database.one("SELECT lease_until FROM jobs WHERE no = ?", (job.no,))
        assert row is not None
        return float(row[0])

    def items() -> Iterator[NewItem]:
        began = end()
        yield NewItem(100)
        eventually(lambda: end() > began + 0.5)
        yield NewItem(101)

    assert job.held_by(hold).register(items()) == 2
    assert job.info().held


def test_renewing_a_hold_counts_nothing_of_the_last_minute_twice(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {})
    job.record([Done(0, seconds=1.0), Failed(1, BOOM, seconds=1.0)], hold=hold)
    ledger.database.write("UPDATE jobs SET minute = minute - 1")
    ledger.renew(hold)
    job.note_running(hold, [(2, "w")])
    job.give_back([2], hold)
    job.record([Done(3, seconds=1.0)], hold=hold)
    ledger.database.write("UPDATE jobs SET minute = minute - 1")
    ledger.renew(hold)
    job.record([Done(4, seconds=1.0)], hold=hold)
    assert [sum(row[column] for row in job.minutes(0)) for column in (1, 2, 4)] == [3, 1, 4.0]


def test_an_archived_job_accepts_no_records(ledger: Ledger, job: Job):
    (claimed,) = job.claim("w", lease=1000)
    assert ledger.archive("ads") is not None
    calls: list[Callable[[], object]] = [
        lambda: job.record([Done(5)]),
        lambda: job.record([Done(claimed.idx, token=claimed.token)]),
        lambda: job.record([Failed(5, BOOM)]),
        lambda: job.claim("w"),
        lambda: job.register([NewItem(99)]),
        job.retry_dead,
        lambda: ledger.hold(job, {}),
    ]
    for call in calls:
        with pytest.raises(StaleClaim, match="was archived"):
            call()
    info = job.info()
    assert (info.done, info.total, info.failures) == (0, 10, 0)


def test_a_renewed_hold_is_kept_past_the_end_it_first_had(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {}, lease=1000)
    job.note_running(hold, [(3, f"{hold.mark} worker 1")])
    before = ledger.database.one("SELECT lease_until, holder FROM jobs")
    assert before is not None
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 0.002)  # the end is kept in milliseconds
    ledger.database.write("UPDATE jobs SET lease_until = lease_until - 900")
    ledger.database.write("UPDATE progress SET lease_until = lease_until - 900")
    ledger.renew(hold, [3])
    after = ledger.database.one("SELECT lease_until, holder FROM jobs")
    assert after is not None
    assert after[0] >= before[0]
    assert json.loads(after[1])["until"] > json.loads(before[1])["until"]
    noted = ledger.database.one("SELECT lease_until FROM progress WHERE idx = 3")
    assert noted is not None
    assert noted[0] >= before[0]


def test_a_renewed_claim_is_kept_past_the_end_it_first_had(ledger: Ledger, job: Job):
    (item,) = job.claim("w", lease=1000)
    before = ledger.database.one("SELECT lease_until, holder FROM progress")
    assert before is not None
    assert job.renew([item], lease=5000) == 1
    after = ledger.database.one("SELECT lease_until, holder FROM progress")
    assert after is not None
    assert after[0] >= before[0] + 3000
    assert json.loads(after[1])["until"] >= json.loads(before[1])["until"] + 3000


def test_a_claim_that_lapsed_for_the_last_time_as_the_last_open_item_finishes_the_job(ledger: Ledger):
    job = ledger.create("last", max_retries=0)
    job.register([NewItem(0), NewItem(1)])
    job.seal()
    job.record([Done(0)])
    job.claim("slow", lease=1e-6)
    assert job.info().finished_at is None
    assert job.claim("other") == []
    info = job.info()
    assert (info.status, info.done, info.dead) == ("completed", 1, 1)
    rows = ledger.database.all("SELECT type, data FROM outbox")
    assert [(kind, json.loads(data)) for kind, data in rows] == [
        ("job.completed", {"total": 2, "succeeded": 1, "failed": 1})
    ]


@pytest.mark.parametrize(  # on PostgreSQL a renewal waits for nobody who has the job's row
    ("engine", "verb"), [("sqlite", "claim"), ("sqlite", "renew"), ("postgresql", "claim")], indirect=["engine"]
)
def test_a_claim_lasts_its_whole_time_however_long_the_database_was_busy(
    url: str, ledger: Ledger, job: Job, verb: str
) -> None:
    """On its own machine its end is counted by the kernel's clock: from the moment it was written, not asked for."""
    mine = job.claim("w", lease=30.0) if verb == "renew" else []
    busy, over, freed_at = threading.Event(), threading.Event(), [0.0]

    def be_busy(tx: Tx) -> None:
        tx.execute("UPDATE jobs SET updated_at = updated_at")
        busy.set()
        over.wait(10.0)
        freed_at[0] = time.monotonic()

    with Ledger.open(url) as other, ThreadPoolExecutor(2) as pool:
        blocking = pool.submit(other.database.run, be_busy)
        assert busy.wait(10.0)
        wanted = pool.submit(job.renew, mine, lease=30.0) if verb == "renew" else pool.submit(job.claim, "w")
        time.sleep(0.3)
        over.set()
        blocking.result()
        assert wanted.result()
    row = ledger.database.one("SELECT holder FROM progress")
    assert row is not None
    found = read_owner(row[0])
    assert found is not None
    assert found.until is not None
    assert found.until >= freed_at[0] + 30.0 - 0.01


@pytest.mark.parametrize("lease", [0.0, -1.0, math.nan, math.inf])
def test_a_claim_is_not_renewed_for_a_time_that_is_none(job: Job, lease: float):
    mine = job.claim("w", lease=1000.0)
    with pytest.raises(InvalidInput, match="lease"):
        job.renew(mine, lease=lease)
    assert job.record([Done(mine[0].idx, token=mine[0].token)]).done == 1


def test_as_many_may_be_claimed_one_by_one_as_there_are(ledger: Ledger):
    """Each claim names its own acquisition: more than a statement has parameters on any engine."""
    many = 66_000
    job = ledger.create("many")
    job.register(NewItem(idx) for idx in range(many))
    job.seal()
    assert len(job.claim("w", limit=many, lease=1000.0)) == many
    ledger.database.write(
        'UPDATE progress SET holder = replace(replace(replace(holder, \'"claim":"\', \'"claim":"\' || idx), '
        '\'"space":"\', \'"space":"far\'), \'"machine":"\', \'"machine":"far\')'
    )
    assert job.progress().running == many


# ---- clocks ---------------------------------------------------------------------------------------------------------


def set_clock(ledger: Ledger, seconds: float) -> None:
    """What the records look like after the wall clock was set forward (or back, if negative) by so much."""
    for table, columns in {
        "jobs": ("created_at", "updated_at", "finished_at", "lease_until"),
        "progress": ("updated_at", "next_attempt_at", "lease_until"),
        "runs": ("started_at", "ended_at"),
    }.items():
        changes = ", ".join(f"{column} = {column} - ?" for column in columns)
        ledger.database.write(f"UPDATE {table} SET {changes}", [seconds] * len(columns))


def test_a_clock_set_forward_takes_nothing_from_those_who_live(ledger: Ledger, job: Job):
    ledger.hold(job, {}, lease=1000)
    (item,) = job.claim("w", lease=1000)
    set_clock(ledger, 7200)
    assert job.info().held
    with pytest.raises(JobHeld):
        ledger.hold(job, {})
    assert [other.idx for other in job.claim("v", limit=20)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert job.claim("v") == []
    assert job.record([Done(item.idx, token=item.token)]).done == 1


def test_a_clock_set_forward_does_not_make_claims_quadratic(ledger: Ledger):
    job = ledger.create("many")
    job.register(NewItem(idx) for idx in range(401))
    mine = job.claim("w", limit=400, lease=1000.0)
    set_clock(ledger, 7200)
    seen: list[str] = []

    def work(tx: Tx) -> list[Item]:
        def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
            seen.append(sql)
            return tx._execute(sql, parameters)

        return claims.due_or_lapsed(Recorder(Tx(tx.engine, execute, tx._executemany), job.no), 1)

    assert ledger.database.run(work) == []
    assert len(seen) < 20
    job.give_back([mine[399].idx])
    assert [item.idx for item in job.claim("v", limit=3)] == [mine[399].idx, 400]  # none that is claimed took its place


def test_a_clock_set_back_does_not_delay_expired_claims(ledger: Ledger, job: Job):
    ledger.hold(job, {}, lease=1e-6)
    job.claim("w", limit=10, lease=1e-6)
    set_clock(ledger, -7200)
    assert not job.info().held
    assert ledger.hold(job, {}).run == 2
    assert len(job.claim("v", limit=10)) == 10


def put_elsewhere(ledger: Ledger) -> None:
    """Whoever holds or claims does it on another machine, where nobody can see whether it lives."""
    far = Owner("far", "boot 1", "boot 1", os.getpid(), "1", "theirs")
    for table in ("jobs", "progress"):
        rows = ledger.database.all(f"SELECT DISTINCT holder FROM {table} WHERE holder IS NOT NULL")
        for (holder,) in rows:
            written = write_owner(far, json.loads(holder)["seconds"])
            ledger.database.write(f"UPDATE {table} SET holder = ? WHERE holder = ?", (written, holder))


@pytest.mark.parametrize("verb", ["hold", "archive", "forget"])
def test_a_clock_set_back_delays_a_takeover_by_at_most_a_lease(ledger: Ledger, job: Job, verb: str):
    wanted: dict[str, Callable[[], object]] = {
        "hold": lambda: ledger.hold(job, {}),
        "archive": lambda: ledger.archive("ads"),
        "forget": lambda: ledger.forget("ads"),
    }
    ledger.hold(job, {}, lease=25.0)
    put_elsewhere(ledger)
    set_clock(ledger, -7200)
    with pytest.raises(JobHeld):  # it may live, and renew its hold
        wanted[verb]()
    set_clock(ledger, 20)
    with pytest.raises(JobHeld):
        wanted[verb]()
    set_clock(ledger, 6)
    assert wanted[verb]()


def test_a_clock_set_back_ends_requests_to_a_dead_machine_after_a_lease(ledger: Ledger, job: Job):
    ledger.hold(job, {}, lease=25.0)
    put_elsewhere(ledger)
    set_clock(ledger, -7200)
    assert job.stop().stopping == 1  # it may live, and hear it
    set_clock(ledger, 20)
    assert job.stop(now=True).stopping == 2
    set_clock(ledger, 6)
    with pytest.raises(Refused, match="not running"):
        job.stop()


def test_a_clock_set_back_takes_no_job_from_a_live_holder_elsewhere(ledger: Ledger, job: Job):
    hold = ledger.hold(job, {}, lease=25.0)
    put_elsewhere(ledger)
    far = replace(hold, owner=Owner("far", "boot 1", "boot 1", os.getpid(), "1", "theirs"))
    set_clock(ledger, -7200)
    for _ in range(3):
        with pytest.raises(JobHeld):
            ledger.hold(job, {})
        set_clock(ledger, 9)
        ledger.renew(far)
    assert job.record([Done(0)], hold=far).done == 1


def test_a_clock_set_back_delays_the_claims_of_a_dead_machine_by_a_lease_at_the_most(ledger: Ledger, job: Job):
    job.claim("w", limit=7, lease=30.0)
    put_elsewhere(ledger)
    set_clock(ledger, -7200)
    (longer,) = job.claim("v", lease=3600.0)  # a claim of its own length is not shortened by the others'
    assert len(job.claim("u", limit=9)) == 2
    assert job.claim("u") == []
    set_clock(ledger, 25)
    assert job.claim("u") == []
    set_clock(ledger, 6)
    assert {item.idx for item in job.claim("u", limit=9)} == set(range(7))
    assert job.record([Done(longer.idx, token=longer.token)]).done == 1


@pytest.mark.parametrize("what", [Done(0), Failed(0, BOOM)])
def test_a_claim_that_a_failover_lost_records_nothing_over_the_next_one(ledger: Ledger, job: Job, what: Done | Failed):
    (lost,) = job.claim("w", lease=1000)
    ledger.database.write("DELETE FROM progress")
    ledger.database.write("UPDATE jobs SET frontier = 0, version = version - 1")
    (again,) = job.claim("v", lease=1000)
    assert again.idx == lost.idx
    assert job.renew([lost]) == 0
    assert job.record([what._replace(token=lost.token)]).stale == [0]
    assert job.record([Done(0, token=again.token)]).done == 1


def test_a_hold_that_a_failover_lost_does_not_say_how_the_run_of_the_next_one_ended(ledger: Ledger, job: Job):
    lost = ledger.hold(job, {})
    ledger.database.write("DELETE FROM runs")
    ledger.database.write("UPDATE jobs SET token = token - 1, holder = NULL, lease_until = NULL")
    next_one = ledger.hold(job, {})
    assert (next_one.token, next_one.run) == (lost.token, lost.run)
    ledger.release(next_one, "stopped")
    ledger.release(lost, "failed")
    assert [run.outcome for run in job.runs()] == ["stopped"]


def test_a_clock_set_back_makes_no_item_wait_for_another_try(job: Job, ledger: Ledger):
    waiting = RetryPolicy(2, base=60.0, cap=60.0)
    job.record([Failed(0, BOOM), Failed(1, BOOM)], policy=waiting)
    assert job.due(10) == []
    set_clock(ledger, -7200)
    assert [(item.idx, left) for item, left in job.due(10)] == [(0, 0.0), (1, 0.0)]
    assert [item.idx for item in job.claim("w", limit=2)] == [0, 1]


def test_no_duration_is_negative_after_the_clock_was_set_back(job: Job, ledger: Ledger):
    hold = ledger.hold(job, {})
    set_clock(ledger, -7200)  # everything so far is in the future
    job.record([Done(idx) for idx in range(10)], hold=hold)
    ledger.release(hold, "finished")
    ledger.hold(job, {}, lease=1e-6)
    set_clock(ledger, -7200)
    ledger.hold(job, {})
    for run in job.runs():
        assert run.ended_at is None or run.ended_at - run.started_at >= timedelta(0)
    info = job.info()
    assert info.finished_at is not None
    assert info.finished_at >= info.created_at
    assert info.updated_at >= info.created_at


# ---- the job's own policy -------------------------------------------------------------------------------------------


@pytest.fixture
def slow_job(ledger: Ledger) -> Job:
    made = ledger.create("slow", policy=RetryPolicy(2, base=5000.0, cap=5000.0))
    made.register([NewItem(0), NewItem(1)])
    made.seal()
    return made


def left(job: Job, idx: int) -> float:
    return next(seconds for item, seconds in job.due(10, within=1e6) if item.idx == idx)


def test_lost_items_wait_by_the_policy_of_the_next_run(ledger: Ledger, slow_job: Job):
    lost = ledger.hold(slow_job, {}, policy=RetryPolicy(2, base=2000.0, cap=2000.0), lease=1e-6)
    slow_job.note_running(lost, [(0, f"{lost.mark} worker 1")])
    ledger.hold(slow_job, {}, lease=1e-6)
    assert 1000 < left(slow_job, 0) <= 2000, "the policy of the run that was lost, for one who names none"
    again = ledger.hold(slow_job, {}, lease=1e-6)
    slow_job.note_running(again, [(1, f"{again.mark} worker 1")])
    ledger.hold(slow_job, {}, policy=RetryPolicy(2, base=300.0, cap=300.0))
    assert 100 < left(slow_job, 1) <= 300


def test_a_failure_waits_by_the_jobs_policy_unless_its_reporter_names_one(slow_job: Job):
    slow_job.record([Failed(0, BOOM)])
    slow_job.record([Failed(1, BOOM)], policy=RetryPolicy(2, base=10.0, cap=10.0))
    assert 4000 < left(slow_job, 0) <= 5000
    assert left(slow_job, 1) <= 10


def test_renewing_claims_that_are_not_ours_renews_nothing(job: Job):
    (item,) = job.claim("w", lease=1000)
    assert job.renew([Item(item.idx, None, None, 0, token=99)], lease=5000) == 0
    assert job.renew([], lease=5000) == 0


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_a_job_that_another_process_is_taking_is_not_deleted(url: str, ledger: Ledger, job: Job):
    def forget() -> int:
        with Ledger.open(url) as another:
            return another.forget(job.id)

    waiting = (
        "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND datname = current_database()"
    )
    with psycopg.connect(url) as somebody, ThreadPoolExecutor(2) as pool:
        somebody.execute("LOCK TABLE headway.runs IN SHARE MODE")  # the taker has written its hold and cannot commit
        taken = pool.submit(ledger.hold, job, {})
        eventually(lambda: ledger.database.one(waiting) == (1,), timeout=60)
        forgotten = pool.submit(forget)
        eventually(lambda: ledger.database.one(waiting) == (2,), timeout=60)
        somebody.rollback()
        hold = taken.result(60)
        with pytest.raises(JobHeld):
            forgotten.result(60)
    ledger.renew(hold)
    assert job.info().total == 10


def test_a_renewal_prolongs_the_notes_of_items_that_run_and_no_others(ledger: Ledger, job: Job):
    """A database restored under its run has notes on items that ended since. Prolonged, they would never run again."""
    hold = ledger.hold(job, {})
    job.note_running(hold, [(0, f"{hold.mark} worker 1"), (1, f"{hold.mark} worker 2")])
    ledger.database.run(lambda tx: tx.execute("UPDATE progress SET lease_until = 5, next_attempt_at = 5"))
    ledger.renew(hold, [1])
    assert [item.idx for item, _ in job.due(10)] == [0]
    ledger.release(hold, "interrupted")

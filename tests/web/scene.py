"""An installation with something to see: jobs in every state, a resume, failures of several causes, tasks of several
people, workers, states, projects. Everything is recorded through the parts themselves; only the clock is moved: what
happened is put back in time, so that there is a past to look at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from random import Random

from headway._lease import Owner
from headway._sql import Database, Value, marks
from headway.core.failure import Failure
from headway.ledger import Done, Failed, Hold, Job, Ledger, NewItem, describe
from headway.queue.store import administration
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.task import Claim, Priority
from headway.queue.task_queue import TaskQueue
from headway.states import Manager, open_store
from headway.views.reading import Reader

INVOICES = "reindex-invoices-2025"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
KINDS = ("caption", "export", "resize")


class UpstreamTimeout(Exception):
    pass


class DocumentCorrupt(Exception):
    pass


def fetch(name: str) -> bytes:
    raise UpstreamTimeout(f"GET https://store.internal/docs/{name}.pdf timed out after 30.0 s")


def parse(name: str) -> bytes:
    raise DocumentCorrupt(f"{name}.pdf: xref table not found at offset {len(name) * 4011}")


def count_pages(name: str) -> int:
    pages: dict[str, int] = {}
    return pages["page_count"]


FUNCTIONS = {"fetch": fetch, "parse": parse, "count": count_pages}


def failure(name: str, how: str) -> Failure:
    try:
        FUNCTIONS[how](name)
    except (UpstreamTimeout, DocumentCorrupt, KeyError) as error:
        return describe(error)
    raise AssertionError("it fails")


def lively(url: str, *, items: int = 120_000) -> None:
    """Fill the database at ``url``. The running jobs are held by this process: they run for as long as it does."""
    with Ledger.open(url) as ledger:
        invoices(ledger, items)
        embed(ledger)
        thumbnails(ledger)
        export(ledger)
        tasks(ledger.database)
        projects(ledger.database)
        reason = "database backup, please leave the disk alone"
        ledger.note(
            "retry", "captions-spring", {"count": 12, "cause": 2, "reason": "the codec is there now"}, actor="ana"
        )
        ledger.note("worker.drain", "", {"worker": "worker-e", "reason": "new kernel"}, actor="ana")
        ledger.note("queue.pause", "", {"queue": "low", "reason": reason}, actor="tomas")
    states(url)


def odd(url: str, text: str) -> None:
    """An installation in which everything that anybody can name or write is called ``text``: keys, errors, functions, kinds,
    workers, reasons, actors, messages, tags."""
    with Ledger.open(url) as ledger:
        job = ledger.create("odd")
        ledger.describe(job, function=text, source=text, command=text, keyed_by="k", max_retries=0)
        job.register([NewItem(0, json.dumps({"k": text}), text[:500], 1), NewItem(1, json.dumps(text), "b", 2)])
        hold = ledger.hold(job, {"workers": text, "mode": text})
        detail = f'Traceback\n  File "{text}", line 3, in {text}\n    {text}\n'
        bad = Failure(text, text, f"{text} in {text}", detail)
        job.record([Failed(0, bad, worker=text), Done(1, seconds=1.0, worker=text, meta=json.dumps(text))], hold=hold)
        ledger.note(text, "", {text: text}, actor=text)
        database = ledger.database
        tasks(database)
        database.run(lambda tx: administration.pause(tx, Priority.LOW, reason=text, by=text, until=None))
        change(database, "UPDATE task_workers SET name = name || ?, host = ?, queues = ?", text, text, text)
        change(database, "UPDATE tasks SET message = ?, kind = ?, worker = ?", text, text, text)
        change(database, "UPDATE task_causes SET message = ?, type = ?", text, text)
        change(database, "UPDATE task_attempts SET error = ?", text)


def odd_paths(reader: Reader) -> tuple[str, ...]:
    """The pages that show something of it."""
    failed = reader.tasks(status="FAILED").tasks[0].id
    return (
        "/", "/jobs", "/jobs/odd", "/jobs/odd/items", "/jobs/odd/items?state=dead", "/jobs/odd/items/0", "/jobs/odd/items/1",
        "/dead", "/queues", "/queues/low", "/workers", "/tasks", f"/tasks/{failed}", "/me", "/performance", "/activity",
        "/about",
    )  # fmt: skip


def go_on(url: str, minutes: int = 20) -> None:
    """As if what ran went on at the pace of its last minute, from then on: for who looks at it for longer than that."""
    with Ledger.open(url) as ledger:
        database = ledger.database
        now = int(database.now() // 60)
        for table, key, rest in (
            ("minutes", "job", "done, failed, seconds"),
            ("task_minutes", "queue, kind, share", "submitted, completed, failed, failures, run_seconds"),
        ):
            same = " AND ".join(f"l.{name} = m.{name}" for name in key.split(", "))
            last = database.all(
                f"SELECT m.minute, {key}, {rest} FROM {table} m "
                f"WHERE m.minute = (SELECT max(l.minute) FROM {table} l WHERE {same}) AND m.minute >= ?",
                (now - 5,),
            )
            for minute, *values in last:
                for ahead in range(minute + 1, now + minutes):
                    names = f"minute, {key}, {rest}"
                    change(database, f"INSERT INTO {table} ({names}) VALUES ({marks(len(values) + 1)})", ahead, *values)


def change(database: Database, sql: str, *values: Value) -> None:
    database.run(lambda tx: tx.execute(sql, values))


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def register(ledger: Ledger, id: str, function: str, count: int, prefix: str, *, retries: int = 2) -> Job:
    job = ledger.create(id)
    command = f"headway run {function} --items items.jsonl --job {id}"
    ledger.describe(job, function=function, source="items.jsonl", command=command, keyed_by="id", max_retries=retries)
    for start in range(0, count, 20_000):
        names = {idx: f"{prefix}{idx:06d}" for idx in range(start, min(count, start + 20_000))}
        job.register(
            [
                NewItem(idx, json.dumps({"id": name, "pages": idx % 40, "api_token": "hunter2"}), name, idx)
                for idx, name in names.items()
            ]
        )
    job.seal("digest")
    return job


def succeed(job: Job, hold: Hold, indices: Sequence[int], random: Random, workers: int) -> None:
    names = [f"worker-{no}" for no in range(1, workers + 1)]
    for start in range(0, len(indices), 5000):
        page = indices[start : start + 5000]
        done = [Done(idx, seconds=random.lognormvariate(-2.0, 0.7), worker=random.choice(names)) for idx in page]
        job.record(done, hold=hold)


def fail(job: Job, hold: Hold, how: dict[int, str], *, times: int = 1, worker: str = "worker-1") -> None:
    for _ in range(times):
        failed = [
            Failed(idx, failure(f"inv-2025-{idx:06d}", why), seconds=30.0, worker=worker) for idx, why in how.items()
        ]
        job.record(failed, hold=hold)


def invoices(ledger: Ledger, count: int) -> None:
    """Killed once, resumed, running: most failures of one cause lie together, those of another are spread."""
    random = Random(7)
    job = register(ledger, INVOICES, "docjobs:extract_text", count, "inv-2025-")
    first, stands = int(count * 0.3433), int(count * 0.621)
    dead = {int(count * (0.486 + 0.02 * random.random())): "fetch" for _ in range(41)}
    dead |= {random.randrange(int(count * 0.6)): "parse" for _ in range(20)}
    dead |= {int(count * 0.23) + random.randrange(count // 100 + 3): "count" for _ in range(3)}
    span = range(int(count * 0.59), stands)
    retrying = {idx: "fetch" for idx in random.sample(span, len(span) // 16) if idx not in dead}
    hold = ledger.hold(job, {"workers": 1, "mode": "process"})
    succeed(job, hold, [idx for idx in range(first) if idx not in dead], random, 1)
    fail(job, hold, {idx: why for idx, why in dead.items() if idx < first}, times=3)
    change(ledger.database, "UPDATE jobs SET holder = NULL, lease_until = NULL WHERE no = ?", job.no)
    hold = ledger.hold(job, {"workers": 6, "mode": "process"}, lease=3600)
    succeed(job, hold, [idx for idx in range(first, stands) if idx not in dead and idx not in retrying], random, 6)
    fail(job, hold, {idx: why for idx, why in dead.items() if idx >= first}, times=3, worker="worker-2")
    fail(job, hold, retrying, worker="worker-3")
    job.note_running(hold, [(stands + place, f"run worker-{place + 1}") for place in range(6)])
    spread(ledger.database, job, [(-112, 89, first), (-14, 14, stands - first)], random)


def embed(ledger: Ledger) -> None:
    random, job = Random(3), register(ledger, "embed-pages", "docjobs:embed_page", 5000, "page-")
    hold = ledger.hold(job, {"workers": 2, "mode": "async"}, lease=3600)
    succeed(job, hold, range(1443), random, 2)
    spread(ledger.database, job, [(-6, 6, 1443)], random)


def thumbnails(ledger: Ledger) -> None:
    random, job = Random(5), register(ledger, "thumbnails-october", "images:thumbnail", 2000, "img-")
    hold = ledger.hold(job, {"workers": 4, "mode": "thread"})
    succeed(job, hold, range(2000), random, 4)
    ledger.release(hold, "finished")
    spread(ledger.database, job, [(-180, 12, 2000)], random, ended=True)


def export(ledger: Ledger) -> None:
    random, job = Random(9), register(ledger, "nightly-export", "reports:export", 800, "row-")
    hold = ledger.hold(job, {"workers": 2, "mode": "process"})
    succeed(job, hold, range(310), random, 2)
    ledger.release(hold, "interrupted")
    spread(ledger.database, job, [(-300, 20, 310)], random, ended=True)


def spread(
    database: Database, job: Job, runs: Sequence[tuple[int, int, int]], random: Random, *, ended: bool = False
) -> None:
    """Put what was recorded just now into the minutes it could have taken: (minutes from now, how long, items)."""
    now = database.now()
    minutes: list[tuple[int, int, int]] = []
    kept = 0
    for no, (start, length, count) in enumerate(runs, 1):
        began, each = now + start * 60, length * 60 / max(1, count)
        weights = [random.uniform(0.85, 1.15) for _ in range(length)]
        for place, weight in enumerate(weights):
            failed = round(random.random() * (60 if no == 2 and 4 < place < 10 else 2))
            minutes.append((int(began // 60) + place, round(count * weight / sum(weights)), failed))
        change(
            database,
            "UPDATE runs SET started_at = ?, ended_at = CASE WHEN outcome IS NULL THEN NULL ELSE ? END, host = ? "
            "WHERE job = ? AND no = ?",
            began, began + length * 60, f"db-{'abc'[no % 3]}", job.no, no,
        )  # fmt: skip
        change(
            database,
            "UPDATE progress SET updated_at = ? + ? * (idx - ?) WHERE job = ? AND idx >= ? AND idx < ?",
            began, each, kept, job.no, kept, kept + count,
        )  # fmt: skip
        kept += count
    change(database, "DELETE FROM minutes WHERE job = ?", job.no)
    for minute, done, failed in minutes:
        change(
            database, "INSERT INTO minutes (job, minute, done, failed, seconds) VALUES (?, ?, ?, ?, ?)",
            job.no, minute, done, failed, done * 0.14,
        )  # fmt: skip
    first, last = now + runs[0][0] * 60, now + (runs[-1][0] + runs[-1][1]) * 60
    change(
        database, "UPDATE jobs SET created_at = ?, minute_done = 0, minute_failed = 0, updated_at = ? WHERE no = ?",
        first - 5, last if ended else now, job.no,
    )  # fmt: skip
    change(database, "UPDATE jobs SET finished_at = ? WHERE no = ? AND finished_at IS NOT NULL", last, job.no)
    change(database, "UPDATE causes SET first_seen = ?, last_seen = ? - 60 * no WHERE job = ?", now - 780, now, job.no)
    change(database, "UPDATE causes SET first_seen = ? WHERE job = ? AND no = 1", first + 420, job.no)
    for (cause,) in database.all("SELECT no FROM causes WHERE job = ?", (job.no,)):
        change(  # the first cause all the time, the others in a burst
            database,
            "UPDATE dead_letters SET created_at = ? + ? * ((idx * 7919) % 97) / 97.0 WHERE job = ? AND cause = ?",
            *((first + 600, now - first - 900) if cause == 1 else (now - 740 - 900 * (cause == 2), 420)), job.no, cause,
        )  # fmt: skip
    change(database, "UPDATE attempts SET at = ? - 900 + 90 * no + idx % 540 WHERE job = ?", now, job.no)


# ---------------------------------------------------------------------------------------------------------------------
# The queue


def work(task: object, payload: object) -> object:
    return payload


def tasks(database: Database) -> None:
    """Three people, three kinds, all queues; one queue is paused, one worker was lost."""
    random, now = Random(11), database.now()
    queue = TaskQueue(database, per_user=None)
    for kind in KINDS:
        queue.handler(kind, retries=1, retry_delay=0.001)(work)
    queue.submit_many(
        {
            "kind": random.choice(KINDS), "payload": {"n": n}, "user_id": random.choice(["ana", "tomas", "ida"]),
            "priority": random.choice(["high", "normal", "normal", "low"]), "role": "admin",
        }
        for n in range(240)
    )  # fmt: skip
    for month in (1, 2, 3):
        queue.submit("export", {"month": month}, user_id="teo", role="admin", priority="urgent")
    who = claims.Claimant("worker-a", Owner.current(), KINDS, lease=3600)

    def claim(*queues: Priority) -> Claim:
        [found] = database.run(lambda tx: claims.claim(tx, who, queues=queues))
        return found

    for step in range(150):
        one = claim(Priority.HIGH, Priority.NORMAL)
        if step % 12 == 5:
            why = failure(f"img-{step}", "fetch" if step % 24 == 5 else "parse")
            database.run(partial(outcomes.fail, claim=one, failure=why, retryable=False))
        else:
            database.run(partial(outcomes.complete, claim=one, result="1", seconds=1.0))
    for _ in range(2):
        one = claim(Priority.URGENT)
        database.run(partial(outcomes.complete, claim=one, result="1", seconds=48.0))
    running = claim(Priority.URGENT)
    queue.submit("export", {"month": 4}, user_id="teo", role="admin", priority="urgent")
    reason = "database backup, please leave the disk alone"
    database.run(lambda tx: administration.pause(tx, Priority.LOW, reason=reason, by="tomas", until=None))
    change(
        database,
        "UPDATE tasks SET created_at = created_at - 2 * (244 - no), run_at = run_at - 2 * (244 - no) WHERE status = 'QUEUED'",
    )
    change(
        database,
        "UPDATE tasks SET ended_at = ended_at - 4 * (243 - no), started_at = ended_at - 4 * (243 - no) - 1 - no % 9, "
        "run_at = ended_at - 4 * (243 - no) - 30 - no % 25, created_at = ended_at - 4 * (243 - no) - 40 - no % 60 "
        "WHERE ended_at IS NOT NULL",
    )
    change(
        database, "UPDATE tasks SET percent = 53, message = 'Writing page 31 of 58', started_at = ? WHERE no = ?",
        now - 130, running.no,
    )  # fmt: skip
    _minutes(database, now, random)
    _workers(database, now, running.id)


def _minutes(database: Database, now: float, random: Random) -> None:
    change(database, "DELETE FROM task_minutes")
    for back in range(1, 60):
        for name, rate in {"urgent": 1.0, "high": 4.0, "normal": 9.0, "low": 2.0}.items():
            for kind in ("caption", "resize"):
                out = 0 if name == "low" and back < 40 else round(rate * random.uniform(0.6, 1.4))
                change(
                    database,
                    "INSERT INTO task_minutes (minute, queue, kind, share, submitted, completed, failed, failures) "
                    "VALUES (?, ?, ?, 1, ?, ?, ?, ?)",
                    int(now // 60) - back, name, kind, round(rate * random.uniform(0.3, 1.2)), out,
                    int(random.random() < 0.02 * rate), round(random.random() * 0.1 * rate),
                )  # fmt: skip


def _workers(database: Database, now: float, task: str) -> None:
    found = [
        ("worker-a", "busy", 0.4), ("worker-b", "idle", 1.1), ("worker-c", "idle", 2.6), ("worker-d", "lost", 840.0),
        ("worker-e", "ended", 5400.0),
    ]  # fmt: skip
    for place, (name, state, seen) in enumerate(found):
        change(
            database,
            "INSERT INTO task_workers (name, owner, host, pid, queues, version, state, task, completed, failed, rss, "
            "started_at, seen_at, ended_at) VALUES (?, '{}', ?, ?, 'urgent,high,normal,low', '0.1.0', ?, ?, ?, ?, ?, ?, ?, ?)",
            name, f"db-{'aabbc'[place]}", 4100 + place, state, task if state == "busy" else None, 40 * place + 31,
            place * 2, (210 + 90 * place) * 10**6, now - 7200,
            # The living say so for as long as anybody looks at the scene.
            now + 3600 if state in ("busy", "idle") else now - seen,
            None if state in ("busy", "idle") else now - seen,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Projects and states


def projects(database: Database) -> None:
    now = database.now()
    for id, status, total, done, errors, journaled in (
        ("crawl-shop-eu", "PROCESSING", 48_210, 31_877, 41, 0),
        ("crawl-docs", "CRAWLING", 0, 912, 0, 0),
        ("captions-batch-7", "DONE", 5_000, 5_000, 2, 1),
    ):
        change(
            database,
            "INSERT INTO projects (id, epoch, status, total, done, errors, journaled, created_at, checkpoint_at, "
            "completed_at) VALUES (?, 'e', ?, ?, ?, ?, ?, ?, ?, ?)",
            id, status, total, done, errors, journaled, now - 5000, now - 12, now - 900 if status == "DONE" else None,
        )  # fmt: skip


def states(url: str) -> None:
    """Eight tasks, five tags; 9 stands for finished."""
    levels = (
        (9, 9, 9, 88, 12), (9, 9, 9, 91, 15), (9, 9, 74, 60, 0), (9, 9, -1, 0, 0), (9, 9, 9, 85, 8), (9, 9, 9, 79, 1),
        (9, 96, 71, 44, 0), (9, 9, 9, 90, 14),
    )  # fmt: skip
    for task, own in enumerate(levels):
        store, num_tasks = open_store(url, "nightly", 8)
        with Manager("nightly", task, num_tasks, store) as manager:
            for tag, level in zip(("ingest", "parse", "enrich", "embed", "export"), own, strict=True):
                if level == 9:
                    manager.set_finished(tag)
                elif level == -1:
                    manager.set_state(tag, status=31)
                    manager.set_error(ConnectionRefusedError("geo.internal:8443"), tag)
                elif level:
                    manager.set_state(tag, status=level)

"""How fast the queue is, beside RQ, procrastinate, PgQueuer, Celery, Dramatiq, Huey and DBOS in one run.

    python bench/taskqueue.py [--quick] [--million] [--rounds N] [--only WORD ...] [--against WORD ...]

Two worker processes each, no-op tasks, one Redis and one PostgreSQL with fsync, each queue with databases of its own.
Contestants take turns within every round; ratios are medians over the rounds. Tasks are put in while the warm workers
are stopped, so that neither their start nor the putting in counts. On a loaded machine compare CPU as well: what the
workers used and what PostgreSQL used for a task. ``--million`` looks at the sweeper with 10^6 finished tasks; ``--only``
measures the parts whose name contains a WORD, ``--against`` drains beside those whose name contains one.

(The file is not named after its package: a `queue.py` here would stand before Python's own module in every benchmark.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from measure import Report, median, percentile, say, scratch
from peers import Peer, install
from redis import Redis

from headway._lease import Owner
from headway._sql import connect
from headway.queue import TaskQueue
from headway.queue.recovery import Sweeper
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES
from tests.services import postgres as postgres_service
from tests.services import redis as redis_service
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

#: No single measurement takes longer than this.
LIMIT = 300.0
#: Tasks of one round, by what a queue does in about two seconds here.
TASKS = {
    "rq_fork": 200, "headway_fork": 200, "dbos": 400, "procrastinate": 500, "celery": 1_000, "rq_simple": 1_500,
    "headway": 1_500, "dramatiq": 4_000, "huey": 4_000, "headway_database:10": 4_000, "pgqueuer:10": 4_000,
    "headway_database:100": 8_000, "pgqueuer:100": 8_000,
}  # fmt: skip
DRAINS = (
    ("headway", "rq_simple", 1.0),
    ("headway_fork", "rq_fork", 1.0),
    ("headway_database:10", "procrastinate", 3.0),
    ("headway_database:10", "pgqueuer:10", 1.0),
    ("headway_database:100", "pgqueuer:100", 1.0),
    ("headway_database:10", "dbos", 1.0),
    ("headway", "celery", None),
    ("headway", "dramatiq", None),
    ("headway", "huey", None),
)


class Servers:
    def __init__(self, place: Path) -> None:
        place.chmod(0o755)  # PostgreSQL runs as somebody else and must find its own below
        self.place = place
        self.redis = RedisServer(place / "redis", redis_service.installations()[0])
        self.postgres = PostgresServer(
            place / "postgres", postgres_service.installations()[0], fsync="on", full_page_writes="on"
        )
        self._numbers = itertools.count()

    def fresh(self, name: str) -> Peer:
        """A queue on databases that nobody used before."""
        number = next(self._numbers) % 16
        url = self.redis.url(number)
        Redis.from_url(url).flushdb()
        return Peer(name, url, self.place, self.database())

    @cached_property
    def postgres_pid(self) -> int:
        with connect(self.database()) as database:
            row = database.one("SELECT split_part(pg_read_file('postmaster.pid'), chr(10), 1)")
            assert row is not None
            return int(row[0])

    def database(self) -> str:
        return self.postgres.url(self.postgres.create_database())


@contextmanager
def servers() -> Iterator[Servers]:
    with scratch() as place:
        made = Servers(place)
        made.redis.start()
        try:
            made.postgres.start()
            yield made
        finally:
            made.postgres.discard()
            made.redis.discard()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round with few tasks, rough figures")
    parser.add_argument("--million", action="store_true", help="the sweeper with a million finished tasks besides")
    parser.add_argument("--rounds", type=int, help="default 3; 1 with --quick")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only parts with this in their name"
    )
    parser.add_argument("--against", action="append", default=[], metavar="WORD", help="drain only beside these")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    report = Report("taskqueue", quick=options.quick)
    trouble = install()
    if trouble:
        report.leave_out(f"the other task queues: {trouble}")
    sizes = [1_000, 10_000] if options.quick else [1_000, 10_000, 100_000, *([1_000_000] if options.million else [])]
    with servers() as own:
        parts: dict[str, Callable[[], None]] = {
            "submit": lambda: submit(report, own, 100 if options.quick else 300, rounds, peers=not trouble),
            "pick-up": lambda: pick_up(report, own, 20 if options.quick else 60, rounds),
            "drain": lambda: drain(report, own, 0.3 if options.quick else 1.0, rounds, options.against),
            "flat": lambda: flat(report, own, 1_000 if options.quick else 5_000),
            "sweeper": lambda: sweeping(report, own, sizes),
        }
        for name, measure in parts.items():
            if trouble and name in ("pick-up", "drain"):
                continue
            if not options.only or any(word in name for word in options.only):
                say(name)
                measure()
    report.print()


# ---- putting tasks in ------------------------------------------------------------------------------------------------


def submit(report: Report, own: Servers, count: int, rounds: int, *, peers: bool) -> None:
    names = ["headway", *(["procrastinate", "pgqueuer", "rq_simple"] if peers else [])]
    means: dict[str, list[float]] = defaultdict(list)
    together: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        # Anew for each round, so that the window of hints in RQ is never full.
        made = {name: own.fresh(name) for name in names}
        for name, peer in made.items():
            peer.prepare()
            means[name].append(1000 * sum(peer.enqueue(count)) / count)
            together[name].append(1000 * peer.bulk(1_000) / 1_000)
    for name in names:
        report.add(
            f"{name}: one submission, mean", median(means[name]), "ms", most=10 if name == "headway" else None,
            spread=[round(min(means[name]), 3), round(max(means[name]), 3)],
        )  # fmt: skip
        report.add(f"{name}: one of 1,000 submitted together", median(together[name]), "ms")
    if peers:
        report.add("submit / procrastinate's defer", ratio(means["headway"], means["procrastinate"]), "x", most=1.2)
    report.add(
        "submit_many of 1,000: times faster per task", ratio(means["headway"], together["headway"]), "x", least=20
    )


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of what was measured next to each other: the median over the rounds."""
    return median([one / other for one, other in zip(ours, theirs, strict=True)])


# ---- how soon a task runs --------------------------------------------------------------------------------------------


def pick_up(report: Report, own: Servers, count: int, rounds: int) -> None:
    for ours, theirs in (("headway", "rq_simple"), ("headway_fork", "rq_fork"), ("headway_database", "procrastinate")):
        found: dict[str, list[float]] = defaultdict(list)
        peers = [own.fresh(ours), own.fresh(theirs)]
        for peer in peers:
            peer.prepare()
        with peers[0].working(), peers[1].working():
            for _ in range(max(2, rounds)):
                for peer in peers:
                    taken = [1000 * seconds for seconds in peer.pick_up(count // 2)]
                    found[peer.name].append(percentile(taken, 0.5))
        for name, values in found.items():
            report.add(f"{name}: from submission to running, p50", median(values), "ms")
        report.add(f"pick-up p50: {ours} / {theirs}", ratio(found[ours], found[theirs]), "x", most=1.5)


# ---- how many a second -----------------------------------------------------------------------------------------------


def drain(report: Report, own: Servers, share: float, rounds: int, against: list[str]) -> None:
    rates: dict[str, list[float]] = defaultdict(list)
    used: dict[str, list[list[float]]] = defaultdict(list)
    compared = [each for each in DRAINS if not against or any(word in each[1] for word in against)]
    names = {name for each in compared for name in each[:2]}
    for _ in range(rounds):
        for name, most in TASKS.items():
            if name not in names:
                continue
            # Those that are compared stand next to each other in the list, and so in time.
            count = max(100, int(most * share))
            _, rate, cpu = own.fresh(name).measure(count, LIMIT, own.postgres_pid)
            rates[name].append(rate)
            used[name].append(cpu)
            say(f"  {name}: {rate:,.0f}/s, CPU of the workers {cpu[0]:,.0f} and of PostgreSQL {cpu[1]:,.0f} us a task")
    for name, values in rates.items():
        report.add(
            f"{name}: tasks done", median(values), "tasks/s", spread=[round(min(values)), round(max(values))],
            worker_cpu_us=round(median([workers for workers, _ in used[name]])),
            postgres_cpu_us=round(median([postgres for _, postgres in used[name]])),
        )  # fmt: skip
    for ours, theirs, least in compared:
        report.add(f"drain: {ours} / {theirs}", ratio(rates[ours], rates[theirs]), "x", least=least)


# ---- what is left behind ---------------------------------------------------------------------------------------------


def flat(report: Report, own: Servers, count: int) -> None:
    """Keys of Redis, memory and descriptors of the workers, after some tasks and after many more."""
    peer = own.fresh("headway")
    peer.prepare()
    client = Redis.from_url(peer.redis_url)
    with peer.working() as pids:
        seen = []
        done = peer.ran
        for more in (count // 5, count):
            peer.many(more)
            done += more
            peer.wait(done, LIMIT)
            time.sleep(2)  # what is recorded after the last task
            seen.append((client.dbsize(), sum(map(resident, pids)), sum(map(descriptors, pids))))
    (keys, memory, opened), (keys_after, memory_after, opened_after) = seen
    report.add(f"{count:,} tasks: keys of Redis more than before", keys_after - keys, "keys", most=0, before=keys)
    report.add(
        f"{count:,} tasks: memory of two workers more than before", (memory_after - memory) / 2**20, "MB", most=4
    )
    report.add(f"{count:,} tasks: descriptors more than before", opened_after - opened, "descriptors", most=0)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


# ---- what finished tasks cost ----------------------------------------------------------------------------------------

_FINISHED = (
    "INSERT INTO tasks (id, kind, queue, place, turn, party, status, ready, user_id, role, payload, fingerprint, retries, "
    "retry_delay, run_at, created_at, updated_at, started_at, ended_at, token, version, worker) "
    "SELECT 'old' || n, 'tick', 'normal', 2, n, 'u' || (n % 10), 'COMPLETED', 1, 'u' || (n % 10), 'user', '1', 'f', 3, 2, "
    "t, t, t, t, t, 1, 3, 'w' FROM ({numbers}) AS made (n), (SELECT {now} AS t) AS clock"
)
_NUMBERS = {
    "sqlite": "WITH RECURSIVE c (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM c WHERE n < {last}) SELECT n FROM c",
    "postgresql": "SELECT generate_series({first}, {last})",
}


def sweeping(report: Report, own: Servers, sizes: list[int]) -> None:
    for engine, url in (("postgresql", own.database()), ("sqlite", f"sqlite:///{own.place}/sweeper.db")):
        took: dict[str, list[float]] = defaultdict(list)
        with connect(url) as database, TaskQueue(database, per_user=None) as queue:
            queue.handler("tick", isolation="none")(lambda _task, _payload: None)
            sweeper, filled = Sweeper(queue), 0
            queue.submit_many({"kind": "tick", "payload": n} for n in range(100))
            for size in sizes:
                add_finished(queue, filled + 1, size)
                filled = size

                looks: dict[str, Callable[[], object]] = {
                    "a round of the sweeper": sweeper.tick,
                    "10 claimed and given back": partial(claim_and_give_back, queue),
                    "stats": queue.stats,
                    "the newest 50": queue.list,
                    "the newest 50 that failed": lambda: queue.list(status="FAILED"),
                    "a user's newest 50": lambda: queue.list(user_id="u7"),
                }
                for name, look in looks.items():
                    look()
                    took[name].append(min(timed(look) for _ in range(25)))  # noise only adds
        for name, values in took.items():
            report.add(
                f"{engine}: {name}, {sizes[-1]:,} finished tasks / {sizes[0]:,}", values[-1] / values[0], "x", most=2,
                milliseconds=[round(value, 2) for value in values],
            )  # fmt: skip


def claim_and_give_back(queue: TaskQueue) -> None:
    who = Claimant("bench", Owner.current(), ["tick"])
    taken = queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES, limit=10))
    queue.database.run(lambda tx: [outcomes.release(tx, one) for one in taken])


def add_finished(queue: TaskQueue, first: int, last: int) -> None:
    """Finished tasks, put straight into the table, in steps that no time limit minds."""
    engine = queue.database.engine
    now = "julianday('now') * 86400 - 210866760000" if engine == "sqlite" else "extract(epoch FROM clock_timestamp())"
    for start in range(first, last + 1, 20_000):
        numbers = _NUMBERS[engine].format(first=start, last=min(last, start + 19_999))
        statement = _FINISHED.format(numbers=numbers, now=now)
        if engine == "sqlite":
            statement = statement.replace(" AS made (n)", "").replace(" AS clock", "")
        queue.database.run(lambda tx, statement=statement: tx.execute(statement))
    if engine == "postgresql":
        # As autovacuum does within a minute; until then an open session keeps the plans it made for a small table.
        queue.database.run(lambda tx: tx.execute("ANALYZE tasks"))


def timed(look: Callable[[], object]) -> float:
    began = time.perf_counter()
    look()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())

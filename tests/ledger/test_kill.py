"""kill -9 at random moments: nothing acknowledged is lost, nothing is recorded twice.

Children claim items and record them; each writes down what the ledger acknowledged. They are killed again and again.
In the end the ledger must agree with every acknowledgement, with itself, and have finished the job exactly once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from headway.core.retry import RetryPolicy
from headway.ledger import Done, Failed, Failure, Job, Ledger, NewItem

BOOM = Failure("ValueError", "boom")
AT_ONCE = RetryPolicy(0, base=0.0)
CHILDREN = 3


def work(url: str, acknowledged: Path) -> None:
    """In the child: work until killed, or until nothing is left."""
    log = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Ledger.open(url) as ledger:
        job = ledger.job("kill")
        while items := job.claim(f"pid {os.getpid()}", limit=3, lease=0.1):
            for item in items:
                fails = item.idx % 5 == 0 and item.attempts == 0
                outcome = Failed(item.idx, BOOM, token=item.token) if fails else Done(item.idx, token=item.token)
                recorded = job.record([outcome], policy=AT_ONCE)
                if recorded.done:
                    os.write(log, b"done %d\n" % item.idx)
                if recorded.completed:
                    os.write(log, b"completed\n")


def spawn(url: str, acknowledged: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            work(url, acknowledged)
        finally:
            os._exit(0)
    return child


def campaign(url: str, acknowledged: Path, *, kills: int, items: int, longest: float, seed: int) -> None:
    draw = random.Random(seed)
    with Ledger.open(url) as ledger:
        job = ledger.create("kill", max_retries=1_000_000)
        job.register(NewItem(idx) for idx in range(items))
        job.seal()
    killed = 0
    while killed < kills:
        children = [spawn(url, acknowledged) for _ in range(CHILDREN)]
        for child in children:
            time.sleep(draw.uniform(0.004, longest))  # the moment of the kill is the test
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed += 1
    survivor = spawn(url, acknowledged)
    deadline = time.monotonic() + 60
    with Ledger.open(url) as ledger:
        job = ledger.job("kill")
        while job.info().finished_at is None and time.monotonic() < deadline:
            pid, _ = os.waitpid(survivor, os.WNOHANG)
            if pid:  # it found nothing to claim while an earlier lease still held
                survivor = spawn(url, acknowledged)
            time.sleep(0.05)
        os.waitpid(survivor, 0)
        check(ledger, job, acknowledged, items, f"seed {seed}")


def check(ledger: Ledger, job: Job, acknowledged: Path, items: int, context: str) -> None:
    acks = Counter(acknowledged.read_text().split("\n")[:-1])
    twice = [line for line, count in acks.items() if count > 1]
    assert twice == [], f"{context}: acknowledged as new twice"
    done = {int(line.removeprefix("done ")) for line in acks if line.startswith("done")}
    lost = [idx for idx in done if not job.is_done(idx)]
    assert lost == [], f"{context}: acknowledged and lost"
    info = job.info()
    rows = ledger.database.one("SELECT count(*) FROM progress WHERE job = ? AND status = 'done'", (job.no,))
    assert (info.total, info.done, info.failed, info.dead) == (items, items, 0, 0), context
    assert rows == (items,), f"{context}: the counters disagree with the rows"
    assert ledger.database.one("SELECT count(*) FROM outbox") == (1,), f"{context}: completions"
    history = ledger.database.one("SELECT count(*) FROM attempts WHERE job = ?", (job.no,))
    assert history == (info.failures,), f"{context}: the history disagrees with the counters"
    ledger.database.verify()


@pytest.mark.req("S3-02", "S3-21", "S3-22", "S3-23")
def test_kills_at_random_moments_lose_nothing_and_double_nothing_on_sqlite(tmp_path: Path):
    campaign(f"sqlite:///{tmp_path / 'kill.db'}", tmp_path / "acks", kills=32, items=1_000, longest=0.034, seed=1)


@pytest.mark.req("S3-02", "S3-21", "S3-22", "S3-23")
def test_kills_at_random_moments_lose_nothing_and_double_nothing_on_postgresql(tmp_path: Path, postgres_url: str):
    campaign(postgres_url, tmp_path / "acks", kills=32, items=320, longest=0.08, seed=2)


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.req("S3-21")
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_thousand_kills(engine: str, tmp_path: Path, request: pytest.FixtureRequest):
    seed = random.SystemRandom().randrange(10**6)
    url = f"sqlite:///{tmp_path / 'kill.db'}" if engine == "sqlite" else request.getfixturevalue("postgres_url")
    longest = 0.034 if engine == "sqlite" else 0.08
    campaign(url, tmp_path / "acks", kills=1_000, items=20_000, longest=longest, seed=seed)

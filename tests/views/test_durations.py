"""How long items took: right to a percent however many there are, and the slowest by name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from headway._sql import Database, connect
from headway.core.failure import Failure
from headway.ledger import Done, Failed, Job, Ledger, NewItem
from headway.ledger.store.queries.statistics import EXACT_ITEMS as EXACT
from headway.ledger.store.queries.statistics import SAMPLED_ITEMS as SAMPLE
from headway.views.jobs.durations import SLOWEST, read_durations

BAD = Failure("ValueError", "bad", "x.py:f")


@pytest.fixture(params=["file", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    on_file = request.param == "file"
    url = f"sqlite:///{tmp_path}/durations.db" if on_file else str(request.getfixturevalue("postgres_url"))
    with connect(url) as opened:
        yield opened


def filled(
    database: Database, seconds: Sequence[float | None], *, first: int = 0, step: int = 1, keyed: bool = True
) -> Job:
    job = Ledger(database).create("timed", max_retries=0)
    places = [first + step * place for place in range(len(seconds))]
    for start in range(0, len(seconds), 5000):
        page = places[start : start + 5000]
        job.register([NewItem(idx, json.dumps(idx), f"k-{idx}" if keyed else None, idx) for idx in page])
        job.record([Done(idx, seconds=took) for idx, took in zip(page, seconds[start : start + 5000], strict=True)])
    return job


def test_of_a_small_job_every_item_counts_and_the_slowest_have_their_names(database: Database):
    job = filled(database, [0.01 * place for place in range(1, 101)])
    found = read_durations(job, 100)
    assert found is not None
    assert (found.p50, found.p95, found.looked_at) == (0.51, 0.96, 100)
    assert [(one.idx, one.key) for one in found.slowest] == [(idx, f"k-{idx}") for idx in (99, 98, 97, 96, 95)]
    assert [one.seconds for one in found.slowest] == pytest.approx([1.0, 0.99, 0.98, 0.97, 0.96])


def test_before_anything_has_a_time_there_is_nothing_to_say(database: Database):
    assert read_durations(filled(database, [None, None]), 2) is None
    assert read_durations(Ledger(database).create("empty"), 0) is None


def test_one_item_is_its_own_half_and_its_own_slowest(database: Database):
    found = read_durations(filled(database, [0.004], keyed=False), 1)
    assert found is not None
    assert (found.p50, found.p95) == (0.004, 0.004)
    assert [(one.idx, one.key, one.seconds) for one in found.slowest] == [(0, None, 0.004)]


def test_failed_items_have_no_duration(database: Database):
    job = filled(database, [0.2, 0.3])
    job.register([NewItem(7, "7", None, 7)])
    job.record([Failed(7, BAD, seconds=99.0)])
    found = read_durations(job, 3)
    assert found is not None
    assert [one.idx for one in found.slowest] == [1, 0]
    assert found.looked_at == 2


def test_of_a_large_job_the_shares_are_right_to_a_percent_and_the_slowest_exact(database: Database):
    draw = Random(5)
    # Every tenth item is slow: a sample in round steps would find all of them or none.
    seconds = [draw.uniform(1, 2) if place % 10 == 0 else draw.uniform(0.01, 0.09) for place in range(EXACT + 1000)]
    seconds[4_001] = 60.0  # one that no sample finds by chance
    found = read_durations(filled(database, seconds), len(seconds))
    assert found is not None
    assert 0.9 * SAMPLE <= found.looked_at <= SAMPLE
    ordered = sorted(seconds)
    assert ordered[int(0.47 * len(ordered))] <= found.p50 <= ordered[int(0.53 * len(ordered))]
    assert ordered[int(0.935 * len(ordered))] <= found.p95 <= ordered[int(0.965 * len(ordered))]
    assert [one.seconds for one in found.slowest] == pytest.approx(ordered[: -SLOWEST - 1 : -1], abs=1e-6)
    assert found.slowest[0].key == "k-4001"


def test_widely_scattered_indices_are_found(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/sparse.db") as database:
        found = read_durations(filled(database, [0.05] * (EXACT + 1), first=66_000_000, step=100_003), EXACT + 1)
    assert found is not None
    assert found.p50 == 0.05
    assert found.looked_at == SAMPLE


def test_the_slowest_are_found_by_their_index_and_fast_items_are_not_in_it(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/plan.db") as database:
        filled(database, [0.05] * 50 + [0.5] * 50)
        plan = database.all(
            "EXPLAIN QUERY PLAN SELECT idx, seconds FROM progress WHERE job = 1 AND status = 'done' AND seconds >= 0.1 "
            "ORDER BY seconds DESC, idx LIMIT 5"
        )
        assert any("idx_progress_slow" in str(row) for row in plan), plan
        rows = database.all(
            "SELECT count(*) FROM progress INDEXED BY idx_progress_slow WHERE status = 'done' AND seconds >= 0.1"
        )
        assert rows == [(50,)]


@pytest.mark.faults
def test_a_million_items_are_asked_in_a_moment(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/million.db") as database:
        job = filled(database, [0.05 if place % 3 else 0.3 for place in range(1_000_000)])
        began = time.monotonic()
        found = read_durations(job, 1_000_000)
        assert time.monotonic() - began < 1.0
        assert found is not None
        assert found.p95 == 0.3

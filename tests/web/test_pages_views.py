"""What the pages read: the map of a job, what happened over time, forecasts; true to the rows, and quick however many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from headway._sql import Database, connect
from headway.core.failure import Failure
from headway.ledger import Done, Failed, Job, Ledger, NewItem
from headway.views.jobs.job import read_sheet
from headway.views.jobs.map import CELLS, cell_size, durations, read_map
from headway.views.jobs.series import Point, Series, read_series, series_between
from headway.views.jobs.speed import speed
from headway.views.overview import outlook, read_job_page
from headway.views.projects import read_newest_projects
from headway.views.queue import QueueView
from headway.views.system.access import read_activity
from headway.views.system.performance import read_performance
from headway.web.pages import draw
from headway.web.pages.jobs import frames, map_sentence
from headway.web.pages.render import part, since, span, when, when_text
from tests.web import scene

BAD = Failure("ValueError", "bad", "x.py:f")


@pytest.fixture(params=["file", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    on_file = request.param == "file"
    url = f"sqlite:///{tmp_path}/views.db" if on_file else str(request.getfixturevalue("postgres_url"))
    with connect(url) as opened:
        yield opened


def filled(ledger: Ledger, count: int, done: int, *, dead: int = 0, retrying: int = 0) -> Job:
    """``count`` items, the first ones done; then dead ones, then ones that wait for another try."""
    job = ledger.create("big", max_retries=1)
    for start in range(0, count, 5000):
        job.register([NewItem(idx, json.dumps(idx), None, idx) for idx in range(start, min(count, start + 5000))])
    job.seal("digest")
    hold = ledger.hold(job, {"workers": 1}, lease=600)
    for start in range(0, done, 5000):
        page = range(start, min(done, start + 5000))
        job.record([Done(idx, seconds=0.001 * (idx % 7 + 1), worker=f"w{idx % 2}") for idx in page], hold=hold)
    for _ in range(2):
        job.record([Failed(idx, BAD) for idx in range(done, done + dead)], hold=hold)
    job.record([Failed(idx, BAD) for idx in range(done + dead, done + dead + retrying)], hold=hold)
    return job


# ---------------------------------------------------------------------------------------------------------------------
# The map


@pytest.mark.parametrize("count", [1, 1200, 1201, 2400, 99_999, 10**6, 10**9])
def test_cells_are_round_numbers_of_items_and_never_too_many(count: int):
    size = cell_size(count)
    assert str(size).rstrip("0") in ("1", "2", "5")
    assert -(-count // size) <= CELLS


@pytest.mark.parametrize("count", [60, 3000])
def test_the_map_counts_every_odd_item_and_colours_every_cell(database: Database, count: int):
    job = filled(Ledger(database), count, count // 2, dead=3, retrying=4)
    found = read_map(job, since=0.0)
    assert found is not None
    assert found.sampled is None
    assert sum(length for _, length in found.bases) == found.cells == -(-count // found.size)
    assert sum(mark.dead for mark in found.marks.values()) == 3
    assert sum(mark.retrying for mark in found.marks.values()) == 4
    assert [base for base, _ in found.bases] == ["done", "pending"]
    assert {worker.name: worker.items for worker in found.workers} == {"w0": count // 4, "w1": count // 4}
    assert sum(n for _, n in found.durations) == count // 2
    everything_is_older = read_map(job, since=database.now() + 60)
    assert everything_is_older is not None
    assert [base for base, _ in everything_is_older.bases] == ["kept", "pending"]


def test_of_a_large_job_one_item_of_each_cell_is_looked_at_and_what_is_odd_is_still_exact(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/large.db") as ledger:
        job = filled(ledger, 12_000, 6000, dead=5, retrying=7)
        found = read_map(job, since=0.0)
        assert found is not None
        assert found.sampled is not None
        assert found.sampled <= found.cells <= CELLS
        assert sum(mark.dead for mark in found.marks.values()) == 5
        assert sum(mark.retrying for mark in found.marks.values()) == 7
        assert [base for base, _ in found.bases] == ["done", "pending"]
        assert abs(found.bases[0][1] * found.size - 6000) <= 2 * found.size


def test_a_job_without_items_or_with_indices_far_apart_has_no_map(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/odd.db") as ledger:
        assert read_map(ledger.create("empty"), since=None) is None
        far = ledger.create("far")
        far.register([NewItem(idx) for idx in (0, 10**15)])
        assert read_map(far, since=None) is None


def test_failures_that_lie_together_are_said_to_and_scattered_ones_are_not(tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/places.db") as ledger:
        job = filled(ledger, 1000, 500, dead=12)
        together = read_map(job, since=0.0)
        assert together is not None
        assert map_sentence(together) == ("12 of the 12 dead", 500, 511)
        apart = together._replace(marks=dict.fromkeys(range(0, 1000, 90), together.marks[500]))
        assert map_sentence(apart) is None


def test_a_map_of_a_million_items_is_a_few_kilobytes():
    random = Random(1)
    marks = {"dead": random.sample(range(1000), 60), "retry": random.sample(range(1000), 40)}
    bases = [("kept", 412), ("done", 336), ("pending", 252)]
    drawn = draw.item_map(bases, marks, columns=100, cell=15, cls="w", name="w", label="Map")
    assert len(drawn) < 5000
    assert drawn.count("<path") < 12


def test_durations_are_binned_without_a_gap():
    bins = durations([0.01, 0.011, 1.0])
    assert sum(count for _, count in bins) == 3
    bounds = [bound for bound, _ in bins]
    ratios = {round(right / left, 3) for left, right in pairwise(bounds)}
    assert ratios == {round(10**0.125, 3)}
    assert durations([]) == ()


# ---------------------------------------------------------------------------------------------------------------------
# Lists


@pytest.mark.parametrize("state", ["dead", "retrying", "processing", "pending"])
def test_what_is_rare_is_found_without_reading_what_is_done(tmp_path: Path, state: str):
    """Counted in steps of SQLite's machine, which no load of the machine changes."""
    steps = {}
    for count in (3000, 24_000):
        with Ledger.open(f"sqlite:///{tmp_path}/{count}.db") as ledger:
            job = filled(ledger, count, count - 100, dead=5, retrying=5)
            connection = ledger.database._take()
            taken = [0]

            def step(taken: list[int] = taken) -> int:
                taken[0] += 1
                return 0

            connection.set_progress_handler(step, 1)
            ledger.database._give(connection)
            found = [item.idx for item in job.items(status=state)]
            connection.set_progress_handler(None, 0)
            first = {"dead": count - 100, "retrying": count - 95, "processing": 0, "pending": count - 90}[state]
            assert found == list(
                range(first, first + {"dead": 5, "retrying": 5, "processing": 0, "pending": 90}[state])
            )
            steps[count] = taken[0]
    assert steps[24_000] < 2 * steps[3000], steps


def test_pending_items_are_all_found_wherever_they_lie(database: Database):
    """Ones that were never tried, below and among and above those that were; and dead ones that were given another life."""
    ledger = Ledger(database)
    job = filled(ledger, 6000, 5000, dead=10)
    job.retry_dead()
    expected = list(range(5000, 6000))
    assert [item.idx for item in job.items(status="pending", limit=5000)] == expected
    assert [item.idx for item in job.items(status="pending", after=5004, limit=3)] == [5005, 5006, 5007]
    scene.change(database, "DELETE FROM progress WHERE job = ? AND idx = 7", job.no)
    scene.change(database, "UPDATE jobs SET done = done - 1 WHERE no = ?", job.no)
    assert [item.idx for item in job.items(status="pending", limit=5000)] == [7, *expected]


def test_jobs_are_paged_by_creation_and_none_is_shown_twice_or_left_out(database: Database):
    ledger = Ledger(database)
    for no in range(7):
        ledger.create(f"job-{no}", function="a:b" if no % 2 else "a%:c")
    seen: list[str] = []
    after = None
    while True:
        page = read_job_page(database, by_creation=True, after=after, limit=3)
        seen += [line.job.id for line in page.lines]
        after = page.next
        # A job of a later page changes now.
        scene.change(
            database, "UPDATE jobs SET updated_at = updated_at + ? WHERE id = ?", len(seen), f"job-{len(seen) % 7}"
        )
        if after is None:
            break
    assert seen == [f"job-{no}" for no in reversed(range(7))]
    assert [line.job.id for line in read_job_page(database, text="A%").lines] == ["job-0", "job-6", "job-4", "job-2"]
    assert read_job_page(database, status="completed").lines == ()
    recent = read_job_page(database, limit=3)
    assert (recent.lines[0].job.id, recent.more, recent.next) == ("job-0", True, None)


def test_activity_and_projects_are_paged_from_the_newest(database: Database):
    ledger = Ledger(database)
    for no in range(5):
        ledger.note("retry", "ads", {"no": no, "token": "hunter2"}, actor="ana")
    first = read_activity(database, limit=3)
    second = read_activity(database, before=first.next_before, limit=3)
    assert [entry.detail["no"] for entry in (*first.activity, *second.activity)] == [4, 3, 2, 1, 0]
    assert second.next_before is None
    assert first.activity[0].detail["token"] == "***"
    assert read_activity(database, actor="tomas").activity == ()
    scene.projects(database)
    page = read_newest_projects(database, limit=2)
    assert [line.project.status for line in page.lines] == ["DONE", "CRAWLING"]
    assert [line.project.project_id for line in read_newest_projects(database, before=page.next).lines] == [
        "crawl-shop-eu"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Over time


def test_what_was_finished_is_counted_by_the_minute_without_a_gap(database: Database):
    ledger = Ledger(database)
    job = filled(ledger, 100, 40, dead=2)
    series = read_series(database)
    assert len(series.points) == 60
    assert (series.done, series.failed) == (40, 4)
    assert read_series(database, "24h").done == read_series(database, "7d").done == 40
    minutes = [(minute, done, failed, seconds) for minute, done, failed, _, seconds in job.minutes(0)]
    own = series_between(minutes, database.now() - 600, database.now())
    assert own.done == 40
    assert {right.minute - left.minute for left, right in pairwise(own.points)} == {1}
    [found] = read_performance(database)
    assert (found.name, found.done, found.failed) == ("", 40, 4)
    assert found.run is not None
    assert 0.001 <= found.run.p50 <= found.run.p95 <= found.run.p99 <= 0.007


def test_the_speed_of_a_run_longer_than_a_few_minutes_is_known_on_both_engines(database: Database):
    """PostgreSQL's sums of large integers are decimals."""
    ledger = Ledger(database)
    job = filled(ledger, 100, 40)
    scene.change(database, "UPDATE runs SET started_at = started_at - 3600 WHERE job = ?", job.no)
    assert {type(value) for row in job.minutes(0) for value in row} == {int, float}
    sheet = read_sheet(job)
    assert sheet.rate is not None
    assert sheet.rate > 0


def steady(per_minute: int, minutes: int = 30) -> Series:
    return Series(1, tuple(Point(minute, per_minute, 0, 0.0) for minute in range(minutes)))


def test_the_window_of_a_forecast_holds_the_true_end_in_four_of_five_runs():
    """Runs whose pace drifts and varies from minute to minute, each asked somewhere in its middle."""
    random, held, asked = Random(20), 0, 400
    for _ in range(asked):
        total, base, level = 20_000, random.uniform(100, 600), 1.0
        counts: list[int] = []
        while sum(counts) < total:
            level = min(1.6, max(0.5, level * random.uniform(0.95, 1.055)))
            counts.append(max(1, round(base * level * random.uniform(0.75, 1.25))))
        minute = random.randrange(4, max(5, len(counts) * 8 // 10))
        done = sum(counts[:minute])
        past = Series(1, tuple(Point(no, count, 0, 0.0) for no, count in enumerate(counts[: minute + 1]))[-30:])
        past = past._replace(points=(*past.points[:-1], past.points[-1]._replace(done=0)))
        _, forecast, _ = speed(past, 0.0, minute * 60.0, total - done, done)
        assert forecast is not None
        left = (len(counts) - minute) * 60.0
        held += forecast.early - 60 <= left <= forecast.late + 60  # the true end is known to the minute
    assert held >= 0.8 * asked, held


def test_a_forecast_follows_the_pace_of_this_run_and_widens_when_it_varies():
    now = 30 * 60.0
    rate, forecast, _ = speed(steady(60), 0.0, now, 1800, 1800)
    assert rate == pytest.approx(1.0)
    assert forecast is not None
    assert forecast.early < forecast.likely < forecast.late
    assert forecast.likely == pytest.approx(1800)
    wild = Series(1, tuple(Point(minute, (10, 150, 20)[minute % 3], 0, 0.0) for minute in range(30)))
    _, wide, _ = speed(wild, 0.0, now, 1800, 1800)
    assert wide is not None
    assert wide.late - wide.early > forecast.late - forecast.early
    early, unsaid, _ = speed(steady(60), now - 10, now, 1800, 12)
    assert early == pytest.approx(1.2)
    assert unsaid is None
    assert speed(steady(0), 0.0, now, 1800, 0) == (None, None, 0.0)
    both_runs = steady(0)._replace(points=(*steady(0).points[:-1], Point(29, 900, 0, 0.0)))
    resumed = speed(both_runs, now - 30, now, 1000, 300)  # the run before finished 600 items in the same minute
    assert resumed.rate is not None
    assert resumed.rate == pytest.approx(10.0)
    assert resumed.forecast is not None
    assert resumed.forecast.likely == pytest.approx(1000 / resumed.rate)


def queue(waiting: int, *, running: int = 0, paused: bool = False) -> QueueView:
    return QueueView("low", waiting, 0, running, 1.0, 0, 0, 0, paused, None, None, "")


@pytest.mark.parametrize(
    ("view", "went", "came", "kind"),
    [
        (queue(0), 0, 0, "empty"),
        (queue(600), 60, 0, "clears"),
        (queue(600), 60, 90, "growing"),
        (queue(600), 0, 0, "stalled"),
        (queue(600, running=1), 0, 0, "unknown"),
        (queue(600, paused=True), 60, 0, "paused"),
    ],
)
def test_a_queue_clears_grows_stalls_or_is_paused(view: QueueView, went: int, came: int, kind: str):
    found = outlook(view, steady(went, 60), [came] * 60)
    assert found.kind == kind
    if kind == "clears":
        assert found.seconds == pytest.approx(600)


# ---------------------------------------------------------------------------------------------------------------------
# Words


def test_a_percentage_never_says_all_before_it_is_all_nor_nothing_when_there_is_something():
    assert [part(0, 10), part(10, 10), part(99_999, 100_000), part(1, 10**6), part(0, 0)] == [
        "0%", "100%", "99.9%", "0.1%", "0%",
    ]  # fmt: skip


def test_times_are_said_as_people_say_them():
    now = scene_time(16, 12)
    assert when_text(scene_time(16, 9), now) == "09:00"
    assert when_text(scene_time(15, 9), now) == "yesterday 09:00"
    assert when_text(scene_time(12, 9), now) == "Thursday 09:00"
    assert when_text(scene_time(2, 9), now) == "2 Nov 09:00"
    assert when(None, now) == "\u2013"
    assert when(scene_time(16, 9), now) == "<time data-t=1794819600>09:00</time>"
    assert since(scene_time(16, 13), now) == "now"  # a clock that is ahead
    assert [span(0.0004), span(0.136), span(0.99), span(75.0)] == ["0.4 ms", "136 ms", "1.0 s", "1 min 15 s"]


def scene_time(day: int, hour: int):
    return datetime(2026, 11, day, hour, tzinfo=UTC)


def test_own_frames_come_first_and_what_cannot_be_read_is_left_out():
    text = (
        'Traceback (most recent call last):\n  File "/home/ana/docjobs.py", line 16, in extract\n    h = fetch(doc)\n'
        '  File "/venv/lib/python3.11/site-packages/httpx/_client.py", line 1054, in get\n    return self.request()\n'
        "ValueError: odd\n"
    )
    own, library = frames(text)
    assert [(frame.place, frame.code) for frame in own] == [("ana/docjobs.py:16 in extract", "h = fetch(doc)")]
    assert [frame.place for frame in library] == ["httpx/_client.py:1054 in get"]
    assert frames(None) == ([], [])
    assert frames("no traceback at all") == ([], [])

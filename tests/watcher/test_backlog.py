"""Many at once, restarts in between, and what all that costs."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
from redis.exceptions import RedisError

from headway._sql import connect
from headway.watcher import NotificationWatcher, SqlProcessedStore
from headway.watcher.adapters import default_ports
from tests.services.waiting import eventually
from tests.watcher.scene import Scene


class Monitor:
    """Every command the server runs from now on, as (client address, words)."""

    def __init__(self, scene: Scene) -> None:
        self._monitor = scene.server.client().monitor()
        self.commands: list[list[str]] = []
        self._monitor.__enter__()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            for entry in self._monitor.listen():
                self.commands.append(entry["command"].split())
        except (RedisError, ValueError, OSError):
            return  # nothing came for a while, or the server was stopped

    def of(self, *names: str) -> list[list[str]]:
        return [words for words in self.commands if words[0].upper() in names]


@pytest.mark.req("S4-07", "S4-18", "S4-23")
def test_a_thousand_failures_are_each_reported_once_in_bounded_pages(scene: Scene):
    with scene.watching(page_size=50):
        monitor = Monitor(scene)
        ids = scene.burst(1_000)
        scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=60)
    registry = [words for words in monitor.of("ZRANGE") if words[1] == "rq:failed:digits"]
    assert registry
    for words in registry:
        if "LIMIT" in words:
            assert words[words.index("LIMIT") + 2] == "50"
        else:
            assert int(words[3]) - int(words[2]) == 49
    offsets = [int(words[words.index("LIMIT") + 1]) for words in registry if "LIMIT" in words]
    assert max(offsets) >= 100, "it goes down window by window until one holds nothing new"
    assert all(words[3:] == ["COUNT", "50"] for words in monitor.of("ZSCAN"))
    assert not monitor.of("KEYS", "SCAN", "SMEMBERS", "HGETALL", "ZRANGEBYSCORE")
    assert len(monitor.of("PUBLISH")) == 1_000


@pytest.mark.req("S4-19")
def test_a_failure_during_the_catch_up_is_reported(scene: Scene):
    """It listens before it catches up: nothing else would say so."""
    scene.burst(1, prefix="before")
    late = iter(["late"])

    def fail_late() -> None:
        for prefix in late:
            scene.burst(1, prefix=prefix)
            scene.redis.zadd("rq:failed:digits", {"late-00000": 5})  # anywhere, also behind what was read

    with scene.watching(after={"publish": fail_late}):
        scene.events.expect(("before-00000", "failed"), ("late-00000", "failed"))


@pytest.mark.req("S4-19")
def test_entries_that_join_below_during_a_read_hide_no_other(scene: Scene):
    """A low score (failure_ttl=-1) shifts every rank above it."""
    ids = scene.burst(200)
    number = iter(range(20))

    def fail_below() -> None:
        for one in number:
            ids.extend(scene.burst(1, failure_ttl=-1, prefix=f"below{one:02}"))
            break

    with scene.watching(page_size=10, after={"zscan": fail_below, "zrange": fail_below}):
        scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=30)


@pytest.mark.req("S4-07", "S4-23")
def test_failures_at_any_score_of_a_large_registry_are_each_reported_once(scene: Scene):
    ids = scene.burst(800, prefix="old")
    with scene.watching(page_size=40):
        scene.events.expect_number(800, timeout=60)
        for part in range(10):
            ids += scene.burst(60, failure_ttl=[None, -1, 7200][part % 3], prefix=f"new{part}")
        scene.events.expect(*[(job_id, "failed") for job_id in ids], timeout=30)


@pytest.mark.parametrize("store", ["sqlite", "postgresql", "redis"])
def test_sweeps_over_empty_registries_find_nothing_and_end_nothing(scene: Scene, request: pytest.FixtureRequest, store):
    stores = {"sqlite": scene.open_store, "redis": scene.redis_store}
    if store == "postgresql":
        database = connect(request.getfixturevalue("postgres_url"))
        stores["postgresql"] = lambda queue: SqlProcessedStore(database, queue)
    with scene.watching(store=stores[store], sweep_s=0.1):
        scene.sweeps(2)
        scene.burst(1)
        scene.events.expect(("burst-00000", "failed"))
        scene.redis.delete("rq:failed:digits")
        scene.sweeps(2)


@pytest.mark.req("S4-19")
def test_a_restart_repeats_nothing_and_reports_events_in_between(scene: Scene):
    with scene.watching(page_size=50):
        before = scene.burst(120, prefix="before")
        scene.events.expect(*[(job_id, "failed") for job_id in before])
    while_down = scene.burst(70, prefix="down")
    everything = [(job_id, "failed") for job_id in before + while_down]
    for _ in range(2):
        with scene.watching(page_size=50):
            scene.events.expect(*everything)


@pytest.mark.req("S4-19")
def test_a_restart_with_the_record_in_redis_repeats_nothing(scene: Scene):
    scene.worker()
    with scene.watching(store=scene.redis_store):
        job, flag = scene.hang()
        job.cancel()
        scene.events.expect((job.id, "canceled"))
    flag.touch()
    eventually(lambda: job.get_status() == "finished")
    for _ in range(2):
        with scene.watching(store=scene.redis_store):
            scene.events.expect((job.id, "canceled"), (job.id, "finished"))


def test_a_job_that_failed_twice_without_a_watcher_is_reported_twice(scene: Scene):
    with scene.watching():
        pass  # from now on everything counts
    scene.worker()
    job = scene.enqueue("fail")
    eventually(lambda: job.get_status() == "failed")
    scene.queue.failed_job_registry.requeue(job.id)
    eventually(lambda: len(job.results()) == 2)
    with scene.watching():
        scene.events.expect((job.id, "failed"), (job.id, "failed"))


def test_the_last_failure_of_each_job_before_the_first_start_is_reported(scene: Scene):
    scene.worker()
    job = scene.enqueue("fail")
    eventually(lambda: job.get_status() == "failed")
    scene.queue.failed_job_registry.requeue(job.id)
    eventually(lambda: len(job.results()) == 2)
    with scene.watching():
        scene.events.expect((job.id, "failed"))


def test_failures_of_any_lifetime_are_found_wherever_their_score_puts_them(scene: Scene):
    """The newest failure is not always the one with the highest score."""
    with scene.watching(page_size=20):
        ids = []
        for number, ttl in enumerate([None, -1, 7200, None, -1]):
            ids += scene.burst(25, failure_ttl=ttl, prefix=f"part{number}")
            scene.events.expect(*[(job_id, "failed") for job_id in ids])


def test_removals_from_a_large_registry_are_noticed_without_telling_anything_again(scene: Scene):
    with scene.watching(page_size=20):
        ids = scene.burst(100)
        scene.events.expect(*[(job_id, "failed") for job_id in ids])
        for job_id in ids[10:40]:
            scene.queue.failed_job_registry.remove(job_id)
        more = scene.burst(1, failure_ttl=3600, prefix="middle")
        scene.events.expect(*[(job_id, "failed") for job_id in ids + more])


@pytest.mark.req("S4-11", "S4-22")
def test_a_started_job_is_asked_after_only_when_its_time_is_up(scene: Scene):
    scene.worker()
    with scene.watching(stuck_job_timeout_s=2.0):
        monitor = Monitor(scene)
        job, _ = scene.hang(job_timeout=-1)
        eventually(lambda: monitor.of("PUBLISH"), 20)
    asked = monitor.of("ZRANK", "ZSCORE", "PUBLISH")
    assert [words[0] for words in asked[:2]] == ["ZRANK", "PUBLISH"]
    assert asked[0][2].startswith(f"{job.id}:")
    scene.events.expect((job.id, "stuck"))


def test_a_restart_does_not_give_a_running_job_more_time(scene: Scene):
    scene.worker()
    job, _ = scene.hang(job_timeout=-1)
    (execution,) = job.get_executions()
    with scene.watching() as watching:
        (running,) = watching.watcher.started["digits"].running.values()
        assert running.created_at == execution.created_at.timestamp()


@pytest.mark.req("S4-21", "S4-22", "S4-24", "S4-31")
@pytest.mark.parametrize("queues", [("digits",), ("digits", "a", "b", "c", "d", "e", "f", "g")], ids=len)
def test_an_idle_watcher_costs_at_most_three_commands_a_minute(scene: Scene, monkeypatch, queues):
    """Half an hour of it, with time made by hand; the server counts (commandstats, every command on its own)."""
    monkeypatch.setattr("headway.watcher.watcher.WAIT_S", 0.0002)
    scene.burst(5)
    seconds = itertools.count()
    now = [float(next(seconds))]
    ports = replace(default_ports(), clock=lambda: now[0])
    watcher = NotificationWatcher(scene.settings(queues=queues), ports, scene.open_store)
    watcher.open()
    before = sum(scene.commands().values())
    for second in range(1800):
        now[0] += 1
        watcher.tick()
        while watcher._link._pinged_at is not None:
            watcher.tick()
        if second == 300:
            first_minutes = sum(scene.commands().values()) - before
    after = scene.commands()
    watcher.close()
    asked_by_the_test = 2  # INFO
    assert first_minutes <= 5 * 3
    assert sum(after.values()) - before - asked_by_the_test <= 30 * 3
    assert after["PING"] >= 50  # it did watch its link
    polling_a_day = 3 * 24 * 3600 / 2
    assert (sum(after.values()) - before) * 48 < polling_a_day / 25


@pytest.mark.req("S4-22")
def test_the_sweep_runs_at_its_interval(scene: Scene):
    with scene.watching(sweep_s=0.05):
        scene.sweeps(5)


def test_silent_changes_are_found_by_the_sweep(scene: Scene):
    """DEL and RENAME are not announced under Kz."""
    with scene.watching(sweep_s=0.2):
        one = scene.burst(1, prefix="one")
        scene.events.expect((one[0], "failed"))
        scene.redis.delete("rq:failed:digits")
        scene.redis.zadd("elsewhere", {"burst-00000": 9e9})
        scene.redis.rename("elsewhere", "rq:failed:digits")
        scene.events.expect((one[0], "failed"), ("burst-00000", "failed"))


def test_a_failure_costs_four_commands_and_a_cancellation_five(scene: Scene):
    queued = scene.enqueue("succeed")
    with scene.watching():
        monitor = Monitor(scene)
        scene.burst(1)
        scene.events.expect(("burst-00000", "failed"))
        assert [words[0] for words in monitor.of("ZRANGE", "HMGET", "XREVRANGE", "PUBLISH", "ZCARD", "TIME")] == [
            "ZRANGE",
            "HMGET",
            "XREVRANGE",
            "PUBLISH",
        ]
        monitor.commands.clear()
        queued.cancel()
        scene.events.expect(("burst-00000", "failed"), (queued.id, "canceled"))
        read = monitor.of("ZRANGE", "HMGET", "XREVRANGE", "PUBLISH", "ZCARD", "TIME")
        mine = [words for words in read if words[-1] != "status"]  # RQ asks for that itself
        assert len(mine) == 5


@pytest.mark.req("S4-37")
def test_a_thousand_failures_in_a_registry_of_ten_thousand_cost_a_bounded_number_of_commands(scene: Scene):
    """Looking through the whole registry after each notification would take thousands of reads."""
    scene.burst(10_000, prefix="old")
    with scene.watching():
        scene.events.expect_number(10_000, timeout=120)
        monitor = Monitor(scene)
        ids = [job_id for part in range(50) for job_id in scene.burst(20, prefix=f"new{part}")]
        scene.events.expect_number(11_000, timeout=60)
    assert len(ids) == 1_000
    theirs = ("EXPIRE", "HSET", "ZADD", "XADD", "MULTI", "EXEC")  # of RQ, which writes the failures
    ours = [words for words in monitor.commands if words[0].upper() not in theirs]
    registry = [words for words in ours if words[1:2] == ["rq:failed:digits"]]
    assert len(registry) <= 250  # fifty groups came, each worth a few reads
    assert len(ours) <= 4 * len(ids)

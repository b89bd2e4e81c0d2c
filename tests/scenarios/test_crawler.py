"""examples/crawl: finish line, states, RQ with the watcher and three webhooks, on one Redis and one PostgreSQL.

Redis fails over to its replica and is wiped, PostgreSQL falls silent while an analyser is forked, and one webhook refuses
one kind of event all the while. Both servers stand behind a proxy, so their addresses stay the same.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.deployment import Deployment
from tests.scenarios.history import assert_every_event_at, assert_projects_counted_exactly, rows
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.services.waiting import eventually

CRAWL = 'python crawler.py "$PROJECT"'
PROCESSES = {
    "site": "python site_of_pages.py",
    "receiver": "python receiver.py",
    "relay": "headway relay",
    "watcher": "sh keep.sh headway watch --queue digests --channel crawl:events --stuck-timeout 3600",
    "digests": 'sh keep.sh rq worker digests --url "$REDIS_URL" --path .',
    "analysers": "python analysers.py",
}
#: Pages of the site and its dead links.
PAGES, ITEMS = 60, 69
DIGEST_FAILED = "crawl.digest.failed.v1"
SINKS = ("healthy", "slow", "refusing")


class Crawl:
    """The deployment, its servers, and what was asked of it."""

    def __init__(
        self, deploy: Callable[..., Deployment], new_redis: Callable[..., RedisServer],
        proxied: Callable[[int], TcpProxy], postgres: PostgresServer,
    ) -> None:  # fmt: skip
        self._new_redis = new_redis
        self.redis = new_redis(notify_keyspace_events="Kz")
        self.redis_proxy, self.postgres_proxy = proxied(self.redis.port), proxied(postgres.port)
        self.name = postgres.create_database(with_tables=True)
        self.database = postgres.url(self.name)
        database = f"postgresql://headway@127.0.0.1:{self.postgres_proxy.port}/{self.name}"
        redis = f"redis://127.0.0.1:{self.redis_proxy.port}"
        site, receiver = free_port(), free_port()
        self.deployment = deploy(
            "crawl", DATABASE_URL=database, REDIS_URL=f"{redis}/0", PROJECTS_REDIS_URL=f"{redis}/1",
            SITE_URL=f"http://127.0.0.1:{site}", SITE_PORT=str(site), SITE_PAGES=str(PAGES),
            RECEIVER_PORT=str(receiver), HEADWAY_DATABASE=database, HEADWAY_PROJECTS_REDIS=f"{redis}/1",
            HEADWAY_WEBHOOK_SECRET="a secret of the scenario",
            HEADWAY_SINKS=" ".join(f"http://127.0.0.1:{receiver}/{name}#name={name}" for name in SINKS),
            RQ_WATCHER_EVENT=DIGEST_FAILED, SLOW_SECONDS="0.2",
        )  # fmt: skip
        self.projects: list[str] = []
        (self.deployment.directory / "refuse").touch()
        for name, command in PROCESSES.items():
            self.deployment.start(name, command)
        eventually(lambda: "watching" in self.deployment.log("watcher").lower(), 60, "the watcher watches")

    # ---- use -------------------------------------------------------------------------------------------------------

    def begin(self, project: str) -> None:
        """Start a crawler, and return when pages of its project are counted."""
        self.projects.append(project)
        self.deployment.start(project, CRAWL, PROJECT=project)
        counted = "SELECT 1 FROM project_counts c JOIN projects p ON p.no = c.project WHERE p.id = ? LIMIT 1"
        eventually(lambda: rows(self.database, counted, project), 120, f"pages of {project} are counted")

    def finish(self, project: str) -> None:
        """Wait until the project is done and its digest is reported."""
        self.run_until_it_succeeds(project)
        eventually(lambda: self.statuses().get(project) == "DONE", 120, f"{project} is done")
        self.wait_for_digest(project)

    def crawl_again(self, project: str) -> None:
        """Run the crawler once more, because Redis may have lost the job of the digest."""
        self.run_until_it_succeeds(project)
        self.deployment.start(project, CRAWL, PROJECT=project)
        self.finish(project)

    def run_until_it_succeeds(self, project: str) -> None:
        while self.deployment.processes[project].wait(120) != 0:
            assert self.deployment.log(project).count("Traceback") < 20, self.deployment.log(project)[-3000:]
            self.deployment.start(project, CRAWL, PROJECT=project)

    def crawl(self, project: str) -> None:
        self.begin(project)
        self.finish(project)

    def statuses(self) -> dict[str, str]:
        return dict(rows(self.database, "SELECT id, status FROM projects"))

    def wait_for_digest(self, project: str) -> None:
        """Wait for the report of a digest that fails. The digest of another project leaves no trace outside RQ."""
        if project.endswith("-empty"):
            eventually(lambda: f"digest-{project}" in self.jobs_at("healthy", DIGEST_FAILED), 120, "the failed digest")

    def received(self, sink: str, code: int = 204) -> list[dict[str, Any]]:
        path = self.deployment.directory / f"{sink}.{code}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def jobs_at(self, sink: str, kind: str) -> set[str]:
        return {event["job"] for event in self.received(sink) if event["type"] == kind}

    # ---- disturbances ----------------------------------------------------------------------------------------------

    def fail_over(self) -> None:
        """Attach a replica, kill the primary, promote the replica under the same address."""
        replica = self._new_redis(notify_keyspace_events="Kz")
        replica.client().replicaof("127.0.0.1", str(self.redis.port))
        eventually(
            lambda: replica.client().info("replication")["master_link_status"] == "up", 60, "the replica follows"
        )
        self.redis.kill9()
        replica.client().replicaof("NO", "ONE")
        self.redis = replica
        self.redis_proxy.aim(replica.port)

    def wipe(self) -> None:
        self.redis.client().flushall()

    def kill_analyser_while_postgres_is_silent(self) -> None:
        """Kill one analyser while PostgreSQL does not answer: the parent must fork the next one all the same."""
        self.postgres_proxy.black_hole()
        before = self.analysers()
        os.kill(before[-1], signal.SIGKILL)
        eventually(lambda: len(self.analysers()) > len(before), 20, "a new analyser is forked")
        self.postgres_proxy.pass_through()

    def analysers(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"runs as (\d+)", self.deployment.log("analysers"))]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def retry_refused(self) -> None:
        """Let the third webhook accept again, and deliver what it refused."""
        (self.deployment.directory / "refuse").unlink()
        done = self.deployment.run("headway relay --poison retry --yes")
        assert done.returncode == 0, done.stdout + done.stderr

    def expected(self) -> set[str]:
        """Return the ids of all events, by the tables."""
        projects = rows(self.database, "SELECT id, epoch FROM projects WHERE completed_at IS NOT NULL")
        return {f"job.completed:{id}:{epoch}" for id, epoch in projects} | {
            id for (id,) in rows(self.database, "SELECT id FROM outbox")
        }

    def wait_for_events(self, sink: str, expected: set[str]) -> None:
        eventually(lambda: expected <= {event["id"] for event in self.received(sink)}, 120, f"all events at {sink}")

    def unrecorded(self) -> list[tuple[Any, ...]]:
        """Return the projects of which SQL does not know that all three sinks have the event."""
        return rows(
            self.database,
            "SELECT p.id, count(d.sink) FROM projects p LEFT JOIN project_deliveries d ON d.project = p.no "
            "WHERE p.delivered_at IS NULL GROUP BY p.id HAVING count(d.sink) < 3",
        )

    def check(self) -> None:
        """Stop everything and check the whole history."""
        expected = self.expected()
        assert len(expected) >= len(self.projects) + sum(name.endswith("-empty") for name in self.projects)
        for sink in SINKS:
            self.wait_for_events(sink, expected)
        # A relay that ends between a sink's answer and the record of it delivers again when it is started.
        eventually(lambda: self.unrecorded() == [], 30, "every delivery is recorded")
        for name in ("analysers", "digests", "watcher", "relay"):
            code = self.deployment.stop(name)
            assert code == 0, (name, code, self.deployment.log(name)[-3000:])
        self.deployment.stop("receiver")
        self.deployment.stop("site")
        self.deployment.assert_no_orphans()

        assert_projects_counted_exactly(self.database, dict.fromkeys(self.projects, ITEMS))
        for sink in SINKS:
            # An event that is announced again after a loss of Redis has another time, and the same id.
            events = [{**event, "at": ""} for event in self.received(sink)]
            assert_every_event_at(events, expected, sink)
            reported = Counter(job for id, job in {(event["id"], event["job"]) for event in events} if is_end(id))
            assert reported == Counter(self.projects), sink
            assert not self.received(sink, 401), "a signature was wrong"
        assert {event["type"] for event in self.received("refusing", 400)} == {DIGEST_FAILED}
        self.check_states()
        self.check_leftovers()

    def check_states(self) -> None:
        found = rows(self.database, "SELECT task_id, status FROM states WHERE tag = 'pages' ORDER BY task_id")
        assert found == [(task, 2**31 - 1) for task in range(3)]

    def check_leftovers(self) -> None:
        """No connection and no key without a time to live is left, except the streams and one counter."""
        others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        eventually(lambda: rows(self.database, others) == [], 30, "every connection to PostgreSQL is closed")
        client = self.redis.client(1)
        lasting = {key for key in client.scan_iter() if client.ttl(key) == -1}
        assert lasting <= {"smap:events", "smap:events:quarantine", "headway:lease:token"}, lasting
        assert not [key for key in client.scan_iter() if key.endswith(":rebuild") or key.count(":") > 3]


def is_end(id: str) -> bool:
    return id.startswith("job.completed:")


@pytest.fixture
def crawl(
    deploy: Callable[..., Deployment], redis_factory: Callable[..., RedisServer],
    tcp_proxy: Callable[[int], TcpProxy], postgres_server: PostgresServer,
) -> Crawl:  # fmt: skip
    return Crawl(deploy, redis_factory, tcp_proxy, postgres_server)


@pytest.mark.req("S0-15")
def test_every_site_is_reported_once_although_redis_fails_over_and_postgres_falls_silent(crawl: Crawl):
    crawl.crawl("first-empty")
    crawl.begin("failing-over")
    crawl.fail_over()
    crawl.finish("failing-over")
    crawl.crawl("second-empty")
    crawl.begin("silent")
    crawl.kill_analyser_while_postgres_is_silent()
    crawl.finish("silent")
    crawl.retry_refused()
    crawl.check()


@pytest.mark.req("S0-15")
def test_every_site_is_reported_once_although_redis_is_wiped(crawl: Crawl):
    crawl.crawl("first-empty")
    crawl.begin("wiped")
    crawl.wipe()
    crawl.finish("wiped")
    crawl.crawl("second-empty")
    crawl.wipe()
    crawl.crawl("third-empty")
    crawl.retry_refused()
    crawl.check()


@pytest.mark.faults
def test_every_site_is_reported_once_under_random_disturbances(crawl: Crawl, chance: random.Random):
    end = time.monotonic() + float(os.environ.get("HEADWAY_SCENARIO_SECONDS", "600"))
    disturbances = [crawl.fail_over, crawl.wipe, crawl.kill_analyser_while_postgres_is_silent]
    crawl.crawl("site-0-empty")
    number = 0
    while time.monotonic() < end:
        number += 1
        project = f"site-{number}" + chance.choice(("", "-empty"))
        crawl.begin(project)
        chance.choice(disturbances)()
        crawl.crawl_again(project)
    crawl.retry_refused()
    crawl.check()

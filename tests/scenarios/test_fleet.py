"""A fleet of three machines with two jobs, users' tasks, encryption and alerts: machines die, servers restart, code changes."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from cryptography.fernet import Fernet

from tests.scenarios import history
from tests.scenarios.deployment import Deployment
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

WORKER = "headway worker --app studio:queue --workers 2 --max-workers 3"
CLIPS = "python make_clips.py ${CLIPS:-600} > clips.jsonl"
FILMS = (
    "headway run films:render --items clips.jsonl --key clip --job films --fleet --slots 4 --priority low --retries 5"
)
POSTERS = (
    "headway run --items clips.jsonl --key clip --job posters --fleet --slots 1 --priority low --detach "
    "-- printf 'poster of %s' {clip}"
)
VIEWERS = "python viewers.py ${PREVIEWS:-5}"
NEW_VERSION = "sed -i 's/^VERSION = .*/VERSION = 2/' films.py"
MACHINES = ("paris", "london", "rome")
#: Seconds that the longest clip takes.
LONGEST = 5
#: The cause of death of clips that no version can render.
DEAD = {"betamax": "UnsupportedCodec", "broken": "WorkerDied"}
#: For a step of the scenario on a busy machine.
PATIENCE = 120


@dataclass
class Studio:
    """The deployment: three machines with workers, and the laptop of the operator who starts jobs."""

    database: str
    machines: dict[str, Deployment]
    laptop: Deployment

    def start_workers(self, *machines: str) -> None:
        """Start the worker command of these machines at the same time, and wait until their workers are online."""
        before = self.online()
        for machine in machines:
            self.machines[machine].start("worker", WORKER)
        eventually(lambda: len(self.online() - before) >= 2 * len(machines), PATIENCE, f"{machines} are online")

    def online(self) -> set[str]:
        try:
            return {name for (name,) in self.rows("SELECT name FROM task_workers WHERE ended_at IS NULL")}
        except psycopg.errors.UndefinedTable:  # the first machine has not created the tables yet
            return set()

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return history.rows(self.database, statement, *values)

    def done(self, job: str = "films") -> int:
        """Return how many items of a job are recorded as done, by their rows."""
        [(count,)] = self.rows(
            "SELECT count(*) FROM progress p JOIN jobs j ON j.no = p.job WHERE j.id = ? AND p.status = 'done'", job
        )
        return int(count)

    def advances(self, items: int) -> None:
        """Wait until that many more films are done, or the job has finished."""
        at = self.done()
        eventually(
            lambda: self.done() >= at + items or self.finished("films"), PATIENCE, f"{items} more films are done"
        )

    def finished(self, job: str) -> bool:
        return self.rows("SELECT 1 FROM jobs WHERE id = ? AND finished_at IS NOT NULL", job) != []

    def begun(self) -> list[tuple[float, int, str]]:
        """Return (time, version, clip) of every clip that a machine began, as the function itself wrote it down."""
        files = [machine.directory / "begun.log" for machine in self.machines.values()]
        lines = [line.split() for file in files if file.exists() for line in file.read_text("utf-8").splitlines()]
        return [(float(at), int(version), clip) for at, version, clip in lines]

    def is_quiet(self) -> bool:
        """Return whether no clip was begun for longer than the longest one takes."""
        return time.time() - max(at for at, _, _ in self.begun()) > LONGEST + 1

    def busy_machine(self) -> str:
        """Return a machine that renders films and does not evaluate the alerts, whose takeover would take longer."""
        [(judge,)] = eventually(lambda: self.rows("SELECT holder FROM leases WHERE name = 'alerts'"), PATIENCE)
        if not self.machines[MACHINES[0]].is_isolated:
            return MACHINES[0]

        def rendering() -> list[str]:
            busy = {
                json.loads(holder)["host"] for (holder,) in self.rows("SELECT holder FROM blocks WHERE holder <> ''")
            }
            return [name for name in MACHINES if name in busy and name != json.loads(judge)["host"]]

        return eventually(rendering, PATIENCE)[0]

    def operate(self, command: str) -> str:
        """Run a command of the operator, which has to succeed."""
        ended = self.laptop.run(command)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        return ended.stdout

    def events(self) -> list[dict[str, Any]]:
        """Return what the sinks of all machines received."""
        files = [deployment.directory / "events.jsonl" for deployment in (*self.machines.values(), self.laptop)]
        return [json.loads(line) for file in files if file.exists() for line in file.read_text("utf-8").splitlines()]

    def deploy_version_2(self, machine: str) -> None:
        """Install version 2 on a machine and end its worker of version 1."""
        assert self.machines[machine].run(NEW_VERSION).returncode == 0
        assert self.machines[machine].stop("worker") == 0, self.machines[machine].log("worker")

    def end(self) -> None:
        for machine in self.machines.values():
            assert machine.stop("worker") == 0, machine.log("worker")
        for deployment in (*self.machines.values(), self.laptop):
            deployment.assert_no_orphans()


@pytest.fixture
def studio(deploy: Callable[..., Deployment], postgres_url: str, redis_server: RedisServer) -> Studio:
    environment = {
        "HEADWAY_DATABASE": postgres_url,
        "HEADWAY_REDIS": redis_server.url(),
        "HEADWAY_QUEUE_KEYS": Fernet.generate_key().decode(),
    }
    machines = {name: deploy("fleet", hostname=name, **environment) for name in MACHINES}
    return Studio(postgres_url, machines, deploy("fleet", **environment))


def test_a_fleet_survives_a_dead_machine_restarts_a_deployment_and_its_operator(
    studio: Studio, postgres_server: PostgresServer, redis_server: RedisServer
) -> None:
    studio.start_workers(*MACHINES)
    studio.operate(CLIPS)
    terminal = studio.laptop.start("terminal", FILMS)
    studio.operate(POSTERS)
    viewers = studio.laptop.start("viewers", VIEWERS)
    eventually(lambda: studio.done() > 30, PATIENCE, "the fleet renders films")

    os.killpg(terminal.pid, signal.SIGHUP)  # the terminal of the starter is closed
    terminal.wait(60)
    assert not studio.finished("films")
    studio.advances(10)

    victim = studio.busy_machine()
    studio.machines[victim].kill_group("worker")
    with redis_server.client() as client:
        client.flushall()
    studio.operate("headway pause films")
    postgres_server.restart(immediate=True)
    eventually(studio.is_quiet, PATIENCE, "a paused fleet begins nothing more")
    begun_at_pause = studio.begun()
    studio.operate("headway scale films 3")
    assert studio.begun() == begun_at_pause
    assert not studio.finished("films")
    studio.operate("headway resume films")
    studio.advances(10)
    eventually(lambda: lost_worker_alerts(studio), PATIENCE, "the lost machine is an alert")

    first, second = (name for name in MACHINES if name != victim)
    for deployment in (studio.laptop, studio.machines[victim]):
        assert deployment.run(NEW_VERSION).returncode == 0
    studio.operate("headway stop films")
    eventually(lambda: studio.rows("SELECT 1 FROM jobs WHERE id = 'films' AND holder IS NULL"), PATIENCE)
    assert not studio.finished("films")
    studio.deploy_version_2(first)
    studio.start_workers(first)
    again = studio.laptop.start("again", FILMS)
    eventually(lambda: f"on {second} refused" in studio.operate("headway show films"), PATIENCE)
    studio.deploy_version_2(second)
    studio.start_workers(second, victim)

    assert viewers.wait(PATIENCE) == 0
    assert again.wait(PATIENCE) == 3, studio.laptop.log("again")  # finished, with dead letters
    eventually(lambda: studio.finished("posters"), PATIENCE, "the second job is finished")
    eventually(lambda: not studio.rows("SELECT 1 FROM tasks WHERE ended_at IS NULL"), PATIENCE, "every task has ended")
    eventually(lambda: has_every_event(studio), PATIENCE, "the sink has every alert and completion")
    studio.end()
    check(studio, previews=5, runs=["interrupted", "finished"])


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_a_fleet_is_exact_after_random_disturbances(
    studio: Studio, postgres_server: PostgresServer, redis_server: RedisServer, chance: random.Random
) -> None:
    seconds = float(os.environ.get("HEADWAY_SCENARIO_SECONDS", "600"))
    # 600 clips keep four slots busy for about 13 s; the disturbances take their time too.
    studio.laptop.environment |= {"CLIPS": str(int(seconds * 20)), "PREVIEWS": str(int(seconds / 4))}

    def restart_machine() -> None:
        machine = chance.choice(MACHINES)
        if chance.random() < 0.5:
            studio.machines[machine].kill_group("worker")
        else:
            assert studio.machines[machine].stop("worker") == 0, studio.machines[machine].log("worker")
        studio.start_workers(machine)

    def freeze_machine() -> None:
        pid = studio.machines[chance.choice(MACHINES)].processes["worker"].pid
        os.killpg(pid, signal.SIGSTOP)
        studio.advances(20)
        os.killpg(pid, signal.SIGCONT)

    def restart_redis() -> None:
        redis_server.kill9()
        studio.advances(5)
        redis_server.start()

    def operate() -> None:
        studio.operate("headway pause films")
        studio.operate("headway scale films 3")
        studio.operate("headway resume films")

    disturbances = [
        restart_machine,
        freeze_machine,
        restart_redis,
        operate,
        redis_server.make_pristine,
        lambda: postgres_server.restart(immediate=chance.random() < 0.5),
    ]
    studio.start_workers(*MACHINES)
    studio.operate(CLIPS)
    starter = studio.laptop.start("starter", FILMS)
    studio.operate(POSTERS)
    viewers = studio.laptop.start("viewers", VIEWERS)
    eventually(lambda: studio.done() > 0, PATIENCE, "the fleet renders films")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not studio.finished("films"):
        chance.choice(disturbances)()
        studio.advances(chance.randrange(1, 50))
    assert starter.wait(2 * seconds) == 3, studio.laptop.log("starter")
    assert viewers.wait(2 * seconds) == 0
    eventually(lambda: studio.finished("posters"), PATIENCE, "the second job is finished")
    eventually(lambda: not studio.rows("SELECT 1 FROM tasks WHERE ended_at IS NULL"), PATIENCE, "every task has ended")
    eventually(lambda: has_every_event(studio), PATIENCE, "the sink has every alert and completion")
    studio.end()
    check(studio, previews=int(seconds / 4), runs=["finished"])


def lost_worker_alerts(studio: Studio) -> list[dict[str, Any]]:
    return [
        event for event in studio.events() if event["type"] == "alert.opened" and event["data"]["rule"] == "worker_lost"
    ]


def has_every_event(studio: Studio) -> bool:
    """Return whether the sink got every completion and every alert that was decided."""
    decided = studio.rows("SELECT id FROM outbox WHERE type LIKE ? OR type = 'job.completed'", "alert.%")
    return {id for (id,) in decided} <= {event["id"] for event in studio.events()}


def check(studio: Studio, *, previews: int, runs: list[str]) -> None:
    """Check the whole history by plain SQL, after every process has ended."""
    clips = [json.loads(line) for line in (studio.laptop.directory / "clips.jsonl").read_text("utf-8").splitlines()]
    history.assert_nothing_held(studio.database)
    assert studio.rows("SELECT job FROM fleets") == []
    check_films(studio, clips, runs)
    check_posters(studio, clips)
    check_viewers(studio, 4 * previews)
    completions = studio.rows("SELECT job, count(*) FROM outbox WHERE type = 'job.completed' GROUP BY job")
    assert dict(completions) == {"films": 1, "posters": 1}
    history.assert_every_event_at(
        studio.events(), [id for (id,) in studio.rows("SELECT id FROM outbox WHERE type = 'job.completed'")], "tee"
    )


def check_films(studio: Studio, clips: list[dict[str, Any]], outcomes: list[str]) -> None:
    """Every clip is done exactly once, by the version of the run that recorded it, or dead with its cause.

    The first run of the job is of version 1, the second of version 2.
    """
    dead = {index: DEAD[clip["codec"]] for index, clip in enumerate(clips) if clip["codec"] in DEAD}
    by_status = history.assert_counters_match_items(studio.database, "films")
    assert by_status["done"] == len(clips) - len(dead)
    [(no,)] = studio.rows("SELECT no FROM jobs WHERE id = 'films'")
    assert dict(
        studio.rows(
            "SELECT d.idx, c.type FROM dead_letters d JOIN causes c ON c.job = d.job AND c.no = d.cause WHERE d.job = ?", no
        )
    ) == dead  # fmt: skip
    runs = studio.rows("SELECT outcome, started_at, settings FROM runs WHERE job = ? ORDER BY no", no)
    assert [outcome for outcome, _, _ in runs] == outcomes
    second_start = runs[1][1] if len(runs) > 1 else math.inf
    recorded = studio.rows(
        "SELECT p.idx, p.updated_at, r.result FROM progress p LEFT JOIN results r ON r.job = p.job AND r.idx = p.idx "
        "WHERE p.job = ? AND p.status = 'done'",
        no,
    )
    assert sorted(index for index, _, _ in recorded) == [index for index in range(len(clips)) if index not in dead]
    for index, at, text in recorded:
        result = json.loads(text)
        assert result["clip"] == clips[index]["clip"]
        assert result["version"] == (1 if at < second_start else 2), (index, at, second_start, result)
    begun = studio.begun()
    assert {clips[index]["clip"] for index, _, _ in recorded} <= {clip for _, _, clip in begun}
    assert [clip for at, version, clip in begun if (version == 2) != (at > second_start)] == []
    charged = studio.rows("SELECT DISTINCT idx, outcome FROM attempts WHERE job = ?", no)
    innocent = [
        (index, outcome) for index, outcome in charged if clips[index]["codec"] in ("h264", "av1") and outcome != "lost"
    ]
    assert innocent == []
    assert not any("films:render" in settings for _, _, settings in runs), "the order of the fleet is not encrypted"


def check_posters(studio: Studio, clips: list[dict[str, Any]]) -> None:
    assert history.assert_counters_match_items(studio.database, "posters") == {"done": len(clips)}
    results = studio.rows(
        "SELECT r.idx, r.result FROM results r JOIN jobs j ON j.no = r.job WHERE j.id = 'posters' ORDER BY r.idx"
    )
    assert [(index, json.loads(text)) for index, text in results] == [
        (index, f"poster of {clip['clip']}") for index, clip in enumerate(clips)
    ]


def check_viewers(studio: Studio, previews: int) -> None:
    """Every accepted preview was completed once, one at a time per viewer, and stored encrypted."""
    accepted = studio.laptop.log("viewers").split()
    assert len(accepted) == previews
    status = history.assert_tasks_ended_exactly_once(studio.database, accepted)
    assert {status[id] for id in accepted} == {"COMPLETED"}
    history.assert_one_active_task_per_user(studio.database)
    payloads = studio.rows("SELECT payload, result FROM tasks WHERE kind = 'preview'")
    assert not any("clip-000" in payload or "clip-000" in result for payload, result in payloads)

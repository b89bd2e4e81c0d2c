"""`headway run --fleet`: the workers of the queue do it, and whoever started it need not be there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest

import headway
from headway.config import Config
from headway.core.lifecycle import Shutdown
from headway.errors import InvalidInput
from headway.ledger import Ledger
from headway.ledger.fleet import fleet
from headway.queue import TaskQueue
from headway.run.display.estimate import Estimator, RunSnapshot
from headway.run.fleet.start import Fleets, follow, open_queue, submit_missing
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]

FUNCTIONS = """
import os, time

def double(item):
    if item == 7:
        print("seven!")
        raise ValueError("no sevens")
    return 2 * item

def slow(item):
    with open(f"ran-{item}", "a") as file:
        file.write("x")
    time.sleep(0.02)

def kill_slot(item):
    with open(f"ran-{item}", "a") as file:
        file.write("x")
    if item == 7:
        os.kill(os.getppid(), 9)
        time.sleep(60)

def fail_or_wait(item):
    if item == 0:
        raise ValueError("no zeros")
    while item == 9 and not os.path.exists("free"):
        time.sleep(0.01)

def wait(item):
    open(f"begun-{item}", "w").close()
    while not os.path.exists("free"):
        time.sleep(0.01)
    time.sleep(0.1)  # so that a stop is heard before the last of them
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work.py").write_text(FUNCTIONS)
    (tmp_path / "items.jsonl").write_text("".join(f"{n}\n" for n in range(30)))
    monkeypatch.setenv("HEADWAY_LOG_LEVEL", "error")
    return tmp_path


@pytest.fixture
def database(postgres_with_tables: str, quick_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADWAY_DATABASE", postgres_with_tables)  # after quick_cli, which forgets such variables
    return postgres_with_tables


@pytest.fixture
def ledger(database: str) -> Iterator[Ledger]:
    with Ledger.open(database) as opened:
        yield opened


def completions(ledger: Ledger) -> int:
    row = ledger.database.one("SELECT count(*) FROM outbox WHERE type = 'job.completed'")
    assert row is not None
    return int(row[0])


def test_a_detached_job_is_done_by_workers_as_a_local_run_would(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    (place / "headway.toml").write_text("retry_delay = 0.001\n")
    begun = quick_cli("run", "work:double", "--items", "items.jsonl", "--job", "ads", "--fleet", "--detach")
    assert begun.returncode == 0, begun.stderr
    assert "headway show ads --watch" in begun.stderr
    job = ledger.job("ads")
    assert (job.info().status, job.info().done) == ("processing", 0)
    assert quick_cli("worker", "--burst").returncode == 0
    info = job.info()
    assert (info.status, info.done, info.dead, info.failures, completions(ledger)) == ("completed", 29, 1, 4, 1)
    (cause,) = job.causes()
    assert (cause.type, cause.message, cause.dead) == ("ValueError", "no sevens", 1)
    assert "seven!" in (job.history(7)[-1].printed or "")
    assert [json.loads(result or "") for idx, _, result in job.results_by_index(limit=5)] == [0, 2, 4, 6, 8]
    assert (job.item(3).worker or "").startswith("slot ")
    again = quick_cli("run", "work:double", "--items", "items.jsonl", "--job", "ads", "--fleet", "--detach")
    assert again.returncode == 0
    assert completions(ledger) == 1


def test_dead_letters_of_a_finished_job_that_are_retried_are_run_by_the_fleet(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    (place / "headway.toml").write_text("retry_delay = 0.001\n")
    (place / "work.py").write_text(
        "import os\ndef double(item):\n    if item == 7 and not os.path.exists('repaired'):\n"
        "        raise ValueError('no sevens')\n    return 2 * item\n"
    )
    assert quick_cli("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach").returncode == 0
    assert quick_cli("worker", "--burst").returncode == 0
    job = ledger.job("ads")
    assert (job.info().status, job.info().dead) == ("completed", 1)
    (place / "repaired").touch()
    retried = quick_cli("dead", "retry", "ads", "--yes")
    assert "The workers of the fleet try them." in retried.stderr
    assert (job.info().status, job.runs()[-1].outcome) == ("processing", None)
    assert "order" not in job.runs()[-1].settings
    with open_queue(Config(cli={"database": database}), ledger.database) as queue:
        Fleets(queue)()  # what the sweeper of a worker does
    assert quick_cli("worker", "--burst").returncode == 0
    info = job.info()
    assert (info.status, info.done, info.dead, completions(ledger)) == ("completed", 30, 0, 2)
    assert [run.outcome for run in job.runs()] == ["finished"]


def test_short_items_of_a_slot_are_recorded_together(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(100)))
    assert quick_cli("run", "work:slow", "--items", "items.jsonl", "--job", "j", "--fleet", "--detach").returncode == 0
    assert quick_cli("worker", "--burst").returncode == 0
    row = ledger.database.one("SELECT count(*), count(DISTINCT updated_at) FROM progress")
    assert row is not None
    assert row[0] == 100
    assert row[1] <= 34  # a group for each quarter of a second; one by one they were 50 and more


def test_a_program_is_run_by_the_fleet(place: Path, database: str, ledger: Ledger, quick_cli: Cli) -> None:
    begun = quick_cli(
        "run", "--items", "items.jsonl", "--job", "echo", "--fleet", "--detach", "--", "/bin/echo", "item {}"
    )
    assert begun.returncode == 0, begun.stderr
    assert quick_cli("worker", "--burst").returncode == 0
    job = ledger.job("echo")
    assert job.info().done == 30
    assert job.results_by_index(limit=1)[0][2] == '"item 0"'


def test_a_worker_with_other_code_does_not_take_part_and_says_so(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    assert quick_cli("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach").returncode == 0
    (place / "work.py").write_text(FUNCTIONS + "\n# another version\n")
    quick_cli("worker", "--burst")
    assert ledger.job("ads").info().done == 0
    shown = quick_cli("show", "ads").stdout
    assert "refused the job" in shown
    assert "code is" in shown
    assert quick_cli("stop", "ads").returncode == 0
    (place / "headway.toml").write_text("retry_delay = 0.001\n")
    words = ("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--any-version")
    assert quick_cli(*words).returncode == 0
    (place / "work.py").write_text(FUNCTIONS + "\n# a third version\n")
    quick_cli("worker", "--burst")
    assert ledger.job("ads").info().done == 29


def test_a_worker_that_cannot_import_the_function_says_so(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    assert quick_cli("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach").returncode == 0
    (place / "work.py").unlink()
    quick_cli("worker", "--burst")
    assert "There is no module 'work'" in quick_cli("show", "ads").stdout


def test_a_worker_without_the_key_says_so(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli, spawn_cli: Spawn
) -> None:
    from cryptography.fernet import Fernet

    keys = {"HEADWAY_DATABASE": database, "HEADWAY_QUEUE_KEYS": Fernet.generate_key().decode()}
    words = ("run", "work:double", "-i", "items.jsonl", "--fleet", "--detach")
    assert quick_cli(*words, "-j", "with", env=keys).returncode == 0
    assert quick_cli(*words, "-j", "without").returncode == 0
    spawn_cli("worker", env={"HEADWAY_DATABASE": database}, stderr=subprocess.DEVNULL)
    assert "refused the job" in eventually(lambda: ledger.job("with").fleet_note(), timeout=60)
    eventually(lambda: ledger.job("without").info().finished_at, timeout=60)
    assert (ledger.job("with").info().done, ledger.job("without").info().done) == (0, 29)


def test_a_worker_runs_no_code_that_was_replaced_after_it_began(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli, spawn_cli: Spawn
) -> None:
    (place / "shop.py").write_text(
        f"from headway.queue import TaskQueue\nimport work\nqueue = TaskQueue({database!r})\n"
        "@queue.handler('caption')\ndef caption(task, payload):\n    pass\n"
    )
    env = {"HEADWAY_DATABASE": database}
    worker = spawn_cli("worker", "--app", "shop:queue", env=env, stderr=subprocess.DEVNULL)
    eventually(lambda: ledger.database.one("SELECT 1 FROM task_workers"), timeout=60)
    (place / "work.py").write_text(FUNCTIONS.replace("2 * item", "300 * item"))  # Python sees that by its size
    assert quick_cli("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach").returncode == 0
    assert "code is" in eventually(lambda: ledger.job("ads").fleet_note(), timeout=60)
    assert ledger.job("ads").info().done == 0
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_items_that_came_after_the_fleet_began_are_not_left_out_in_silence(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    def items(count: int) -> None:
        (place / "keyed.jsonl").write_text("".join(f'{{"id": "{n}"}}\n' for n in range(count)))

    words = ("run", "work:slow", "-i", "keyed.jsonl", "--key", "id", "-j", "ads", "--fleet", "--detach")
    items(3)
    assert quick_cli(*words).returncode == 0
    assert quick_cli(*words).returncode == 0
    items(5)
    again = quick_cli(*words)
    assert again.returncode == 5
    assert "2 new" in again.stderr
    assert "headway stop ads" in again.stderr


def test_whoever_submits_slots_at_the_same_time_submits_none_too_many(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    words = ("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--slots", "3")
    assert quick_cli(*words).returncode == 0
    ledger.database.write("DELETE FROM tasks")
    job = ledger.job("ads")
    known = fleet.read(ledger.database, job.no)
    assert known is not None

    def submit() -> int:
        with open_queue(Config(), ledger.database) as queue:
            return submit_missing(queue, job, known)

    waiting = (
        "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND datname = current_database()"
    )
    with psycopg.connect(database) as somebody, ThreadPoolExecutor(4) as pool:
        somebody.execute("LOCK TABLE headway.outbox IN SHARE MODE")  # each has counted before anybody has submitted
        submitted = [pool.submit(submit) for _ in range(4)]
        eventually(lambda: ledger.database.one(waiting) == (4,), timeout=60)
        somebody.rollback()
        assert sorted(each.result(60) for each in submitted) == [0, 0, 0, 3]
    assert ledger.database.one("SELECT count(*) FROM tasks") == (3,)


def test_what_a_fleet_cannot_do_is_refused_before_anything_is_written(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", "work:double", "--items", "items.jsonl")
    assert "Add --fleet" in quick_cli(*run, "--detach").stderr
    assert "needs PostgreSQL" in quick_cli(*run, "--fleet", "--database", f"sqlite:///{place}/x.db").stderr
    assert "cannot write a file" in quick_cli(*run, "--fleet", "--detach", "--output", "x.jsonl").stderr
    with pytest.raises(InvalidInput, match="cannot import"):
        headway.map(lambda item: item, [1], job="ads", fleet=True)
    with pytest.raises(InvalidInput, match="need fleet=True"):
        headway.map(len, ["a"], job="ads", slots=2)
    with pytest.raises(InvalidInput, match="which is reserved"):
        TaskQueue().handler("headway.slot")(lambda task, payload: None)
    assert ledger.jobs() == []
    monkeypatch.setenv("HEADWAY_DATABASE", f"sqlite:///{place}/x.db")
    assert "a fleet needs PostgreSQL" in quick_cli("worker", "--burst").stderr


def test_slots_open_a_set_up_and_postpone_items(place: Path, ledger: Ledger, quick_cli: Cli) -> None:
    (place / "later.py").write_text(
        "import os\nimport headway\n"
        "def opens():\n    yield 3\n"
        "def work(item, factor):\n"
        "    if item % 5 == 0 and not os.path.exists(f'seen{item}'):\n"
        "        open(f'seen{item}', 'w').close()\n"
        "        raise headway.RetryLater(0.3, 'quota', scope='job' if item == 0 else 'item')\n"
        "    return item * factor\n"
        "def refuses():\n    raise OSError('no model')\n    yield\n"
    )
    run = ("run", "later:work", "-i", "items.jsonl", "--retries", "0", "--fleet", "--detach", "--slots", "1")
    assert quick_cli(*run, "-j", "ads", "--setup", "later:opens").returncode == 0
    job = ledger.job("ads")
    for _ in range(20):
        if job.info().finished_at is not None:
            break
        quick_cli("worker", "--burst")
    info = job.info()
    assert (info.done, info.dead, info.failures, info.failed) == (30, 0, 0, 0)
    assert {idx: result for _, idx, _, result in job.results()} == {n: str(3 * n) for n in range(30)}
    assert quick_cli(*run, "-j", "bad", "--setup", "later:refuses").returncode == 0
    quick_cli("worker", "--burst")
    bad = ledger.job("bad")
    assert (bad.info().done, bad.info().failures) == (0, 0)
    assert "no model" in (bad.fleet_note() or "")


def test_the_job_goes_on_when_its_starter_ends_and_a_stop_ends_it(
    place: Path, database: str, ledger: Ledger, spawn_cli: Spawn, quick_cli: Cli
) -> None:
    env = {"HEADWAY_DATABASE": database}
    starter = spawn_cli("run", "work:wait", "-i", "items.jsonl", "-j", "ads", "--fleet", "--progress", "plain", env=env)
    eventually(lambda: [info for info in ledger.jobs() if info.held])
    worker = spawn_cli("worker", env=env, stderr=subprocess.DEVNULL)
    eventually(lambda: list(place.glob("begun-*")), timeout=60)
    starter.send_signal(signal.SIGINT)
    _, said = starter.communicate(timeout=60)
    assert starter.returncode == 130
    assert "goes on without this command" in said
    assert ledger.job("ads").info().held
    assert quick_cli("pause", "ads").returncode == 0
    assert quick_cli("stop", "ads").returncode == 0
    (place / "free").touch()
    eventually(lambda: not ledger.job("ads").info().held, timeout=60)
    job = ledger.job("ads")
    assert [run.outcome for run in job.runs()] == ["interrupted"]
    assert job.info().done == len(list(place.glob("begun-*")))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    # What the fleet left, one machine may finish.
    ended = quick_cli("run", "work:wait", "-i", "items.jsonl", "-j", "ads", "--progress", "none")
    assert ended.returncode == 0
    assert (job.info().done, completions(ledger)) == (30, 1)


class EstimatingDisplay:
    """Keep the rate that a display would show first, then let the last item end."""

    live: ClassVar[bool] = False

    def __init__(self, place: Path) -> None:
        self._place, self._estimator = place, Estimator()
        self.first: tuple[RunSnapshot, float | None] | None = None

    def show(self, snapshot: RunSnapshot) -> None:
        self._estimator.update(snapshot)
        if self.first is None:
            self.first = (snapshot, self._estimator.rate)
            (self._place / "free").touch()

    def begin(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def give_way(self, text: str) -> None: ...
    def end(self, snapshot: RunSnapshot) -> None: ...
    def conclude(self, lines: Sequence[str], facts: Mapping[str, object]) -> None: ...


def test_a_process_that_follows_a_run_later_counts_from_the_start_of_the_run(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli, spawn_cli: Spawn
) -> None:
    (place / "headway.toml").write_text("retry_delay = 0.001\n")
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(10)))
    words = ("run", "work:fail_or_wait", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--workers", "2")
    assert quick_cli(*words, "--retries", "1").returncode == 0
    spawn_cli("worker", env={"HEADWAY_DATABASE": database}, stderr=subprocess.DEVNULL)
    job = ledger.job("ads")
    eventually(lambda: (job.info().done, job.info().dead) == (8, 1), timeout=60)
    failures = job.info().failures
    ledger.database.write("UPDATE runs SET started_at = started_at - 1000")
    display = EstimatingDisplay(place)
    ending = follow(ledger, job, 1, display=display, shutdown=Shutdown())
    assert display.first is not None
    shown, rate = display.first
    assert (shown.done, shown.failures, rate) == (8, failures, None)
    assert ending is not None
    assert (ending.done, ending.dead, ending.died, ending.failures) == (9, 1, 1, job.info().failures)
    assert ending.failures >= 2
    assert ending.seconds > 1000


def slots(worker: subprocess.Popen[str]) -> list[int]:
    """Processes of slots of this supervisor: children of its workers."""
    return [pid for child in children(worker.pid) for pid in children(child)]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_all(worker: subprocess.Popen[str]) -> None:
    """A machine loses its power."""
    pids = [worker.pid, *children(worker.pid), *slots(worker)]
    pids += [pid for slot in slots(worker) for pid in children(slot)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def is_told_once(ledger: Ledger, id: str, count: int) -> None:
    """Every item is done once, nothing was charged, the counters are what the rows say, nobody holds anything."""
    job = ledger.job(id)
    found = {
        name: ledger.database.one(f"SELECT {what} AND job = ?", (job.no,))
        for name, what in {
            "rows": "count(*), count(DISTINCT idx), sum(attempts) FROM progress WHERE status = 'done'",
            "others": "count(*) FROM progress WHERE (status <> 'done' OR lease_until IS NOT NULL)",
            "blocks": "count(*) FROM blocks WHERE no > 0",
            "fleets": "count(*) FROM fleets WHERE run > 0",
            "attempts": "count(*) FROM attempts WHERE no > 0",
        }.items()
    }
    assert found == {"rows": (count, count, 0), "others": (0,), "blocks": (0,), "fleets": (0,), "attempts": (0,)}
    info = job.info()
    assert (info.done, info.failed, info.dead, info.failures, info.total) == (count, 0, 0, 0, count)
    assert [run.outcome for run in job.runs()] == ["finished"]
    assert completions(ledger) == 1


def test_the_same_start_again_submits_the_slots_that_a_killed_one_had_not(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    words = ("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--slots", "2")
    assert quick_cli(*words).returncode == 0
    ledger.database.write("DELETE FROM tasks")  # killed after it had given the job to the fleet
    for _ in range(2):
        assert quick_cli(*words).returncode == 0
        assert ledger.database.one("SELECT count(*) FROM tasks") == (2,)


def test_a_slot_that_died_often_comes_back_within_seconds(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    words = ("run", "work:double", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--slots", "2")
    assert quick_cli(*words).returncode == 0
    now = ledger.database.now()
    ledger.database.write("UPDATE tasks SET attempts = 9, ready = 0, run_at = ?", (now + 250.0,))
    assert quick_cli(*words).returncode == 0
    row = ledger.database.one("SELECT count(*), max(run_at) FROM tasks")
    assert row is not None
    assert row[0] == 2
    assert row[1] < now + 60.0


def test_a_start_brings_forward_the_delayed_slots_of_its_own_fleet_only(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    words = ("run", "work:double", "-i", "items.jsonl", "--fleet", "--detach", "--slots", "2")
    for job in ("ads", "books"):
        assert quick_cli(*words, "-j", job).returncode == 0
    later = ledger.database.now() + 250.0
    ledger.database.write("UPDATE tasks SET attempts = 9, ready = 0, run_at = ?", (later,))
    assert quick_cli(*words, "-j", "ads").returncode == 0
    rows = ledger.database.all("SELECT party, run_at < ? FROM tasks", (later,))
    assert sorted((str(party), bool(moved)) for party, moved in rows) == sorted(
        (f"fleet.{ledger.job(job).no}", job == "ads") for job in ("ads", "books") for _ in range(2)
    )


#: `headway`, killed when it has sent as many COMMITs as the first argument says: with the last answered, or not yet sent.
KILLED = """
import os, sys, psycopg
count, answered = int(sys.argv.pop(1)), sys.argv.pop(1) == "answered"
execute = psycopg.Connection.execute

def counted(self, query, *args, **options):
    global count
    count -= query == "COMMIT"
    if query == "COMMIT" and count == 0 and not answered:
        os.kill(os.getpid(), 9)
    done = execute(self, query, *args, **options)
    if query == "COMMIT" and count == 0:
        os.kill(os.getpid(), 9)
    return done

psycopg.Connection.execute = counted
from headway.cli import main
main()
"""


@pytest.mark.faults
def test_a_start_that_is_killed_between_any_two_of_its_commits_is_done_by_the_same_command(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli
) -> None:
    (place / "few.jsonl").write_text("1\n2\n3\n")
    words = ("run", "work:slow", "-i", "few.jsonl", "--fleet", "--detach", "--slots", "1", "-j")
    killed: list[str] = []
    for answered in ("answered", "unanswered"):
        for number in range(1, 40):
            job = f"{answered}-{number}"
            command = [sys.executable, "-c", KILLED, str(number), answered, *words, job]
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=60)
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            killed.append(job)
            again = quick_cli(*words, job)
            assert again.returncode == 0, (job, again.stderr)
    assert len(killed) >= 10  # it has so many steps
    assert quick_cli("worker", "--burst").returncode == 0
    for job in killed:
        info = ledger.job(job).info()
        assert (info.status, info.done, info.failures, info.held) == ("completed", 3, 0, False), job
    jobs = len(ledger.jobs())
    assert jobs in (len(killed) + 1, len(killed) + 2)
    assert completions(ledger) == jobs
    for table in ("blocks", "fleets"):
        assert ledger.database.one(f"SELECT count(*) FROM {table}") == (0,)


@pytest.mark.parametrize("mode", ["process", pytest.param("thread", marks=pytest.mark.faults)])
def test_an_item_that_kills_its_slot_becomes_a_dead_letter_and_costs_no_other_item_anything(
    place: Path, database: str, ledger: Ledger, quick_cli: Cli, spawn_cli: Spawn, mode: str
) -> None:
    words = ("run", "work:kill_slot", "-i", "items.jsonl", "-j", "ads", "--fleet", "--detach", "--mode", mode)
    assert quick_cli(*words, "--workers", "3", "--retries", "0").returncode == 0
    spawn_cli("worker", "--workers", "3", env={"HEADWAY_DATABASE": database}, stderr=subprocess.DEVNULL)
    job = ledger.job("ads")
    eventually(lambda: job.info().finished_at, timeout=90)
    info = job.info()
    assert (info.done, info.dead, info.failures, completions(ledger)) == (29, 1, 2, 1)
    (cause,) = job.causes()
    assert (cause.type, cause.dead) == ("ProcessLost", 1)
    assert [attempt.outcome for attempt in job.history(7)] == ["lost"] * 2  # its only try and the last pass


def test_a_machine_dies_postgresql_restarts_and_redis_is_wiped_and_each_item_is_recorded_once(
    place: Path,
    postgres_factory: Callable[..., PostgresServer],
    redis_server: RedisServer,
    spawn_cli: Spawn,
) -> None:
    """Two process groups act as two machines."""
    count = 500
    (place / "many.jsonl").write_text("".join(f"{n}\n" for n in range(count)))
    server = postgres_factory()
    url = server.url(server.create_database(with_tables=True))
    redis = redis_server.url()
    env = {"HEADWAY_DATABASE": url, "HEADWAY_REDIS": redis, "HEADWAY_QUEUE_REDIS": redis}
    machines = [spawn_cli("worker", "--workers", "2", env=env, stderr=subprocess.DEVNULL) for _ in range(2)]
    starter = spawn_cli("run", "work:slow", "-i", "many.jsonl", "-j", "ads", "--fleet", env=env)
    with Ledger.open(url) as ledger:

        def done() -> int:
            return next((info.done for info in ledger.jobs()), 0)

        eventually(lambda: done() > 50 and all(map(slots, machines)), timeout=60)
        kill_all(machines[0])
        starter.kill()
        server.restart(immediate=True)
        redis_server.make_pristine()
        before = eventually(done, timeout=30)
        assert before < count
        eventually(lambda: ledger.job("ads").info().finished_at is not None, timeout=60)
        is_told_once(ledger, "ads", count)
        assert len(list(place.glob("ran-*"))) == count


@pytest.mark.faults
def test_killed_frozen_restarted_and_flushed_nothing_is_lost_or_counted_twice(
    place: Path,
    postgres_factory: Callable[..., PostgresServer],
    redis_factory: Callable[..., RedisServer],
    quick_cli: Cli,
    spawn_cli: Spawn,
) -> None:
    count = 3000
    (place / "many.jsonl").write_text("".join(f"{n}\n" for n in range(count)))
    server, redis = postgres_factory(), redis_factory()
    url = server.url(server.create_database(with_tables=True))
    env = {"HEADWAY_DATABASE": url, "HEADWAY_REDIS": redis.url(), "HEADWAY_QUEUE_REDIS": redis.url()}

    def machine() -> subprocess.Popen[str]:
        return spawn_cli("worker", "--workers", "2", env=env, stderr=subprocess.DEVNULL)

    first, second = machine(), machine()
    words = ("run", "work:slow", "-i", "many.jsonl", "-j", "ads", "--fleet")
    starter = spawn_cli(*words, env=env, stderr=subprocess.DEVNULL)
    with Ledger.open(url) as ledger:

        def done() -> int:
            return next((info.done for info in ledger.jobs()), 0)

        eventually(lambda: done() > 100, timeout=120)
        starter.kill()
        elsewhere = spawn_cli(*words, env=env, stderr=subprocess.DEVNULL)
        kill_all(first)
        at = done()
        eventually(lambda: done() > at + 300, timeout=120)
        server.restart(immediate=True)
        at = eventually(done, timeout=60)
        eventually(lambda: done() > at + 200, timeout=120)
        redis.make_pristine()
        first = machine()
        frozen = eventually(lambda: slots(second), timeout=60)[0]
        os.kill(frozen, signal.SIGSTOP)
        eventually(lambda: ledger.job("ads").info().finished_at is not None, timeout=300)
        os.kill(frozen, signal.SIGCONT)
        assert elsewhere.wait(60) == 0  # who follows it from elsewhere sees its end, through all of that
        is_told_once(ledger, "ads", count)
        assert len(list(place.glob("ran-*"))) == count
        for worker in (first, second):
            worker.send_signal(signal.SIGTERM)
        for worker in (first, second):
            worker.wait(60)
        is_told_once(ledger, "ads", count)  # also after the one that was frozen has said what it had to say

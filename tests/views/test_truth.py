"""Every figure that people read agrees with the store, with real processes that are paused, killed, resumed and shared.

Counts move while they are read: a figure is right if it lies between the store before and the store after.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from headway._sql import Database, connect
from headway.alerts import Evaluator, Rules
from headway.config import Config
from headway.ledger import Ledger
from headway.queue.task_queue import TaskQueue
from headway.views.failed import read_all_causes
from headway.views.jobs.job import JobSheet
from headway.views.jobs.series import read_queue_series
from headway.views.overview import JobLine, outlook, read_causes, read_job_detail, read_job_page, read_rate
from headway.views.queue import read_queues, read_workers
from headway.views.reading import Reader
from tests.services.waiting import eventually

APP = """
import time
from headway.queue.task_queue import TaskQueue

def work(item):
    time.sleep(0.1)
    if item["n"] % 50 == 49:
        raise ValueError(f"bad item {item['n']}")

queue = TaskQueue("DATABASE")

@queue.handler("nap", timeout=30)
def nap(task, payload):
    time.sleep(payload)
"""


class Stage:
    """A database with real processes that work on it."""

    def __init__(self, directory: Path, url: str, stack: ExitStack) -> None:
        self.directory, self.url, self._stack = directory, url, stack
        (directory / "truth_app.py").write_text(APP.replace("DATABASE", url))
        self.database: Database = stack.enter_context(connect(url))
        self.reader = Reader(_config(url))
        stack.callback(self.reader.close)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command in a session of its own; whatever it starts ends with the test."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *words], cwd=self.directory, start_new_session=True,
            env={**environment, "HEADWAY_DATABASE": self.url, "PYTHONPATH": str(self.directory)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._stack.callback(_kill, process)
        return process

    def run(self, items: int, *words: str) -> subprocess.Popen[bytes]:
        """Start or continue the job `truth`."""
        text = "".join(json.dumps({"n": number}) + "\n" for number in range(items))
        (self.directory / "items.jsonl").write_text(text)
        options = ("--job", "truth", "--retries", "0", "--no-last-pass", "--progress", "none", *words)
        return self.start("run", "truth_app:work", "--items", "items.jsonl", *options)

    # ---- the store's own words -----------------------------------------------------------------------------------

    def count(self, sql: str, *values: str) -> int:
        row = self.database.one(sql, values)
        assert row is not None
        return int(row[0])

    def done(self) -> int:
        return self.count("SELECT count(*) FROM progress WHERE status = 'done'")

    def dead(self) -> int:
        return self.count("SELECT count(*) FROM dead_letters")

    # ---- what people read ----------------------------------------------------------------------------------------

    def sheet(self) -> JobSheet:
        return self.reader.job("truth")

    def line(self) -> JobLine:
        [line] = read_job_page(self.database).lines
        return line

    def status(self) -> str:
        """Return the job's state, which is the same wherever it is shown."""
        sheet, [listed] = self.sheet(), self.reader.jobs().jobs
        detail = read_job_detail(Ledger(self.database).job("truth"))
        words = {sheet.job.status, listed.status, self.line().job.status, detail.sheet.job.status}
        assert len(words) == 1, words
        return words.pop()


def _config(url: str) -> Config:
    return Config(cli={"database": url})


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Callable[[str], Stage]]:
    with ExitStack() as stack:
        yield lambda url: Stage(tmp_path, url, stack)


@pytest.fixture
def stage(on: Callable[[str], Stage], tmp_path: Path) -> Stage:
    return on(f"sqlite:///{tmp_path}/truth.db")


def agrees(stage: Stage) -> JobSheet:
    """Compare every count of the job with the rows before and after."""
    before = stage.done(), stage.dead()
    sheet, line = stage.sheet(), stage.line()
    detail = read_job_detail(Ledger(stage.database).job("truth"))
    after = stage.done(), stage.dead()
    for job in (sheet.job, line.job, detail.sheet.job, detail.line.job):
        assert before[0] <= job.done <= after[0]
        assert before[1] <= job.dead <= after[1]
        assert job.pending + job.retrying + job.done + job.dead == job.total
        assert job.percent == pytest.approx(100 * job.done / job.total, abs=0.01)
    fleet = bool(sheet.runs[-1].settings.get("fleet"))  # its slots add their counts to the minutes later
    assert fleet or before[0] <= detail.series.done
    assert detail.series.done <= after[0]
    return sheet


def test_a_job_in_threads_is_told_as_it_is_while_it_runs_pauses_dies_and_goes_on(stage: Stage):
    run = stage.run(3000, "--mode", "thread", "--workers", "4")
    eventually(lambda: stage.done() >= 60)
    sheet = agrees(stage)
    assert stage.status() == "processing"
    # Four threads sleep 0.1 s per item. Items this short are never noted as running.
    assert 2 <= sheet.running <= 4
    began = sheet.runs[-1].started_at.timestamp()
    assert sheet.rate == pytest.approx(stage.done() / (stage.database.now() - began), rel=0.25)
    assert sheet.rate is not None
    assert sheet.eta_seconds is not None
    assert sheet.eta_low_seconds is not None
    assert sheet.eta_high_seconds is not None
    left = sheet.job.pending + sheet.job.retrying
    assert sheet.eta_seconds == pytest.approx(left / sheet.rate, rel=0.01)
    assert sheet.eta_low_seconds <= sheet.eta_seconds <= sheet.eta_high_seconds
    assert stage.line().rate == pytest.approx(sheet.rate, rel=0.25)
    assert read_rate(stage.database) == pytest.approx(sheet.rate, rel=0.25)

    job = Ledger(stage.database).job("truth")
    job.pause(actor="ana", reason="backup")
    assert stage.status() == "paused"
    sheet = stage.sheet()
    assert (sheet.paused_by, sheet.rate, sheet.eta_seconds) == ("ana", None, None)
    assert (stage.line().rate, read_rate(stage.database)) == (None, None)
    quiet = _when_still(stage)
    assert stage.sheet().running == 0
    job.resume()
    eventually(lambda: stage.done() > quiet)
    assert stage.status() == "processing"

    _kill(run)
    at = stage.database.now()
    assert stage.status() == "interrupted"
    sheet = agrees(stage)
    assert (sheet.running, sheet.rate, sheet.eta_seconds, read_rate(stage.database)) == (0, None, None, None)
    [lost] = sheet.runs
    assert (lost.outcome, lost.why) == ("lost", "Its process died.")
    assert lost.ended_at is not None
    assert at - 2 <= lost.ended_at.timestamp() <= at
    last = stage.line().run
    assert last is not None
    assert last.outcome == "lost"

    stage.run(3000, "--mode", "thread", "--workers", "4")
    kept = stage.done()
    eventually(lambda: stage.done() >= kept + 30)
    sheet = agrees(stage)
    assert sheet.kept == kept
    assert sheet.runs[0].ended_at == lost.ended_at  # what it took no longer grows
    began = sheet.runs[-1].started_at.timestamp()
    assert sheet.rate == pytest.approx((stage.done() - kept) / (stage.database.now() - began), rel=0.35)
    job.stop(actor="ana", reason="enough for today")
    eventually(lambda: stage.status() == "interrupted")
    assert stage.sheet().runs[-1].why == "Stopped by ana: enough for today."


def _when_still(stage: Stage, seconds: float = 0.4) -> int:
    """Wait until nothing was done for some time; return the number of done items."""
    seen, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal seen, since
        if (now := stage.done()) != seen:
            seen, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    eventually(still)
    return seen


def test_causes_and_dead_letters_have_one_number_everywhere(stage: Stage):
    run = stage.run(120, "--mode", "thread", "--workers", "4", "--max-failures", "2")
    run.wait(20)
    sheet = agrees(stage)
    assert sheet.job.dead == stage.dead() == 2
    assert sheet.runs[-1].why == "Too many items failed permanently (--max-failures 2)."
    causes = [cause for cause in sheet.causes if cause.dead]
    everywhere = read_causes(stage.database)
    assert len(causes) == len(everywhere) == len(stage.reader.dead().causes) == 1
    assert sum(cause.dead for cause in causes) == 2
    grouped = read_all_causes(stage.database)
    assert (grouped.total, grouped.dead) == (1, 2)
    assert [(one.job, one.dead) for one in grouped.causes[0].jobs] == [("truth", 2)]


def test_a_fleet_is_told_as_it_is_while_a_machine_joins_and_dies(on: Callable[[str], Stage], postgres_url: str):
    stage = on(postgres_url)
    workers = stage.start("worker", "--app", "truth_app:queue", "--workers", "2")
    eventually(lambda: stage.reader.queues().workers_online == 2)
    stage.run(1500, "--fleet", "--slots", "2")
    eventually(lambda: stage.done() >= 20)
    sheet = agrees(stage)
    assert stage.status() == "processing"
    assert 1 <= sheet.running <= 2
    began = sheet.runs[-1].started_at.timestamp()
    assert sheet.rate == pytest.approx(stage.done() / (stage.database.now() - began), rel=0.5)
    Ledger(stage.database).job("truth").pause(actor="ana")
    assert stage.status() == "paused"
    _kill_workers(stage, workers)
    assert stage.reader.queues().workers_online == 0
    assert {worker.state for worker in read_workers(TaskQueue(stage.database)).workers} == {"lost"}
    eventually(lambda: stage.sheet().running == 0)


def test_queues_and_workers_are_counted_from_rows_and_heartbeats(stage: Stage):
    with TaskQueue(stage.database) as queue:
        queue.handler("nap")(lambda task, payload: None)
        supervisor = stage.start("worker", "--app", "truth_app:queue", "--workers", "3", "--queues", "urgent,normal")
        eventually(lambda: stage.reader.queues().workers_online == 3)
        for _ in range(30):
            queue.submit("nap", 0.1, role="admin", priority="normal")
        queue.submit("nap", 60, role="admin", priority="urgent")
        _submit_many(queue, 1200, "low")
        eventually(lambda: stage.count("SELECT count(*) FROM tasks WHERE status = 'COMPLETED'") == 30)
        queues = {view.queue: view for view in read_queues(queue).queues}
        for name, view in queues.items():
            for field, status in (("running", "RUNNING"), ("completed", "COMPLETED"), ("failed", "FAILED")):
                sql = "SELECT count(*) FROM tasks WHERE queue = ? AND status = ?"
                assert getattr(view, field) == stage.count(sql, name, status), (name, field)
            sql = "SELECT count(*) FROM tasks WHERE queue = ? AND status = 'QUEUED' AND ready = 1"
            assert view.waiting == stage.count(sql, name)
        assert {name: view.workers for name, view in queues.items()} == {"urgent": 3, "high": 0, "normal": 3, "low": 0}
        flows = read_queue_series(stage.database)
        kinds = {name: outlook(view, *flows[name]).kind for name, view in queues.items()}
        assert (kinds["low"], kinds["normal"], kinds["urgent"]) == ("unserved", "empty", "empty")
        assert read_rate(stage.database) is not None

        # The supervisor and all its workers are killed: none of them can say so.
        _kill_workers(stage, supervisor)
        workers = read_workers(queue).workers
        assert [worker.state for worker in workers] == ["lost"] * 3
        found = stage.reader.queues()
        assert (found.workers_online, {view.workers for view in found.queues}) == (0, {0})
        backlog = Evaluator(stage.database, lambda: Rules(limits={"backlog": 1000.0}, open_after=0.0))
        backlog.tick()
        [alert] = [alert for alert in stage.reader.alerts().alerts if alert.rule == "backlog"]
        assert (alert.text, alert.label) == ("1,200 tasks wait in the queue low.", "Backlog")


def _kill_workers(stage: Stage, supervisor: subprocess.Popen[bytes]) -> None:
    """Kill a supervisor with its workers, which are in sessions of their own."""
    pids = [int(pid) for (pid,) in stage.database.all("SELECT pid FROM task_workers")]
    _kill(supervisor)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def _submit_many(queue: TaskQueue, count: int, priority: str) -> None:
    queue.submit_many([{"kind": "nap", "payload": 0, "role": "admin", "priority": priority} for _ in range(count)])


def test_only_the_alerts_judge_what_is_stalled(stage: Stage):
    run = stage.run(300, "--mode", "thread", "--workers", "1")
    eventually(lambda: stage.done() >= 3)
    os.killpg(run.pid, signal.SIGSTOP)
    assert (stage.sheet().stalled, stage.line().stalled) == (None, None)
    evaluator = Evaluator(stage.database, lambda: Rules(limits={"stalled_job": 0.2}, open_after=0.0))
    eventually(lambda: evaluator.tick() and stage.sheet().stalled)
    told = stage.sheet().stalled
    assert told is not None
    assert "truth" in told
    assert stage.line().stalled == told
    [alert] = stage.reader.alerts().alerts
    assert alert.label == "Job stalled"

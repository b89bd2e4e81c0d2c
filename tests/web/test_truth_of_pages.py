"""Every figure of the pages and of the live updates agrees with the store, with real processes that pause, die and resume.

`tests/views/test_truth.py` compares the documents; here the rendered pages are read.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from headway.alerts import Evaluator, Rules
from headway.ledger import Ledger
from headway.queue.task_queue import TaskQueue
from headway.web.live.updates import Look
from tests.services.waiting import eventually
from tests.views.test_truth import Stage as Processes
from tests.web.stage import Stage


class Shown:
    """The pages of an installation on which real processes work."""

    def __init__(self, work: Processes, client: TestClient) -> None:
        self.work, self._client = work, client
        self._look = Look(work.reader)

    def text(self, path: str) -> str:
        """Return the text of a page's content."""
        answer = self._client.get(path)
        assert answer.status_code == 200, path
        main = answer.text.partition("<main")[2].partition("</main>")[0]
        return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", main)))

    def figures(self, path: str) -> dict[str, int]:
        """Return the numbers of a page that are updated live, by their path in the live state."""
        html = self._client.get(path).text
        found = re.findall(r'data-v="([^"]+)">([\d,]+)<', html)
        return {name: int(text.replace(",", "")) for name, text in found}

    def live(self, section: str, id: str) -> dict[str, object]:
        """Return an entry of a live snapshot."""
        found: dict[str, object] = self._look(everybody=True, users=())[0][section][id]
        return found


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    url = f"sqlite:///{tmp_path}/truth.db"
    with ExitStack() as stack:
        work = Processes(tmp_path, url, stack)
        stage = Stage(url)
        stack.callback(stage.site.close)
        yield Shown(work, stack.enter_context(TestClient(stage.app())))


JOB_PAGES = ("/", "/jobs", "/jobs/truth")


def counts_agree(shown: Shown) -> None:
    """Compare the counts of the job on every page with the rows before and after."""
    for path in JOB_PAGES:
        before = shown.work.done(), shown.work.dead()
        figures = shown.figures(path)
        after = shown.work.done(), shown.work.dead()
        assert before[0] <= figures["jobs/truth/done"] <= after[0], path
        assert before[1] <= figures["jobs/truth/dead"] <= after[1], path
    before = shown.work.done(), shown.work.dead()
    job = shown.live("jobs", "truth")
    assert before[0] <= int(str(job["done"])) <= shown.work.done()
    assert before[1] <= int(str(job["dead"])) <= shown.work.dead()


def rate_on(shown: Shown, path: str) -> float:
    """Return the first rate on a page, in items per second."""
    found = re.search(r"([\d.,]+)/(s|min|h)\b", shown.text(path))
    assert found is not None, shown.text(path)[:600]
    return float(found[1].replace(",", "")) / {"s": 1, "min": 60, "h": 3600}[found[2]]


def test_the_pages_of_a_job_are_true_while_it_runs_pauses_dies_and_resumes(shown: Shown):
    work = shown.work
    run = work.run(3000, "--mode", "thread", "--workers", "4")
    eventually(lambda: work.done() >= 60)
    counts_agree(shown)
    began = work.sheet().runs[-1].started_at.timestamp()

    def pace() -> float:
        return work.done() / (work.database.now() - began)

    for path in JOB_PAGES:
        assert "processing" in shown.text(path), path
        assert rate_on(shown, path) == pytest.approx(pace(), rel=0.3), path
    live = shown.live("jobs", "truth")
    assert live["status"] == "processing"
    assert float(str(live["rate"])) == pytest.approx(pace(), rel=0.3)
    left = 3000 - work.done() - work.dead()
    assert float(str(live["eta_seconds"])) == pytest.approx(left / float(str(live["rate"])), rel=0.05)
    assert re.search(r"processing [2-4] ", shown.text("/jobs/truth")), "threads that sleep are processing items"

    job = Ledger(work.database).job("truth")
    job.pause(actor="ana", reason="backup")
    still = eventually(lambda: work.sheet().running == 0 and work.done())
    for path in JOB_PAGES:
        text = shown.text(path)
        assert "paused" in text, path
        assert not re.search(r"\d/(s|min)\b", text), path
    assert "1 job paused; nothing is running." in shown.text("/")
    assert "Paused by ana" in shown.text("/jobs/truth")
    live = shown.live("jobs", "truth")
    assert (live["status"], live["rate"], live["eta_seconds"]) == ("paused", None, None)
    job.resume()
    eventually(lambda: work.done() > still)

    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    counts_agree(shown)
    assert "Nothing is running." in shown.text("/")
    assert "Run lost" in shown.text("/")
    assert "Its process died." in shown.text("/jobs/truth")
    live = shown.live("jobs", "truth")
    assert (live["status"], live["rate"], live["eta_seconds"], live["holder"]) == ("interrupted", None, None, None)

    work.run(3000, "--mode", "thread", "--workers", "4")
    kept = work.done()
    eventually(lambda: work.done() >= kept + 30)
    counts_agree(shown)
    for path in JOB_PAGES:
        assert re.search(rf"\b{kept:,} (of them )?kept from before", shown.text(path)), path
    job.stop(actor="ana", reason="enough for today")
    eventually(lambda: work.status() == "interrupted")
    assert "Stopped by ana: enough for today." in shown.text("/jobs/truth")


def headline(shown: Shown, path: str) -> str:
    html = shown._client.get(path).text
    return unescape(re.sub(r"<[^>]*>", "", html.partition("<h1")[2].partition("</h1>")[0].partition(">")[2]))


def test_the_pages_of_queues_workers_and_alerts_are_true_also_when_a_supervisor_dies(shown: Shown):
    work = shown.work
    with TaskQueue(work.database) as queue:
        queue.handler("nap")(lambda task, payload: None)
        supervisor = work.start("worker", "--app", "truth_app:queue", "--workers", "3", "--queues", "urgent,normal")
        eventually(lambda: work.reader.queues().workers_online == 3)
        queue.submit("nap", 8, role="admin", priority="urgent")
        queue.submit_many([{"kind": "nap", "payload": 0, "role": "admin", "priority": "low"} for _ in range(1200)])
        eventually(lambda: work.count("SELECT count(*) FROM tasks WHERE status = 'RUNNING'") == 1)
        for path in ("/", "/queues"):
            figures = shown.figures(path)
            for name in ("urgent", "high", "normal", "low"):
                for field, sql in (("waiting", "status = 'QUEUED' AND ready = 1"), ("running", "status = 'RUNNING'")):
                    counted = work.count(f"SELECT count(*) FROM tasks WHERE queue = ? AND {sql}", name)
                    assert figures[f"queues/{name}/{field}"] == counted, (path, name, field)
                    assert shown.live("queues", name)[field] == counted
        assert "no worker" in shown.text("/queues")
        assert headline(shown, "/queues/low") == "low: 1,200 tasks waiting"
        assert "0 running; 0 workers online for it." in shown.text("/queues/low")
        assert "1 running; 3 workers online for it." in shown.text("/queues/urgent")
        assert headline(shown, "/workers") == "All 3 workers are online"

        # Only the supervisor is killed. Its workers exit, and no one started them again: they are lost.
        os.kill(supervisor.pid, signal.SIGKILL)
        eventually(lambda: work.reader.queues().workers_online == 0, timeout=90)
        assert {worker.state for worker in work.reader.workers().workers} == {"lost"}
        assert headline(shown, "/workers") == "3 workers lost, 0 online"
        assert {str(shown.live("workers", one.name)["state"]) for one in work.reader.workers().workers} == {"lost"}
        limits = {"backlog": 1000.0, "worker_lost": 0.1}
        Evaluator(work.database, lambda: Rules(limits=limits, open_after=0.0)).tick()
        assert len([one for one in work.reader.alerts().alerts if one.rule == "worker_lost"]) == 3
        assert "1,200 tasks wait in the queue low." in shown.text("/alerts")
        assert "No worker" in shown.text("/")

"""What can be changed: by forms as by the API, under somebody's name, with what it did said afterwards."""

from __future__ import annotations

import html
import re
import time
from pathlib import Path
from typing import Any

import pytest

from headway._sql import connect
from headway.config import Config
from headway.errors import InvalidInput, NotFound, Refused
from headway.ledger import Done, Failed, Failure, Hold, Later, NewItem
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.views.overview import read_job_page
from headway.views.reading import Reader
from headway.web.api import actions, bulk
from headway.web.api.problems import Forbidden
from headway.web.auth.identity import Access
from headway.web.site import Flash, Site, User
from tests.services.waiting import eventually
from tests.web.conftest import Web
from tests.web.test_auth import log_in

ADMIN, OPERATOR, VIEWER = User("ada", "admin"), User("olga", "operator"), User("vera", "viewer")


@pytest.fixture
def reader(database: str):
    with Reader(Config(cli={"database": database})) as opened:
        yield opened


def last(reader: Reader) -> tuple[str, str, dict[str, Any]]:
    newest = reader.activity(limit=1).activity[0]
    return newest.actor, newest.action, dict(newest.detail)


# ---- each action ----------------------------------------------------------------------------------------------------


def test_one_cause_is_retried_and_nothing_else(reader: Reader):
    acted = actions.retry_dead(reader, OPERATOR, "ads", cause=2, reason="the parser is repaired")
    assert (acted.text.partition(". ")[0], acted.touched) == ("2 dead letters of job ads pending again", 2)
    assert [cause.dead for cause in reader.dead("ads").causes] == [4]
    actor, action, detail = last(reader)
    assert (actor, action, detail["cause"], detail["reason"]) == ("olga", "retry", 2, "the parser is repaired")


def finished(reader: Reader, id: str, command: str = "headway run ads:make --items items.jsonl") -> None:
    """A job whose only run has finished, with one dead letter."""
    job = reader.ledger.create(id, max_retries=0)
    reader.ledger.describe(job, function="ads:make", source="", command=command, keyed_by=None, max_retries=0)
    job.register([NewItem(idx, "1") for idx in range(3)])
    job.seal("digest", settle=False)
    hold = reader.ledger.hold(job, {})
    job.record([Done(0), Done(1), Failed(2, Failure("ValueError", "bad", "ads.py:make"))], hold=hold)
    job.finish(hold)
    reader.ledger.release(hold, "finished")
    assert reader.job(id).job.status == "completed"


def test_a_finished_job_that_is_retried_needs_a_run_and_the_answer_has_its_command(reader: Reader):
    finished(reader, "one")
    acted = actions.retry_dead(reader, OPERATOR, "one", items=[2])
    command = "headway run ads:make --items items.jsonl"
    assert acted.text == f"1 dead letter of job one pending again. Job one needs a run:  {command}"
    assert acted.command == command
    assert reader.job("one").job.status == "needs a run"
    assert [job.status for job in reader.jobs().jobs if job.id == "one"] == ["needs a run"]
    assert [line.job.id for line in read_job_page(reader.database, status="needs a run").lines] == ["one"]
    assert actions.retry_dead(reader, OPERATOR, "one").text == "0 dead letters of job one pending again."
    job = reader.ledger.job("one")
    hold = reader.ledger.hold(job, {})
    assert reader.job("one").job.status == "processing"
    reader.ledger.release(hold, "interrupted")
    assert reader.job("one").job.status == "interrupted"


def test_the_page_of_a_job_that_needs_a_run_says_so_and_shows_the_command(fresh: Web, reader: Reader):
    finished(reader, "one", command="headway run ads:make --items 'one.jsonl'")
    answer = fresh.post("/api/v1/jobs/one/retry", {}, token="operator").json
    assert answer["command"] == "headway run ads:make --items 'one.jsonl'"
    page = html.unescape(fresh.ask("/jobs/one", token="viewer").text)
    head = page.partition("Timeline")[0]
    assert "needs a run" in head
    assert "1 item is pending again" in head
    assert answer["command"] in head
    assert "goes on where it stood" not in page
    assert "needs a run" in fresh.ask("/jobs?state=needs+a+run", token="viewer").text


def test_the_page_of_a_job_shows_until_when_it_waits_and_why(fresh: Web, reader: Reader):
    job = reader.ledger.create("calls")
    job.register([NewItem(idx, "1") for idx in range(3)])
    job.seal("digest", settle=False)
    hold = reader.ledger.hold(job, {})
    job.record([Later(0, 600.0, "quota <used>", 1)], hold=hold)
    page = html.unescape(fresh.ask("/jobs/calls", token="viewer").text)
    assert "1 item postponed; the first runs again at" in page
    assert "“quota <used>”" in page
    job.record([Later(1, 900.0, "the API is closed", 2, whole_job=True)], hold=hold)
    page = html.unescape(fresh.ask("/jobs/calls", token="viewer").text)
    assert "Nothing starts until" in page
    assert "“the API is closed”" in page
    reader.ledger.release(hold, "interrupted")


def test_retrying_everything_names_the_jobs_that_need_a_run(reader: Reader):
    for number in range(7):
        finished(reader, f"job-{number}")
    acted = bulk.retry_jobs(reader, OPERATOR)
    assert "8 jobs need a run: " in acted.text
    assert "and 3 more" in acted.text
    finished(reader, "alone")
    acted = bulk.retry_jobs(reader, OPERATOR)
    assert acted.text.endswith("Job alone needs a run:  headway run ads:make --items items.jsonl")


def test_a_retried_task_that_no_worker_takes_says_how_to_start_one(reader: Reader):
    actions.cancel_task(reader, OPERATOR, "t-anna")
    acted = actions.retry_task(reader, OPERATOR, "t-failed")
    assert acted.text == "Task t-failed requeued in normal. No worker is online. Start one:  headway worker"
    assert acted.command == "headway worker"


def test_items_are_retried_by_key_or_index_and_one_that_is_not_dead_stops_all(reader: Reader):
    with pytest.raises(InvalidInput, match="sku-3 of job ads is not dead"):
        actions.retry_dead(reader, OPERATOR, "ads", items=["44", "sku-3"])
    assert actions.retry_dead(reader, OPERATOR, "ads", items=["44", "sku-45"]).touched == 2
    with pytest.raises(InvalidInput, match="cannot be combined"):
        actions.retry_dead(reader, OPERATOR, "ads", items=["40"], cause=1)


@pytest.mark.req("S2-41")
def test_a_queue_is_paused_with_a_reason_and_for_a_time_and_resumed(reader: Reader):
    actions.pause(reader, OPERATOR, "low", reason="upgrade  of\nthe model", seconds=3600)
    low = reader.queues().queues[3]
    assert (low.paused, low.paused_by, low.reason) == (True, "olga", "upgrade of the model")
    assert low.paused_until is not None
    assert last(reader)[:2] == ("olga", "queue.pause")
    assert actions.resume(reader, OPERATOR, "low").touched == 1
    assert actions.resume(reader, OPERATOR, "low").text == "The queue low was not paused."
    assert last(reader)[:2] == ("olga", "queue.resume")


def test_a_failed_task_gets_another_life_and_a_waiting_one_is_cancelled(reader: Reader):
    assert actions.cancel_task(reader, OPERATOR, "t-anna", reason="not needed").text == "Task t-anna is CANCELLED."
    assert actions.cancel_task(reader, OPERATOR, "t-anna").text.endswith("nothing was changed.")
    assert actions.retry_task(reader, OPERATOR, "t-failed").text.startswith("Task t-failed requeued in normal.")
    assert last(reader) == ("olga", "task.retry", {"task": "t-failed", "kind": "caption", "reason": ""})


@pytest.mark.req("S2-41")
def test_a_worker_is_told_to_end_and_one_that_has_ended_is_not(reader: Reader, database: str):
    [ended] = reader.workers().workers
    with pytest.raises(InvalidInput, match="is ended"):
        actions.end_worker(reader, OPERATOR, ended.name, "drain")
    with TaskQueue(database) as queue:
        queue.database.write("UPDATE task_workers SET state = 'idle', ended_at = NULL, seen_at = ?", (time.time(),))
    assert actions.end_worker(reader, OPERATOR, ended.name, "drain").text.endswith("finish its current tasks and exit.")
    assert reader.workers().workers[0].wanted == "drain"
    with pytest.raises(NotFound):
        actions.end_worker(reader, OPERATOR, "nobody", "stop")


@pytest.mark.req("S2-41")
def test_a_lost_worker_is_taken_off_the_list_and_one_that_works_is_not(reader: Reader):
    [worker] = reader.workers().workers
    living = "UPDATE task_workers SET state = 'idle', owner = '{}', ended_at = NULL, seen_at = ?"
    reader.database.write(living, (time.time(),))
    with pytest.raises(InvalidInput, match="has not ended"):
        actions.remove_worker(reader, OPERATOR, worker.name)
    reader.database.write("UPDATE task_workers SET state = 'lost', ended_at = seen_at")
    acted = actions.remove_worker(reader, OPERATOR, worker.name, reason="replaced")
    assert acted.text == f"Removed worker {worker.name} from the list."
    assert last(reader) == ("olga", "worker.remove", {"worker": worker.name, "state": "lost", "reason": "replaced"})
    assert reader.workers().workers == ()
    with pytest.raises(NotFound):
        actions.remove_worker(reader, OPERATOR, worker.name)


def test_a_worker_of_which_nothing_was_heard_is_lost_also_while_nobody_is_there_to_mark_it(reader: Reader):
    """The last one that was there to mark it was itself."""
    [worker] = reader.workers().workers
    silent = "UPDATE task_workers SET state = 'idle', owner = '{}', ended_at = NULL, seen_at = ?"
    for seconds, state in ((1, "idle"), (60, "lost")):
        reader.database.write(silent, (time.time() - seconds,))
        assert reader.workers().workers[0].state == state
    actions.remove_worker(reader, OPERATOR, worker.name)
    assert last(reader)[2]["state"] == "lost"


def test_the_list_of_workers_has_the_tasks_of_this_moment_and_not_of_the_last_heartbeat(reader: Reader):
    database = reader.database
    [worker] = reader.workers().workers
    sign = "UPDATE task_workers SET state = 'idle', task = ?, owner = '{}', ended_at = NULL, seen_at = ?"
    database.write(sign, (None, time.time()))
    database.write("UPDATE tasks SET status = 'RUNNING', worker = ? WHERE id = 't-anna'", (worker.name,))
    [shown] = reader.workers().workers
    assert (shown.state, shown.task) == ("busy", "t-anna")
    database.write(sign, (None, time.time() - 60))
    [shown] = reader.workers().workers
    assert (shown.state, shown.task) == ("lost", "t-anna")
    database.write(sign, ("t-anna", time.time() - 60))
    database.write("UPDATE tasks SET status = 'QUEUED', worker = NULL WHERE id = 't-anna'")
    [shown] = reader.workers().workers
    assert (shown.state, shown.task) == ("lost", "t-anna"), "what it held when it died"
    database.write(
        "UPDATE tasks SET status = 'COMPLETED', ended_at = 1, worker = ? WHERE id = 't-anna'", (worker.name,)
    )
    [shown] = reader.workers().workers
    assert (shown.state, shown.task) == ("lost", None), "it ended the task itself after its last heartbeat"


def test_a_worker_that_was_taken_off_the_list_and_lives_is_back_with_its_next_sign_of_life(
    reader: Reader, database: str
):
    with TaskQueue(database) as queue:
        worker = Worker(queue)

        def look(task: object, payload: object) -> None:
            reader.database.write("UPDATE task_workers SET state = 'lost', ended_at = seen_at WHERE ended_at IS NULL")
            actions.remove_worker(reader, OPERATOR, worker.name)
            eventually(lambda: worker.name in [one.name for one in reader.workers().workers if one.state == "busy"])

        queue.handler("look", isolation="none", retries=0)(look)
        task = queue.submit("look", None)
        worker.run(burst=True)
        assert queue.get(task.id).status == "COMPLETED"


def test_a_job_is_forgotten_by_an_admin_alone(reader: Reader):
    with pytest.raises(Forbidden):
        actions.forget(reader, OPERATOR, "ads")
    assert actions.forget(reader, ADMIN, "ads", reason="it was a trial").touched == 60
    actor, action, detail = last(reader)
    assert (actor, action, detail["reason"]) == ("ada", "forget", "it was a trial")


@pytest.fixture
def run(reader: Reader) -> Hold:
    """The job ads is run by this process."""
    return reader.ledger.hold(reader.ledger.job("ads"), {"workers": 2, "mode": "process"})


@pytest.mark.req("S2-41")
def test_a_run_is_asked_to_pause_to_go_on_to_use_other_workers_and_to_stop(reader: Reader, run: Hold):
    job = reader.ledger.job("ads")
    assert "start no more" in actions.pause_run(reader, OPERATOR, "ads", reason="the disk  is full").text
    assert last(reader) == ("olga", "pause", {"run": run.run, "reason": "the disk is full"})
    assert (job.asked(run.run).paused, reader.job("ads").paused_by) == (True, "olga")
    actions.resume_run(reader, OPERATOR, "ads")
    assert last(reader) == ("olga", "resume", {"run": run.run})
    assert actions.scale_run(reader, OPERATOR, "ads", 6).text.endswith("to process 6 items at once.")
    assert last(reader) == ("olga", "scale", {"run": run.run, "workers": 6})
    actions.stop_run(reader, OPERATOR, "ads")
    assert job.asked(run.run).stopping == 1
    actions.stop_run(reader, OPERATOR, "ads", now=True, reason="now")
    asked = job.asked(run.run)
    assert (asked.paused, asked.workers, asked.stopping, asked.actor) == (False, 6, 2, "olga")


def test_a_job_that_does_not_run_is_asked_nothing_and_no_number_of_workers_is_guessed(reader: Reader):
    before = reader.activity()
    with pytest.raises(Refused, match="ads is not running"):
        actions.pause_run(reader, ADMIN, "ads")
    for workers in (0, -1, 10_001):
        with pytest.raises(InvalidInput, match="number of workers must be"):
            actions.scale_run(reader, ADMIN, "ads", workers)
    assert reader.activity() == before


def test_a_viewer_changes_nothing_even_around_the_routes(reader: Reader):
    before = reader.activity()
    for call in (
        lambda: actions.retry_dead(reader, VIEWER, "ads"),
        lambda: actions.pause(reader, VIEWER, "low"),
        lambda: actions.resume(reader, VIEWER, "low"),
        lambda: actions.cancel_task(reader, VIEWER, "t-anna"),
        lambda: actions.retry_task(reader, VIEWER, "t-failed"),
        lambda: actions.end_worker(reader, VIEWER, "w", "stop"),
        lambda: actions.forget(reader, VIEWER, "ads"),
        lambda: actions.pause_run(reader, VIEWER, "ads"),
        lambda: actions.resume_run(reader, VIEWER, "ads"),
        lambda: actions.stop_run(reader, VIEWER, "ads"),
        lambda: actions.scale_run(reader, VIEWER, "ads", 3),
    ):
        with pytest.raises(Forbidden):
            call()
    assert reader.activity() == before


def test_a_change_that_fails_leaves_no_line_in_the_activity(reader: Reader):
    before = reader.activity()
    with pytest.raises(InvalidInput):
        actions.retry_task(reader, ADMIN, "t-anna")  # it waits already
    with pytest.raises(NotFound):
        actions.cancel_task(reader, ADMIN, "t-nobody")
    assert reader.activity() == before


def test_a_secret_in_a_reason_is_not_kept(reader: Reader):
    actions.pause(reader, ADMIN, "low", reason="password=hunter2hunter2 leaked")
    assert "hunter2hunter2" not in str(last(reader))


# ---- forms ----------------------------------------------------------------------------------------------------------


def test_a_form_does_what_the_api_does_and_leads_back_with_what_it_did(fresh: Web, database: str):
    csrf, cookies = log_in(fresh, "operator")
    form = {"csrf": csrf, "job": "ads", "cause": "2", "reason": "repaired", "next": "/jobs/ads?state=dead"}
    answer = fresh.post("/actions/retry", form=form, cookies=cookies)
    assert (answer.status, answer.headers["Location"]) == (303, "/jobs/ads?state=dead")
    [flash] = [value for name, value in answer.cookies.items() if "flash" in name]
    assert re.fullmatch(r"[\w=-]+\.[0-9a-f]{64}", flash)
    assert fresh.ask("/api/v1/jobs/ads", token="viewer").json["job"]["dead"] == 4
    failed = fresh.post("/actions/cancel", form={"csrf": csrf, "task": "nobody"}, cookies=cookies)
    assert (failed.status, failed.headers["Location"]) == (303, "/")
    assert any("flash" in name for name in failed.cookies)
    assert fresh.post("/actions/nothing", form={"csrf": csrf}, cookies=cookies).status == 404
    for minutes in ("x", "-1", "9" * 20):
        bad = fresh.post("/actions/pause", form={"csrf": csrf, "queue": "low", "minutes": minutes}, cookies=cookies)
        assert bad.status == 303
    assert not any(queue["paused"] for queue in fresh.ask("/api/v1/queues", token="viewer").json["queues"])
    assert (
        fresh.post("/actions/pause", form={"csrf": csrf, "queue": "low", "minutes": "30"}, cookies=cookies).status
        == 303
    )
    with connect(database) as store:
        assert store.one("SELECT paused_until - paused_at BETWEEN 1799 AND 1801 FROM task_queues WHERE paused = 1") == (
            1,
        )


def test_a_run_is_controlled_by_the_forms_of_its_page(fresh: Web, reader: Reader, run: Hold):
    csrf, cookies = log_in(fresh, "operator")

    def post(name: str, **fields: str) -> None:
        answer = fresh.post(f"/actions/{name}", form={"csrf": csrf, "job": "ads", **fields}, cookies=cookies)
        assert answer.status == 303

    page = fresh.ask("/jobs/ads", cookies=cookies).text
    assert all(f'action="/actions/{name}"' in page for name in ("pause", "scale", "stop"))
    assert "/actions/resume" not in page
    post("pause", reason="lunch")
    page = fresh.ask("/jobs/ads", cookies=cookies).text
    assert "Paused by the-operator" in page
    assert 'action="/actions/resume"' in page
    post("resume")
    for nonsense in ("", "x", "0", "99999"):
        post("scale", workers=nonsense)
    assert reader.ledger.job("ads").asked(run.run).workers is None
    post("scale", workers="5")
    post("stop")
    page = fresh.ask("/jobs/ads", cookies=cookies).text
    assert "Stop requested by the-operator" in page
    assert 'action="/actions/stop"' not in page
    asked = reader.ledger.job("ads").asked(run.run)
    assert (asked.paused, asked.workers, asked.stopping) == (False, 5, 1)
    assert 'action="/actions/pause"' not in fresh.ask("/jobs/ads", cookies=log_in(fresh, "viewer")[1]).text


@pytest.mark.parametrize("text", ["done.", "x" * 2000, "ümlaut \n <b>", ""])
def test_what_an_action_did_comes_back_as_it_was_said_and_nobody_can_say_it_in_its_place(reader: Reader, text: str):
    site = Site("", None, reader.config, reader)
    access = Access(site, key=b"k" * 32)
    cookie = access.flash("failed", text)
    assert access.read_flash(cookie) == Flash("failed", text[:500])
    assert Access(site, key=b"o" * 32).read_flash(cookie) is None
    for forged in ("", ".", "x", cookie[:-1], "A" + cookie, cookie.replace(".", ""), "é." + "0" * 64):
        assert access.read_flash(forged) is None
    site.close()


@pytest.mark.parametrize("name", sorted(actions.FORMS))
def test_a_viewer_is_refused_by_every_form(closed: Web, name: str):
    csrf, cookies = log_in(closed, "viewer")
    form = {"csrf": csrf, "job": "ads", "queue": "low", "task": "t-anna", "worker": "w"}
    assert closed.post(f"/actions/{name}", form=form, cookies=cookies).status == 403


# ---- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_that_did_not_change_is_not_sent_again(closed: Web):
    first = closed.ask("/api/v1/jobs", token="viewer")
    tag = first.headers["ETag"]
    again = closed.ask("/api/v1/jobs", token="viewer", If_None_Match=f'"other", W/{tag}')
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
    assert closed.ask("/api/v1/jobs", token="viewer", If_None_Match='"other"').status == 200


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_pages_of_jobs_give_every_job_once(engine: str, tmp_path: Path, postgres_url: str):
    with Reader(
        Config(cli={"database": f"sqlite:///{tmp_path}/x.db" if engine == "sqlite" else postgres_url}), create=True
    ) as reader:
        names = [f"job-{number}" for number in range(7)]
        for name in names:
            reader.ledger.create(name)
        reader.database.write("UPDATE jobs SET updated_at = 1000 + no / 2")  # some of them at the same moment
        seen: list[str] = []
        page = reader.jobs(limit=2)
        while True:
            seen += [job.id for job in page.jobs]
            if not isinstance(page.next, str):
                break
            page = reader.jobs(before=page.next, limit=2)
        assert seen == names[::-1]
        assert [job.id for job in reader.jobs(before="job-2", limit=5).jobs] == ["job-1", "job-0"]
        with pytest.raises(NotFound, match="continue the list"):
            reader.jobs(before="nobody", limit=2)
        with pytest.raises(NotFound, match="continue the list"):
            reader.jobs(before="~1e3", limit=2)


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_job_that_changes_between_two_pages_is_neither_skipped_nor_repeated(
    engine: str, tmp_path: Path, postgres_url: str
):
    with Reader(
        Config(cli={"database": f"sqlite:///{tmp_path}/x.db" if engine == "sqlite" else postgres_url}), create=True
    ) as reader:
        for number in range(6):
            reader.ledger.create(f"job-{number}")
        first = reader.jobs(limit=2)
        last = first.jobs[-1].id
        reader.ledger.job("job-0").register([NewItem(0, "1")])  # from the last page to the top
        reader.ledger.forget(last, actor="test")  # the job that the first page ended with
        reader.ledger.create(last)  # and another one of its name
        assert isinstance(first.next, str)
        rest = reader.jobs(before=first.next, limit=10)
        assert [job.id for job in (*first.jobs, *rest.jobs)] == [f"job-{number}" for number in range(5, -1, -1)]


def test_pages_by_key_give_every_item_once(closed: Web):
    seen: list[int] = []
    after: int | None = -1
    while after is not None:
        page = closed.ask(f"/api/v1/jobs/ads/items?after={after}&limit=7", token="viewer").json
        seen += [item["idx"] for item in page["items"]]
        after = page["next_after"]
    assert seen == list(range(60))


@pytest.mark.req("S1-58")
def test_the_metrics_are_those_of_the_server_and_for_who_may_read(closed: Web):
    closed.ask("/metrics", token="viewer")  # the first answer to be counted
    text = closed.ask("/metrics", token="viewer").text
    assert 'headway_web_requests_total{status="2xx"}' in text
    assert closed.ask("/metrics", token="user").error == "Forbidden"

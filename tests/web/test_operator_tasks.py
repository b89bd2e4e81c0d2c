"""Tasks 13 to 20 of an operator, in a real browser: each begins at the Overview and has a budget of clicks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from headway.alerts import Evaluator, Rules
from headway.config import Config
from headway.ledger import Ledger
from headway.queue.task_queue import TaskQueue
from headway.views.reading import Reader
from headway.views.search import read_failures_by_host
from tests.services.waiting import eventually
from tests.views.test_truth import Stage as Processes
from tests.web import scene
from tests.web.conftest import Servers
from tests.web.scene import INVOICES
from tests.web.test_browser import chromium as chromium  # noqa: PLC0414 - the fixture
from tests.web.test_browser_tasks import House, Task


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An installation with jobs in all states, lost workers, an alert storm and tasks that wait."""
    place = tmp_path_factory.mktemp("operator")
    url = f"sqlite:///{place}/headway.db"
    scene.lively(url, items=3000)
    with Ledger.open(url) as ledger:
        ledger.note("queue.set", "", {"setting": "timeout", "value": "5"}, actor="ana")
        scene.change(ledger.database, "UPDATE task_workers SET queues = 'high,normal,low'")
        for no in range(19):
            scene.change(
                ledger.database,
                "INSERT INTO task_workers (name, owner, host, pid, queues, version, state, task, completed, failed, rss, "
                "started_at, seen_at, ended_at) SELECT ?, owner, host, pid, queues, version, 'lost', NULL, 0, 0, rss, "
                "started_at, seen_at, seen_at FROM task_workers WHERE name = 'worker-d'",
                f"storm-{no:02}",
            )  # fmt: skip
        limits = {**Rules().limits, "worker_lost": 0.1}
        evaluator = Evaluator(ledger.database, lambda: Rules(limits=limits, open_after=0.0))
        evaluator.tick()
        evaluator.close()
    servers = Servers(place)
    with Reader(Config(cli={"database": url})) as reader:
        yield House(place, servers("--no-auth", "--database", url), reader)
        servers.close()


def test_13_no_worker_serves_urgent_one_click_to_the_command(chromium: Browser, house: House):
    with Task(chromium, house.web.address) as task:
        row = task.page.locator(".al li", has_text="no online worker serves this queue").filter(has_text="urgent")
        task.click(row.get_by_role("link"))
        expect(task.page.locator("#start")).to_contain_text("headway worker --app myapp:queue --queues urgent")
        assert task.clicks == 1


def test_14_nineteen_alerts_are_acknowledged_by_two_clicks(chromium: Browser, house: House):
    def open_() -> int:
        return len([one for one in house.reader.alerts().alerts if one.acknowledged_by is None])

    assert open_() >= 19
    with Task(chromium, house.web.address) as task:
        task.click(task.page.get_by_role("button", name=re.compile(r"Acknowledge all \d+")).last)
        task.click(task.page.locator("dialog[open]").get_by_role("button", name=re.compile(r"^Acknowledge \d+$")))
        expect(task.page.locator(".flash")).to_contain_text("acknowledged")
        assert task.clicks == 2
    assert open_() == 0


def test_15_an_interrupted_job_has_its_command_on_top_to_copy(chromium: Browser, house: House):
    with Ledger.open(house.url) as ledger:
        ids = [one.id for one in house.reader.jobs().jobs if one.status == "interrupted"]
        command = ledger.job(ids[0]).info().command
    with Task(chromium, house.web.address, permissions=["clipboard-read", "clipboard-write"]) as task:
        task.page.goto(f"/jobs/{ids[0]}")
        box = task.page.locator("#continue")
        expect(box.locator("code")).to_have_text(command)
        assert box.bounding_box()["y"] < 400  # type: ignore[index]  # it is visible
        task.click(box.get_by_role("button", name="Copy"))
        expect(box.get_by_role("button")).to_have_text("Copied")
        assert task.page.evaluate("navigator.clipboard.readText()") == command
        assert task.clicks == 1


def test_15_an_interrupted_job_of_a_fleet_continues_by_two_clicks_within_five_seconds(
    chromium: Browser, tmp_path: Path, postgres_url: str, serve: Servers
):
    with ExitStack() as stack:
        work = Processes(tmp_path, postgres_url, stack)
        work.start("worker", "--app", "truth_app:queue", "--workers", "2")
        eventually(lambda: work.reader.queues().workers_online == 2, timeout=60)
        work.run(1500, "--fleet", "--slots", "2")
        eventually(lambda: work.done() >= 20, timeout=60)
        Ledger(work.database).job("truth").stop(actor="ana", reason="backup")
        eventually(lambda: work.status() == "interrupted", timeout=60)
        web = serve("--no-auth", "--database", postgres_url)
        with Task(chromium, web.address) as task:
            task.click(task.page.get_by_role("link", name="truth", exact=True).first)
            expect(task.page.locator("main")).to_contain_text("Stopped by ana: backup.")
            before, began = work.done(), time.monotonic()
            task.click(task.page.get_by_role("button", name="Continue"))
            eventually(lambda: work.done() > before, timeout=30)
            assert time.monotonic() - began < 5
            expect(task.page.locator(".flash")).to_contain_text("The fleet continues truth.")
            assert task.clicks == 2
        newest = work.reader.activity(limit=1).activity[0]
        assert (newest.action, newest.job) == ("continue", "truth")


@pytest.mark.parametrize(
    ("text", "found"),
    [("inv-2025-00000", "inv-2025-000003"), ("tom", "tomas"), ("timed out after", INVOICES)],
    ids=["key", "user", "error"],
)
def test_16_anything_is_found_by_a_part_of_its_name(chromium: Browser, house: House, text: str, found: str):
    with Task(chromium, house.web.address) as task:
        task.page.keyboard.press("/")
        task.page.keyboard.type(text)
        task.page.keyboard.press("Enter")
        expect(task.page.locator("main")).to_contain_text(found)
        assert task.clicks == 0
        assert not task.wrong


def test_17_a_change_before_a_spike_is_marked_in_the_chart(chromium: Browser, house: House):
    for path in ("/", f"/jobs/{INVOICES}", "/queues/normal"):
        with Task(chromium, house.web.address) as task:
            task.page.goto(path)
            marks = task.page.locator(".marks")
            expect(marks).to_contain_text("timeout set to 5 by ana")
            assert task.page.locator("line.mk").count() == marks.locator("li b").count()
            assert task.clicks == 0


def test_18_the_host_that_fails_most_is_one_click_away(chromium: Browser, house: House):
    hosts = read_failures_by_host(house.reader.database).hosts
    assert hosts
    with Task(chromium, house.web.address) as task:
        task.click(
            task.page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Dead letters")
        )
        row = task.page.locator(".hosts tbody tr").first
        expect(row).to_contain_text(hosts[0].host or "unknown")
        expect(row).to_contain_text(f"{hosts[0].items:,}")
        assert task.clicks == 1


def test_19_the_oldest_task_of_low_and_its_user_are_one_click_away(chromium: Browser, house: House):
    with TaskQueue(house.url, per_user=None) as queue:
        queue.handler("resize")(scene.work)
        for user in ("zoe", "yan"):
            queue.submit("resize", {}, user_id=user, role="admin", priority="low")
    oldest = house.reader.oldest_tasks("low", limit=1).tasks[0]
    assert oldest.user_id
    with Task(chromium, house.web.address) as task:
        task.click(task.page.get_by_role("link", name="low", exact=True).first)
        row = task.page.locator("#waiting tbody tr").first
        expect(row).to_contain_text(oldest.id[:16])
        expect(row).to_contain_text(oldest.user_id)
        assert task.clicks == 1


def test_20_the_page_of_a_job_says_why_it_stopped(chromium: Browser, house: House):
    stopped = [one.id for one in house.reader.jobs().jobs if one.status == "interrupted"]
    for id in stopped:
        why = house.reader.job(id).runs[-1].why
        assert why
        with Task(chromium, house.web.address) as task:
            task.page.goto(f"/jobs/{id}")
            expect(task.page.locator("main")).to_contain_text(why)
            assert task.clicks == 0

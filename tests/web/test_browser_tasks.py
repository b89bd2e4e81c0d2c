"""What people come for, in a real browser against a real server: each from the Overview, within its number of clicks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from playwright.sync_api import Browser, Locator, expect

from headway.config import Config
from headway.ledger import Failed, Ledger, NewItem
from headway.queue.store import claim as claims
from headway.queue.store.claim import Claimant
from headway.queue.task import Priority
from headway.queue.task_queue import TaskQueue
from headway.views.queue import WorkerView
from headway.views.reading import Reader
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.waiting import eventually
from tests.web import scene
from tests.web.conftest import Servers, Web, make_tokens
from tests.web.scene import INVOICES
from tests.web.test_browser import Visit, greens
from tests.web.test_browser import chromium as chromium  # noqa: PLC0414 - the fixture

#: 500 failures of five causes.
CAUSES = {"TimeoutError": 180, "KeyError": 120, "ValueError": 100, "OSError": 60, "LookupError": 40}
#: What the lost worker and the draining one run.
APP = """
import os, time
from headway.queue.task_queue import TaskQueue

queue = TaskQueue(os.environ["HEADWAY_DATABASE"])

@queue.handler("hold", retries=3, retry_delay=0.1)
def hold(task, payload):
    while not os.path.exists(payload):
        time.sleep(0.02)
"""


@dataclass
class House:
    """One installation for all tasks of this module, and who works in it."""

    place: Path
    web: Web
    reader: Reader
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.place}/headway.db"

    def work(self) -> None:
        """One more worker, in a process of its own."""
        words = [sys.executable, "-m", "headway", "worker", "--app", "holding:queue", "--workers", "1"]
        environment = os.environ | {"HEADWAY_DATABASE": self.url}
        with (self.place / "worker.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(words, cwd=self.place, env=environment, stdout=log, stderr=log, start_new_session=True)
            )

    def holder(self, task: str) -> WorkerView | None:
        """The worker that runs a task now."""
        found = [one for one in self.reader.workers().workers if one.task == task and one.state == "busy"]
        return found[0] if found else None

    def held(self, task: str) -> WorkerView:
        return eventually(lambda: self.holder(task), timeout=60)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    place = tmp_path_factory.mktemp("house")
    url = f"sqlite:///{place}/headway.db"
    scene.lively(url, items=3000)
    with Ledger.open(url) as ledger:
        job = ledger.create("five-causes")
        job.register([NewItem(idx, "{}", f"five-{idx}", idx) for idx in range(600)])
        ledger.describe(job, function="five:fail", source="x", command="", keyed_by=None, max_retries=0)
        names = [name for name, count in CAUSES.items() for _ in range(count)]
        hold = ledger.hold(job, {"workers": 1})
        job.record([Failed(idx, _failure(name)) for idx, name in enumerate(names)], hold=hold)
        ledger.release(hold, "interrupted")
    (place / "holding.py").write_text(APP)
    servers = Servers(place)
    with Reader(Config(cli={"database": url})) as reader:
        made = House(place, servers("--no-auth", "--database", url), reader)
        yield made
        servers.close()
        for process in made.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _failure(name: str) -> Any:
    from headway.core.failure import Failure

    return Failure(name, f"{name} as always", frame=f"five.py in {name.lower()}")


#: How people look at it: what they come for is there in each.
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 800}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 800}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "has_touch": True},
}


@pytest.fixture(params=LOOKS)
def look(request: pytest.FixtureRequest) -> dict[str, Any]:
    return LOOKS[request.param]


class Task(Visit):
    """A visit that begins at the Overview and counts its clicks."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        super().__init__(browser, address, **options)
        self.clicks = 0

    def __enter__(self) -> Self:
        self.page.goto("/")
        return self

    def click(self, what: Locator) -> None:
        what.click()
        self.clicks += 1

    def confirm(self, button: str, reason: str = "") -> None:
        """Fill in the open dialog and press its last button."""
        dialog = self.page.locator("dialog[open]")
        if reason:
            dialog.get_by_label("Reason").fill(reason)
        self.click(dialog.get_by_role("button", name=button, exact=True))


def test_the_forecast_of_a_run_and_what_it_kept_are_seen_at_once(chromium: Browser, house: House, look: dict[str, Any]):
    runs = house.reader.job(INVOICES).runs
    with Task(chromium, house.web.address, **look) as task:
        row = task.page.locator("tr", has_text=INVOICES).first
        expect(row).to_contain_text(re.compile(r"~\d+ (s|min|h)"))
        expect(row).to_contain_text(re.compile(r"\d\d:\d\d to \d\d:\d\d"))
        expect(row).to_contain_text(f"{runs[-1].kept:,} kept from before this run")
        assert runs[-1].kept > 0
        assert not task.wrong


def test_five_hundred_failures_are_five_causes_at_once(chromium: Browser, house: House, look: dict[str, Any]):
    with Task(chromium, house.web.address, **look) as task:
        rows = task.page.locator("table.ct tbody tr")
        expect(rows).to_have_count(5)
        seen = {row.locator("th b").inner_text(): int(row.locator("td").first.inner_text()) for row in rows.all()}
        assert seen == CAUSES


@pytest.mark.parametrize(
    ("look", "name"), [("light", "LookupError"), ("dark", "OSError"), ("phone", "ValueError")], indirect=["look"]
)
def test_one_cause_is_retried_by_two_clicks_and_nothing_else(
    chromium: Browser, house: House, look: dict[str, Any], name: str
):
    def dead() -> dict[str, int]:
        return {cause.type: cause.dead for cause in house.reader.dead("five-causes").causes}

    before, count = dead(), CAUSES[name]
    with Task(chromium, house.web.address, **look) as task:
        task.click(task.page.get_by_role("button", name=f"Retry {count} dead letters of {name}"))
        task.confirm(f"Retry {count}", reason="the table is back")
        expect(task.page.get_by_text(f"{count} dead letters of job five-causes pending again.")).to_be_visible()
        assert task.clicks == 2
    assert dead() == {other: number for other, number in before.items() if other != name}
    newest = house.reader.activity(limit=1).activity[0]
    assert (newest.action, newest.job, newest.detail["reason"]) == ("retry", "five-causes", "the table is back")


def test_an_item_is_found_by_its_name_with_its_attempts_and_frames(
    chromium: Browser, house: House, look: dict[str, Any]
):
    letters = house.reader.dead_items(INVOICES, limit=1).causes[0].items
    key = letters[0].key  # type: ignore[index]  # they were asked for
    with Task(chromium, house.web.address, **look) as task:
        task.page.keyboard.press("/")
        expect(task.page.locator(".find")).to_be_focused()
        task.page.keyboard.type(str(key))
        task.page.keyboard.press("Enter")
        task.page.wait_for_url(f"**/jobs/{INVOICES}/items/{key}")
        expect(task.page.locator("main")).to_contain_text("scene.py")
        expect(task.page.locator("main")).to_contain_text("Attempt 3")
        assert task.clicks == 0


def test_a_queue_is_paused_by_two_clicks_with_a_reason_that_everybody_sees_and_resumed_by_one(
    chromium: Browser, house: House, look: dict[str, Any]
):
    who = Claimant("test", _me(), scene.KINDS, lease=60)

    def taken() -> int:
        with TaskQueue(house.url, per_user=None) as queue:
            found = queue.database.run(lambda tx: claims.claim(tx, who, queues=(Priority.NORMAL,)))
            return len(found)

    waiting = house.reader.tasks(queue="normal", status="QUEUED").tasks[0].id
    with Task(chromium, house.web.address, **look) as task:
        task.click(task.page.get_by_role("button", name="Pause normal"))
        task.confirm("Pause", reason="new model")
        expect(task.page.get_by_text("The queue normal is paused.")).to_be_visible()
        assert task.clicks == 2
        assert taken() == 0
        for path in ("/", "/queues", "/queues/normal", f"/tasks/{waiting}"):
            task.page.goto(path)
            expect(task.page.locator("main")).to_contain_text("new model")
        printed = subprocess.run(
            [sys.executable, "-m", "headway", "queues", "--database", house.url],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "new model" in printed.stdout
        task.page.goto("/")
        task.clicks = 0
        task.click(task.page.get_by_role("button", name="Resume normal"))
        expect(task.page.get_by_text("The queue normal is resumed.")).to_be_visible()
        assert task.clicks == 1
        assert taken() == 1


def test_retrying_and_pausing_take_a_keyboard_and_nothing_else(chromium: Browser, house: House):
    with Task(chromium, house.web.address) as task:
        page = task.page
        button = page.get_by_role("button", name="Retry 120 dead letters of KeyError")
        for _ in range(200):  # as far as Tab takes to get there
            page.keyboard.press("Tab")
            if button.evaluate("button => button === document.activeElement"):
                break
        page.keyboard.press("Enter")
        dialog = page.locator("dialog[open]")
        expect(dialog).to_contain_text("Retry 120 dead letters of KeyError in five-causes")
        expect(dialog.get_by_label("Reason")).to_be_focused()
        page.keyboard.type("by keyboard")
        page.keyboard.press("Enter")
        expect(page.get_by_text("120 dead letters of job five-causes pending again.")).to_be_visible()

        page.keyboard.press("g")
        page.keyboard.press("q")
        page.wait_for_url("**/queues")
        for _ in range(2):  # urgent, high
            page.keyboard.press("j")
        expect(page.get_by_role("link", name="high", exact=True)).to_be_focused()
        page.keyboard.press("p")
        expect(page.locator("dialog[open]")).to_contain_text("Pause high")
        page.locator("dialog[open]").get_by_label("Reason").press("Enter")
        expect(page.get_by_text("The queue high is paused.")).to_be_visible()
        assert not task.wrong
    house.reader.queue.resume("high", by="test")
    newest = house.reader.activity(limit=3).activity
    assert ("retry", "by keyboard") in [(one.action, one.detail.get("reason")) for one in newest]


def test_selected_items_are_retried_and_no_others(chromium: Browser, house: House):
    page_of = f"/jobs/{INVOICES}/items?state=dead"
    before = house.reader.job(INVOICES).job.dead
    with Task(chromium, house.web.address) as task:
        task.page.goto(page_of)
        retry = task.page.get_by_role("button", name="Retry selected")
        expect(retry).to_be_disabled()
        boxes = task.page.get_by_role("checkbox", name="Select item")
        chosen = [boxes.nth(place).get_attribute("value") for place in (0, 2)]
        boxes.nth(0).check()
        task.page.locator("tbody tr").nth(2).get_by_role("link").focus()
        task.page.keyboard.press("x")
        task.page.keyboard.press("r")
        task.confirm("Retry 2 selected", reason="two of them")
        expect(task.page.get_by_text(f"2 dead letters of job {INVOICES} pending again.")).to_be_visible()
        expect(task.page).to_have_url(re.compile(r"state=dead$"))
    assert house.reader.job(INVOICES).job.dead == before - 2
    assert {house.reader.item(INVOICES, str(idx)).item.status for idx in chosen} == {"pending"}


def test_without_a_script_an_action_is_done_and_said(chromium: Browser, house: House):
    with Task(chromium, house.web.address, java_script_enabled=False) as task:
        task.click(task.page.get_by_role("button", name="Pause high"))
        task.confirm("Pause", reason="no script")
        expect(task.page.get_by_text("The queue high is paused.")).to_be_visible()
        task.click(task.page.get_by_role("button", name="Resume high"))
        expect(task.page.get_by_text("The queue high is resumed.")).to_be_visible()


def _me() -> Any:
    from headway._lease import Owner

    return Owner.current()


def test_whether_a_queue_clears_grows_or_stands_still_is_seen_at_once(
    chromium: Browser, house: House, look: dict[str, Any]
):
    database = house.reader.database
    minute = int(database.now() // 60)
    flows = {"high": (0, 60), "normal": (60, 6), "low": (0, 0)}
    scene.change(database, "DELETE FROM task_minutes WHERE queue IN ('high', 'normal', 'low')")
    for name, (into, out) in flows.items():
        for back in range(30):
            scene.change(
                database,
                "INSERT INTO task_minutes (minute, queue, kind, share, submitted, completed, failed, failures) "
                "VALUES (?, ?, 'caption', 1, ?, ?, 0, 0)",
                minute - back, name, into, out,
            )  # fmt: skip
    with TaskQueue(house.url, per_user=None) as queue:
        queue.handler("resize")(scene.work)
        queue.submit("resize", {}, user_id="zoe", role="admin", priority="high")
        queue.resume("low", by="test")
    with Task(chromium, house.web.address, **look) as task:
        said = {name: task.page.locator("tr", has=task.page.locator(f"a[href='/queues/{name}']")) for name in flows}
        expect(said["high"]).to_contain_text("clears in")
        expect(said["normal"]).to_contain_text("will not drain")
        expect(said["low"]).to_contain_text("stalled")


def test_success_and_p95_of_a_function_are_one_click_away(chromium: Browser, house: House, look: dict[str, Any]):
    with Ledger.open(house.url) as ledger:
        job = ledger.job(INVOICES)
        rows = ledger.database.all("SELECT seconds FROM progress WHERE job = ? AND seconds IS NOT NULL", (job.no,))
        counted = ledger.database.one("SELECT sum(done), sum(failed) FROM minutes WHERE job = ?", (job.no,))
    taken = sorted(seconds for (seconds,) in rows)
    assert counted is not None
    with Task(chromium, house.web.address, **look) as task:
        task.click(task.page.get_by_role("link", name="Performance"))
        row = task.page.locator("tr", has_text="docjobs:extract_text")
        shown = row.locator("[data-l='Run p50 · p95']").inner_text().split("·")[1].split()[:2]
        value = float(shown[0]) * {"ms": 0.001, "s": 1.0}[shown[1]]
        assert value == pytest.approx(taken[int(len(taken) * 0.95)], rel=0.05)
        success = row.locator("[data-l='Succeeded']").inner_text()
        assert float(success.strip("%")) == pytest.approx(100 * counted[0] / sum(counted), rel=0.01)
        assert task.clicks == 1


@contextmanager
def looks_at(chromium: Browser, address: str) -> Iterator[list[Task]]:
    """The same moment as each of the looks sees it."""
    with ExitStack() as opened:
        yield [opened.enter_context(Task(chromium, address, **look)) for look in LOOKS.values()]


def test_a_killed_worker_is_named_with_its_task_and_then_who_took_it_over(chromium: Browser, house: House):
    house.work()
    with TaskQueue(house.url, per_user=None) as queue:
        queue.handler("hold")(scene.work)
        held = queue.submit("hold", str(house.place / "free"), user_id="zoe").id
        lost = house.held(held)
        house.work()
        with looks_at(chromium, house.web.address) as tasks:
            eventually(lambda: len([one for one in house.reader.workers().workers if one.pid != lost.pid]), timeout=60)
            os.kill(lost.pid, signal.SIGKILL)
            for task in tasks:
                alert = task.page.locator(".al li", has_text=lost.name)
                expect(alert).to_contain_text("Worker lost", timeout=15_000)
                expect(alert).to_contain_text(held)
                assert task.clicks == 0
            successor = house.held(held)
            for task in tasks:
                task.click(task.page.locator(".al li", has_text=lost.name).get_by_role("link"))
                expect(task.page).to_have_url(re.compile(f"/workers#{lost.name}$"))
                row = task.page.locator(f"[id='{lost.name}']")
                expect(row).to_contain_text("lost")
                expect(row.locator("[data-l='Last heartbeat']")).to_contain_text(re.compile(r"\d+ (s|min).* ago"))
                expect(row).to_contain_text(held[:16])
                expect(row).to_contain_text(f"reassigned to {successor.name}", timeout=30_000)
                assert task.clicks == 1
        (house.place / "free").touch()
        eventually(lambda: queue.get(held).status == "COMPLETED", timeout=60)


def test_a_worker_is_drained_by_two_clicks_finishes_its_task_and_leaves(
    chromium: Browser, house: House, look: dict[str, Any], request: pytest.FixtureRequest
):
    free = house.place / f"free-{request.node.callspec.id}"
    house.work()
    with TaskQueue(house.url, per_user=None) as queue:
        queue.handler("hold")(scene.work)
        held = queue.submit("hold", str(free), user_id="zoe").id
        worker = house.held(held)
        with Task(chromium, house.web.address, **look) as task:
            chip = task.page.locator(".chips li", has_text=worker.name)
            task.click(chip.get_by_role("button", name=f"Drain {worker.name}"))
            task.confirm("Drain", reason="new kernel")
            assert task.clicks == 2
            expect(task.page.locator(".flash")).to_contain_text(
                f"Asked worker {worker.name} to finish its current tasks"
            )
            expect(chip).to_contain_text(re.compile("draining|drain requested"))
            assert queue.get(held).status == "RUNNING"
            free.touch()
            eventually(lambda: queue.get(held).status == "COMPLETED", timeout=60)
            expect(task.page.locator(".chips")).not_to_contain_text(worker.name, timeout=30_000)
            task.page.goto("/workers")
            expect(task.page.locator(f"[id='{worker.name}']")).to_contain_text("ended")


def test_a_page_says_that_its_server_was_killed_and_goes_on_with_the_next_one(
    chromium: Browser, tmp_path: Path, serve: Servers
):
    web = serve("--no-auth")
    port = web.host.split(":")[1]
    with Task(chromium, web.address) as task, Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        expect(task.page.locator(".live")).to_have_text("Live")
        web.kill()
        expect(task.page.locator(".live")).not_to_have_text("Live", timeout=20_000)
        job = ledger.create("meanwhile")
        job.register([NewItem(0, "{}", "a", 0)])
        serve("--no-auth", "--port", port)
        expect(task.page.locator(".live")).to_have_text("Live", timeout=30_000)
        expect(task.page.get_by_text("meanwhile").first).to_be_visible(timeout=30_000)


#: A function that writes down every call, and stands still at the 60th item until a file is there.
COUNTING = """
import os, time

def count(item):
    with open("calls.log", "a") as log:
        log.write(f"{item['id']}\\n")
    while item["id"] == "i-60" and not os.path.exists("go"):
        time.sleep(0.02)
    if item["id"] >= "i-70":
        time.sleep(0.05)
"""


def test_a_run_that_was_killed_and_goes_on_shows_what_it_kept_and_does_none_of_it_again(
    chromium: Browser, tmp_path: Path, serve: Servers
):
    url = f"sqlite:///{tmp_path}/headway.db"
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "items.jsonl").write_text("".join(f'{{"id": "i-{n:02}"}}\n' for n in range(100)))
    words = [sys.executable, "-m", "headway", "run", "counting:count", "--items", "items.jsonl", "--key", "id"]
    words += ["--job", "counted", "--workers", "1", "--database", url, "--progress", "none"]

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "run.log").open("ab") as log:
            return subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)

    first = start()
    try:
        calls = tmp_path / "calls.log"
        eventually(lambda: calls.exists() and "i-60" in calls.read_text().split(), timeout=60)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    (tmp_path / "go").touch()
    with Ledger.open(url) as ledger:
        kept = ledger.job("counted").info().done
    before = len(calls.read_text().split())
    web = serve("--no-auth", "--database", url)
    with looks_at(chromium, web.address) as tasks:
        rows = [task.page.locator("tr", has_text="counted").first for task in tasks]
        for row in rows:
            expect(row).to_contain_text("lost")
        second = start()
        for row in rows:
            expect(row).to_contain_text(f"{kept} kept from before", timeout=30_000)
        assert second.wait(60) == 0
        for row in rows:
            expect(row).to_contain_text("100%", timeout=30_000)
        assert [task.clicks for task in tasks] == [0, 0, 0]
    assert kept > 0
    again = calls.read_text().split()[before:]
    assert len(again) == 100 - kept, "what was recorded as done is not run a second time"


def test_a_store_that_goes_away_turns_the_page_red_and_it_recovers_by_itself(
    chromium: Browser,
    serve: Servers,
    postgres_url: str,
    postgres_server: PostgresServer,
    tcp_proxy: Callable[[int], TcpProxy],
):
    with Ledger.open(postgres_url) as ledger:
        scene.thumbnails(ledger)
    proxy = tcp_proxy(postgres_server.port)
    web = serve("--no-auth", "--database", postgres_url.replace(str(postgres_server.port), str(proxy.port)))
    with Task(chromium, web.address) as task:
        live, banner = task.page.locator(".live"), task.page.locator("#stale")
        expect(live).to_have_text("Live")
        assert greens(task.page)
        proxy.refuse()
        proxy.cut()
        expect(live).to_have_text("Store unreachable", timeout=15_000)
        expect(banner).to_be_visible()
        expect(banner).to_contain_text("The data below is from")
        assert greens(task.page) == []
        answer = task.page.request.get("/jobs")
        assert (answer.status, "no data is shown" in answer.text()) == (503, True)
        proxy.pass_through()
        expect(live).to_have_text("Live", timeout=60_000)
        expect(banner).to_be_hidden()


def test_another_person_sees_nothing_of_the_first_ones_by_page_address_or_live(
    chromium: Browser, tmp_path: Path, serve: Servers
):
    url = f"sqlite:///{tmp_path}/headway.db"
    with TaskQueue(url) as queue:
        queue.handler("caption")(scene.work)
        for user in ("anna", "ben"):
            queue.submit("caption", {}, id=f"t-{user}", user_id=user)
    made = make_tokens(url)
    web = serve("--no-auth", "--database", url)
    with Visit(chromium, web.address) as visit:
        visit.page.goto("/login")
        visit.page.locator("input[type=password], input[name=token]").first.fill(made["other"])
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url(lambda address: "/login" not in address)
        frames: list[str] = []
        visit.page.on("websocket", lambda socket: socket.on("framereceived", lambda text: frames.append(str(text))))
        visit.page.goto("/me")
        expect(visit.page.locator("main")).to_contain_text("Your caption is waiting.")
        heard_of_ben = lambda: [text for text in frames if "t-ben" in text]  # noqa: E731 - it is asked in a loop
        for _ in range(300):
            if heard_of_ben():
                break
            visit.page.wait_for_timeout(100)  # the browser's events arrive only while its own call waits
        assert heard_of_ben()
        assert not any("t-anna" in text for text in frames)

        def looked_at(path: str) -> tuple[int, str]:
            answer = visit.page.goto(path)
            assert answer is not None
            return answer.status, visit.page.locator("main, pre").first.inner_text()

        for path in ("/tasks/{}", "/api/v1/tasks/{}"):
            status, text = looked_at(path.format("t-anna"))
            assert (status, text.replace("t-anna", "t-nobody")) == looked_at(path.format("t-nobody"))
            assert status == 404
        for path in ("/jobs", "/queues", "/workers", "/dead", "/api/v1/jobs", "/api/v1/queues"):
            status, text = looked_at(path)
            assert (path, status in (403, 404), "anna" in text) == (path, True, False)

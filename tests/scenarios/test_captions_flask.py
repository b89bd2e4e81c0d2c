"""examples/captions: Flask, SQLAlchemy, Gunicorn, PostgreSQL, Redis, encryption keys, live progress, behind nginx.

The processes are started by the commands of its README. At the end of each test the whole history is checked by plain SQL.
"""

from __future__ import annotations

import http.client
import http.cookiejar
import json
import os
import random
import re
import signal
import time
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from playwright.sync_api import Page, expect, sync_playwright
from redis import Redis

from tests.scenarios import history
from tests.scenarios.deployment import Deployment
from tests.services import chromium, nginx
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.services.waiting import eventually

WEB = "gunicorn 'shop:create_app()' --bind 127.0.0.1:${WEB_PORT:-8001}"
LIVE = "uvicorn live:application --port ${LIVE_PORT:-8002} --root-path /headway"
PROXY = "nginx -p . -c nginx.conf -e stderr"
WORDS = ("a", "small", "boat", "at", "sea")
ANNA, BERT, ROOT = "anna@example.org", "bert@example.org", "root@example.org"
#: A picture's name, which must not be readable in Redis or in the payloads.
SECRET = "confidential-harbour"
TOO_EARLY = (OSError, http.client.HTTPException)


class Visitor:
    """A person with a browser session, or a program with the number of its account."""

    def __init__(self, address: str, account: int | None = None, role: str = "user") -> None:
        self._address = address
        self._headers = {} if account is None else {"X-User": str(account), "X-Role": role}
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def ask(self, path: str, *, form: dict[str, str] | None = None, body: Any = None, method: str | None = None) -> Any:
        """Return status and content: JSON, or the text of a page."""
        data = urllib.parse.urlencode(form).encode() if form is not None else None
        if body is not None:
            data = json.dumps(body).encode()
        call = urllib.request.Request(self._address + path, data, self._headers, method=method)
        try:
            with self._opener.open(call, timeout=30) as reply:
                status, kind, content = reply.status, reply.headers.get_content_type(), reply.read()
        except urllib.error.HTTPError as error:
            with error:
                status, kind, content = error.code, error.headers.get_content_type(), error.read()
        return status, json.loads(content) if kind == "application/json" else content.decode()


class Shop:
    """The deployed example."""

    def __init__(self, deployment: Deployment, database: str, redis: RedisServer, *, web: str = WEB) -> None:
        self.deployment, self.database = deployment, database
        self.redis_url, self.web = redis.url(), web
        self.accepted: list[str] = []
        self.address = f"http://127.0.0.1:{free_port()}"
        self._settings = deployment.directory / "headway.toml"
        self._settings.write_text(f'database = "{database}"\nredis = "{redis.url()}"\n')
        ports = {"8000": self.address.rpartition(":")[2], "8001": str(free_port()), "8002": str(free_port())}
        deployment.environment |= {
            "DATABASE_URL": database, "FLASK_SECRET_KEY": "a secret that every process has", "WEB_PORT": ports["8001"],
            "LIVE_PORT": ports["8002"], "HOME": str(deployment.directory),
        }  # fmt: skip
        proxy = deployment.directory / "nginx.conf"
        proxy.write_text(re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found[0]], proxy.read_text()))

    def start(self) -> None:
        self.rotate()
        self.succeed("flask --app shop:create_app init-db")
        self.deployment.start("web", self.web)
        self.deployment.start("live", LIVE)
        self.deployment.start("proxy", PROXY)
        eventually(self.is_up, 90, "the shop and the live server answer")
        eventually(self.workers, 90, "task workers run")

    def succeed(self, command: str) -> str:
        done = self.deployment.run(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_up(self) -> bool:
        visitor = self.visitor(1)
        with suppress(*TOO_EARLY):
            return [visitor.ask(path)[0] for path in ("/queues", "/headway/healthz")] == [200, 200]
        return False

    @property
    def master(self) -> int:
        return self.deployment.processes["web"].pid

    def visitor(self, account: int | None = None, role: str = "user") -> Visitor:
        return Visitor(self.address, account, role)

    def signed_in(self, email: str) -> Visitor:
        visitor = self.visitor()
        status, page = visitor.ask("/sign-in", form={"user": email})
        assert (status, email in page) == (200, True)
        return visitor

    # ---- tasks -----------------------------------------------------------------------------------------------------

    def submit(self, account: int, seconds: float = 0.02, kind: str = "caption", **payload: Any) -> str:
        """Submit a caption whose five words take ``seconds`` each, as a program does: again until it is accepted."""
        given = {"picture": SECRET, "seconds": seconds, **payload}

        def accepted() -> str | None:
            with suppress(*TOO_EARLY):  # a reload or a restart closed the connection
                status, task = self.visitor(account).ask(f"/captions?kind={kind}", body=given)
                if status == 202:
                    return str(task["id"])
                if status == 409 and (active := self.active(account)):
                    return active  # accepted before, and the answer was lost
                assert status >= 500, task
            return None

        id = eventually(accepted, 60, f"a task of account {account} is accepted")
        self.accepted.append(id)
        return id

    def order(self, person: Visitor, email: str, seconds: float) -> str:
        """Order by the form of the page, which submits in a transaction with the row of the order."""
        status, page = person.ask("/order", form={"picture": SECRET, "seconds": str(seconds)})
        assert status == 200, page
        id = self.active(email)
        assert id is not None, page
        self.accepted.append(id)
        return id

    def active(self, user: object) -> str | None:
        found = history.rows(
            self.database, "SELECT id FROM tasks WHERE user_id = ? AND status IN ('QUEUED', 'RUNNING')", str(user)
        )
        return found[0][0] if found else None

    def task(self, id: str) -> tuple[str, int]:
        """Return status and failed attempts."""
        [(status, attempts)] = history.rows(self.database, "SELECT status, attempts FROM tasks WHERE id = ?", id)
        return status, attempts

    def wait(self, id: str, status: str, timeout: float = 60) -> int:
        """Wait until a task has this status and return its failed attempts."""

        def reached() -> bool:
            now = self.task(id)[0]
            assert now == status, (now, history.rows(self.database, "SELECT error FROM tasks WHERE id = ?", id))
            return True

        eventually(reached, timeout, f"{id} is {status}")
        return self.task(id)[1]

    def completes(self, account: int) -> bool:
        return self.wait(self.submit(account), "COMPLETED") == 0

    def result(self, id: str) -> dict[str, Any]:
        status, result = self.visitor(0, "admin").ask(f"/captions/{id}/result")
        assert status == 200, result
        return dict(result)

    # ---- operations ------------------------------------------------------------------------------------------------

    def workers(self) -> set[int]:
        """Return the pids of the task workers that are registered and alive."""
        found = history.rows(self.database, "SELECT pid FROM task_workers WHERE ended_at IS NULL")
        return {pid for (pid,) in found if pid in self.deployment.members()}

    def worker_of(self, id: str) -> int:
        [(pid,)] = history.rows(
            self.database, "SELECT w.pid FROM task_workers w JOIN tasks t ON t.worker = w.name WHERE t.id = ?", id
        )
        return int(pid)

    def rotate(self, option: str = "") -> str:
        """Change the encryption keys and return the one that encrypts now."""
        self.succeed(f"python rotate_keys.py {option}".strip())
        return str(tomllib.loads(self._settings.read_text())["queue_keys"][0])

    def use_redis(self, url: str) -> None:
        changed = self._settings.with_suffix(".changed")
        changed.write_text(self._settings.read_text().replace(self.redis_url, url))
        changed.replace(self._settings)
        self.redis_url = url

    def deploy_version(self, version: int) -> None:
        """Change the code and reload it."""
        code = self.deployment.directory / "shop.py"
        code.write_text(re.sub(r"^VERSION = \d+$", f"VERSION = {version}", code.read_text(), flags=re.MULTILINE))
        before = self.workers()
        os.kill(self.master, signal.SIGHUP)
        eventually(lambda: self.workers() and not self.workers() & before, 90, "every task worker was replaced")

    def end(self) -> dict[str, str]:
        """Stop everything while a task runs, and check the whole history. Return the status of every task."""
        last = self.submit(999, seconds=0.5)
        self.wait(last, "RUNNING")
        assert self.deployment.stop("web") == 0
        assert self.task(last) == ("COMPLETED", 0), "the running task was finished before Gunicorn ended"
        self.deployment.stop("live")
        self.deployment.stop("proxy")
        self.deployment.assert_no_orphans()
        return self.check_history()

    def check_history(self) -> dict[str, str]:
        every = {id for (id,) in history.rows(self.database, "SELECT id FROM tasks")}
        assert set(self.accepted) <= every
        status = history.assert_tasks_ended_exactly_once(self.database, every)
        history.assert_one_active_task_per_user(self.database)
        history.assert_nothing_held(self.database)
        self._check_shop(status)
        with Redis.from_url(self.redis_url) as client:
            history.assert_redis_keeps_nothing(client, SECRET, ANNA, BERT)
        connected = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        eventually(lambda: history.rows(self.database, connected) == [(1,)], 30, "only this query is connected")
        plain = history.rows(
            self.database, "SELECT id FROM tasks WHERE payload LIKE ? OR result LIKE ?", *2 * (f"%{SECRET}%",)
        )
        assert not plain, "a payload or a result is readable"
        return status

    def _check_shop(self, status: dict[str, str]) -> None:
        """The shop's own rows agree with the tasks, and each task saw only its own user's row."""
        tasks = {
            id: (kind, user) for id, kind, user in history.rows(self.database, "SELECT id, kind, user_id FROM tasks")
        }
        captions = dict(history.rows(self.database, "SELECT task, customer FROM public.captions"))
        orders = dict(history.rows(self.database, "SELECT task, customer FROM public.orders"))
        assert {id for id in tasks if status[id] == "COMPLETED"} <= captions.keys()
        for id, customer in (captions | orders).items():
            assert tasks[id][1] == customer
        people = {id for id, (_, user) in tasks.items() if "@" in user}
        assert people == orders.keys(), "an order and its task exist together"


Shops = Callable[..., Shop]


@pytest.fixture
def shops(deploy: Callable[..., Deployment], postgres_url: str, redis_server: RedisServer) -> Iterator[Shops]:
    if nginx.find() is None:
        pytest.skip("nginx is missing; install it: apt-get install nginx-light")
    started: list[Shop] = []

    def start(**options: str) -> Shop:
        started.append(Shop(deploy("captions"), postgres_url, redis_server, **options))
        started[-1].start()
        return started[-1]

    yield start
    for shop in started:
        for name in ("web", "live"):
            print(f"---- {name}\n{shop.deployment.log(name)[-6000:]}")  # noqa: T201 - pytest shows it when the test fails


@pytest.fixture
def page() -> Iterator[Page]:
    path = chromium.find()
    if path is None:
        pytest.skip("no Chromium on PATH; install it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page()
        browser.close()


#: Keeps every text that the progress of the first task had.
OBSERVE = """() => {
    window.seen = [];
    const cell = document.querySelector(".progress");
    new MutationObserver(() => window.seen.push(cell.textContent.trim())).observe(cell, {childList: true});
}"""


@pytest.mark.req("S2-12", "S2-13", "S2-14", "S2-15", "S2-17", "S2-24", "S2-52")
def test_progress_arrives_live_and_a_reload_deploys_version_2(shops: Shops, page: Page):
    shop = shops()
    page.goto(shop.address)
    page.get_by_role("button", name=ANNA).click()
    page.get_by_label("Seconds per word").fill("1.2")
    page.get_by_role("button", name="Order a caption").click()
    row = page.locator("tbody tr").first
    expect(row.locator(".status")).to_have_text(re.compile("QUEUED|RUNNING"))  # the answer did not wait for the task
    page.evaluate(OBSERVE)
    shop.accepted.append(str(shop.active(ANNA)))
    page.get_by_role("button", name="Order a caption").click()
    expect(page.get_by_role("alert")).to_contain_text("has an active task already")
    page.evaluate(OBSERVE)
    expect(row.locator(".status")).to_have_text("COMPLETED", timeout=60_000)
    expect(row.locator(".progress")).to_have_text("100 % saw sea")
    expect(row.locator(".caption")).to_have_text("harbour.jpg: a small boat at sea")  # by the application's own setting
    seen = page.evaluate("window.seen")  # the page was not loaded again: that would have cleared it
    possible = ["0 %", *(f"{20 * step} % saw {word}" for step, word in enumerate(WORDS, start=1))]
    assert set(seen) <= set(possible)
    assert len({text for text in seen if text not in ("0 %", possible[-1])}) >= 2, seen
    assert seen == sorted(seen, key=possible.index)

    running = shop.submit(7, seconds=1)
    shop.wait(running, "RUNNING")
    shop.deploy_version(2)
    assert shop.wait(running, "COMPLETED") == 0
    assert shop.result(running)["version"] == 1, "the old worker finished it"
    after = [shop.submit(account, seconds=0.02) for account in (8, 9, 10)]
    assert [shop.wait(id, "COMPLETED") for id in after] == [0, 0, 0]
    assert {shop.result(id)["version"] for id in after} == {2}
    page.reload()
    expect(page.locator("footer")).to_have_text("Version 2")
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("button", name=ROOT).click()
    expect(page.locator("tbody").first).to_contain_text(ANNA)
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("footer")).to_contain_text(f"Signed in as {ROOT}, admin")
    assert set(shop.end().values()) == {"COMPLETED"}


@pytest.mark.req("S2-23", "S2-31")
def test_killed_timed_out_cancelled_and_parallel_tasks_end_once_and_free_their_users(
    shops: Shops, postgres_server: PostgresServer
):
    shop = shops()
    anna = shop.signed_in(ANNA)
    # Four at once: one that is killed with its worker, one that times out, one with processes of its own, one cancelled.
    killed = shop.submit(1, seconds=1)
    too_long = shop.submit(2, seconds=60, kind="poster")
    album = shop.submit(3, kind="album", pictures=["p1", "p2", "p3"])
    cancelled = shop.order(anna, ANNA, seconds=10)
    shop.wait(killed, "RUNNING")
    lost = shop.worker_of(killed)
    os.kill(lost, signal.SIGKILL)
    shop.wait(cancelled, "RUNNING")
    assert anna.ask(f"/cancel/{cancelled}", form={})[0] == 200
    shop.wait(cancelled, "CANCELLED")
    shop.wait(too_long, "FAILED")
    assert history.rows(shop.database, "SELECT text FROM public.captions WHERE task = ?", too_long) == [("a poster",)]
    assert shop.wait(album, "COMPLETED") == 0
    assert shop.result(album)["caption"] == "p1: a boat, p2: a boat, p3: a boat"
    assert shop.wait(killed, "COMPLETED") == 1, "the run whose worker was killed counts as an attempt"
    eventually(lambda: lost not in shop.workers(), 60, "the killed worker is taken off the list")

    running = [shop.submit(account, seconds=0.8) for account in (1, 2, 3)]  # all are free again
    again = shop.order(anna, ANNA, seconds=0.1)
    shop.wait(running[0], "RUNNING")
    postgres_server.restart()
    for id in (*running, again):
        shop.wait(id, "COMPLETED")
    after = [shop.submit(account) for account in range(20, 28)]
    for id in after:
        shop.wait(id, "COMPLETED")
        assert (
            shop.result(id)["customer"]
            == history.rows(shop.database, "SELECT user_id FROM tasks WHERE id = ?", id)[0][0]
        )
    status = shop.end()
    assert {id: status[id] for id in status if status[id] != "COMPLETED"} == {
        cancelled: "CANCELLED", too_long: "FAILED",
    }  # fmt: skip


@pytest.mark.req("S2-12", "S2-32", "S2-41", "S2-45", "S2-58")
def test_rotated_keys_a_wiped_and_a_moved_redis_cost_no_task(
    shops: Shops, redis_server: RedisServer, redis_factory: Callable[..., RedisServer]
):
    shop = shops(web=f"{WEB} --preload")
    first = [shop.submit(account) for account in range(1, 7)]  # every web process has used the first key
    for id in first:
        shop.wait(id, "COMPLETED")
    shop.rotate()
    key = shop.rotate("--retire")
    for id in [shop.submit(account) for account in range(1, 7)]:
        assert shop.wait(id, "COMPLETED") == 0, "a process that was idle during the rotation uses the new key"
    assert_encrypted_with(key, shop, first)

    root = shop.signed_in(ROOT)
    assert root.ask("/pause/normal", form={})[0] == 200
    waiting = [shop.submit(account) for account in range(11, 15)]
    with redis_server.client() as client:
        client.flushall()
    assert {shop.task(id)[0] for id in waiting} == {"QUEUED"}
    assert root.ask("/resume/normal", form={})[0] == 200
    for id in waiting:
        assert shop.wait(id, "COMPLETED") == 0

    redis_server.kill9()
    without = [shop.submit(account) for account in range(15, 19)]
    for id in without:
        assert shop.wait(id, "COMPLETED") == 0, "tasks run from the database while Redis is away"
    moved = redis_factory()
    shop.use_redis(moved.url())
    with moved.client() as client:
        eventually(lambda: client.scard("rq:workers"), 60, "workers use the new Redis")
        eventually(lambda: shop.completes(21) and client.exists("rq:queues"), 60, "RQ hears of tasks again")
    alerts = "SELECT rule, subject, closed_at FROM alerts WHERE subject = 'redis'"
    assert [one for one in history.rows(shop.database, alerts) if one[2] is None] == [], "the new Redis is judged"
    assert set(shop.end().values()) == {"COMPLETED"}


def assert_encrypted_with(key: str, shop: Shop, before: list[str]) -> None:
    """Fail unless payloads and results written after the rotation are readable with the new key alone."""
    fernet = Fernet(key)
    for id, *texts in history.rows(shop.database, "SELECT id, payload, result FROM tasks"):
        if id in before:
            continue
        for text in texts:
            owner, _, plain = fernet.decrypt(text.removeprefix("fernet:")).decode().partition("\n")
            assert (owner.split()[0], SECRET in plain) == (id, True)


@pytest.mark.faults
@pytest.mark.req("S2-14", "S2-31")
def test_random_disturbances_lose_no_task(
    shops: Shops, postgres_server: PostgresServer, redis_server: RedisServer, chance: random.Random
):
    shop = shops(web=chance.choice([WEB, f"{WEB} --preload"]))
    disturbances: dict[str, Callable[[], object]] = {
        "kill a task worker": lambda: kill(chance.choice(sorted(shop.workers()) or [0])),
        "kill a web worker": lambda: kill(chance.choice(children(shop.master, "gunicorn") or [0])),
        "kill the supervisor": lambda: kill(chance.choice(children(shop.master, "headway worker") or [0])),
        "deploy": lambda: shop.deploy_version(chance.randrange(2, 1000)),
        "restart PostgreSQL": lambda: postgres_server.restart(immediate=chance.random() < 0.5),
        "empty Redis": redis_server.make_pristine,
        "restart Redis": lambda: restart(redis_server),
        "rotate the keys": shop.rotate,
        "cancel": lambda: [shop.visitor(0, "admin").ask(f"/captions/{id}", method="DELETE") for id in unfinished(shop)],
    }
    deadline = time.monotonic() + float(os.environ.get("HEADWAY_SCENARIO_SECONDS", "600"))
    while time.monotonic() < deadline:
        for account in chance.sample(range(1, 40), 5):
            kind = chance.choice(["caption", "caption", "album", "poster"])
            shop.submit(account, chance.choice([0.02, 0.3]), kind, pictures=["p1", "p2"])
        name = chance.choice(sorted(disturbances))
        print(name)  # noqa: T201 - pytest shows it when the test fails
        disturbances[name]()
    eventually(lambda: not unfinished(shop), 180, "every task has ended")
    shop.end()


def restart(redis: RedisServer) -> None:
    redis.kill9()
    redis.start()


def unfinished(shop: Shop) -> list[str]:
    found = history.rows(shop.database, "SELECT id FROM tasks WHERE status IN ('QUEUED', 'RUNNING') ORDER BY no")
    return [id for (id,) in found]


def kill(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(parent: int, command: str) -> list[int]:
    """Return the pids of the children of a process whose command line has this text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            of = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if of == parent and command in (entry / "cmdline").read_text().replace("\0", " "):
                found.append(int(entry.name))
    return sorted(found)

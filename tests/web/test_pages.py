"""The pages as HTML: whole without a script, true to the store, safe with whatever text is in it."""

from __future__ import annotations

import gzip
import html
import json
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, urljoin, urlsplit

import pytest
from starlette.testclient import TestClient

from headway._sql import connect
from headway.core.failure import Failure
from headway.ledger import Failed, Ledger, NewItem
from headway.views.overview import read_task_causes
from headway.web.api import actions
from headway.web.pages.static import Assets
from headway.web.site import Flash, User
from tests.web import scene
from tests.web.scene import HOSTILE, INVOICES
from tests.web.stage import Stage

PATHS = (
    "/", "/?range=24h", "/?range=7d", "/jobs", "/jobs?state=completed", f"/jobs/{INVOICES}", "/jobs/thumbnails-october",
    "/jobs/nightly-export", f"/jobs/{INVOICES}/items", f"/jobs/{INVOICES}/items?state=dead&cause=1",
    f"/jobs/{INVOICES}/items?state=retrying", f"/jobs/{INVOICES}/items/inv-2025-000003", "/dead", "/queues",
    "/find?q=inv-2025-00", "/queues/normal", "/queues/low?range=24h", "/workers", "/tasks", "/tasks?status=FAILED",
    "/me", "/projects", "/states", "/states/nightly", "/performance", "/performance?range=1h", "/activity", "/about",
)  # fmt: skip
#: What the application serves beside the pages.
NOT_OURS = ("/api/", "/metrics", "/healthz", "/readyz", "/actions/")


class Page(HTMLParser):
    """What a test looks at: the tags with their attributes, the links, the text."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "rect", "path", "line", "circle", "polyline", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.parts))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lively") / "headway.db"
    scene.lively(f"sqlite:///{path}", items=6000)
    return f"sqlite:///{path}"


@pytest.fixture(scope="module")
def _made(url: str) -> Iterator[tuple[Stage, TestClient]]:
    stage = Stage(url)
    with TestClient(stage.app(), follow_redirects=False) as client:
        yield stage, client
    stage.site.close()


@pytest.fixture
def stage(_made: tuple[Stage, TestClient]) -> Stage:
    stage, _ = _made
    stage.role, stage.name, stage.flash = "operator", "ana", None
    return stage


@pytest.fixture
def client(stage: Stage, _made: tuple[Stage, TestClient]) -> TestClient:
    return _made[1]


def client_of(stage: Stage) -> TestClient:
    return TestClient(stage.app(), follow_redirects=False)


def read(client: TestClient, path: str, status: int = 200) -> Page:
    answer = client.get(path)
    assert answer.status_code == status, (path, answer.text[:300])
    return Page(answer.text)


# ---------------------------------------------------------------------------------------------------------------------
# Every page


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_whole_and_allows_nothing_inline(client: TestClient, path: str):
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    page = Page(answer.text)
    assert len(page.all("h1")) == 1
    assert page.all("html") == [{"lang": "en"}]
    assert "Snapshot" in page.text
    for tag, attributes in page.tags:
        assert "style" not in attributes, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag != "style"
        if tag == "script":
            assert attributes["src"].startswith("/static/")  # type: ignore[union-attr]  # else it is inline
    for name in ("src", "href", "action"):
        for _, attributes in page.tags:
            value = attributes.get(name)
            assert value is None or not urlsplit(value).netloc, value
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)), ids


def test_every_page_is_the_same_on_postgresql(postgres_url: str):
    scene.lively(postgres_url, items=300)
    stage = Stage(postgres_url, role="admin")
    with TestClient(stage.app(), follow_redirects=False) as client:
        for path in PATHS:
            assert len(read(client, path).all("h1")) == 1
        page = read(client, "/")
        assert "paused by tomas" in page.text
        assert "worker-d on db-b stopped responding" in page.text
        assert client.get("/find?q=inv-2025-000003").headers["location"] == f"/jobs/{INVOICES}/items/inv-2025-000003"
    stage.site.close()


def test_every_link_of_every_page_leads_somewhere(client: TestClient):
    """From the overview on, each address once; a page of a list is looked at, not followed to its end."""
    seen: set[str] = set()
    ahead = ["/"]
    while ahead and len(seen) < 150:
        path = ahead.pop()
        shape = re.sub(r"\d+|[0-9a-f]{12,}|inv-\S+|page-\S+|row-\S+|img-\S+", "N", path)
        if shape in seen or path.startswith(NOT_OURS):
            continue
        seen.add(shape)
        answer = client.get(path)
        assert answer.status_code in (200, 303), path
        for link in Page(answer.text).all("a"):
            target = urlsplit(urljoin(path, link["href"] or path))
            ahead.append(f"{target.path}?{target.query}" if target.query else target.path)
    assert {"/jobs", "/queues", "/workers", "/dead", "/states", "/performance", "/tasks", "/projects", "/activity", "/me",
            "/about"} <= seen  # fmt: skip


def test_the_buttons_of_a_dialog_say_different_things(client: TestClient):
    """Whoever is asked about a cancellation must not choose between Cancel and Cancel."""
    chosen = [
        re.findall(r"<button[^>]*>([^<]*)</button>", dialog)
        for path in PATHS
        for dialog in re.findall(r"<dialog.*?</dialog>", client.get(path).text, re.DOTALL)
    ]
    assert ["Keep", "Cancel"] in chosen
    assert all(len({word.partition(" ")[0] for word in words}) == 2 for words in chosen)


def test_a_page_with_its_style_sheet_and_scripts_is_small(client: TestClient):
    assets = Assets()
    for path in (*PATHS, "/alerts"):
        page = client.get(path)
        # A browser in another time zone also loads the module for local times.
        names = re.findall(r'(?:src|href|data-extra)="(/static/[^"]+)"', page.text)
        whole = len(page.content) + sum(
            len(client.get(name, headers={"accept-encoding": ""}).content) for name in names
        )
        packed = len(gzip.compress(page.content)) + sum(len(gzip.compress(client.get(name).content)) for name in names)
        assert 1 + len(names) <= 7
        # A list of 50 rows may be longer.
        assert whole <= (64_000 if path.startswith("/tasks") else 61_440), (path, whole)
        assert packed <= 20_000, (path, packed)
    assert assets.path("app.css") in client.get("/").text


# ---------------------------------------------------------------------------------------------------------------------
# What they say


def test_idle_workers_hide_none_that_works(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    scene.lively(url, items=100)
    same = "owner, host, pid, queues, version, state, task, completed, failed, rss, started_at, seen_at, ended_at"
    with connect(url) as database:
        for number in range(8):
            copy = f"SELECT ?, {same} FROM task_workers WHERE name = 'worker-b'"
            scene.change(database, f"INSERT INTO task_workers (name, {same}) {copy}", f"an-idle-one-{number}")
    stage = Stage(url)
    with TestClient(stage.app()) as client:
        for path, count in (("/", 2), ("/queues", 6)):
            chips = client.get(path).text.partition('<ul class="chips">')[2].partition("</section>")[0]
            shown = re.findall(r'/workers#([^"]+)"', chips)
            assert shown[:2] == ["worker-a", "an-idle-one-0"]
            assert len(shown) == count
            assert "All 12 workers" in chips
    stage.site.close()


def test_the_overview_says_first_what_needs_somebody(client: TestClient):
    page = read(client, "/")
    assert re.search(r"\d issues need attention", page.text)
    for word in ("Worker lost", "New error", "Paused"):
        assert word in page.text
    assert "worker-d on db-b stopped responding" in page.text
    assert "paused by tomas, “database backup, please leave the disk alone”" in page.text


def test_a_queue_that_stands_still_with_workers_at_hand_needs_somebody(client: TestClient, stage: Stage):
    """Nobody paused it, workers answer, and nothing of it is finished: no other line of the page says that."""
    database = stage.site.reader.database
    kept = database.all("SELECT minute, queue, kind, share, submitted, completed, failed, failures FROM task_minutes")
    scene.change(database, "UPDATE task_minutes SET completed = 0, failures = 0, failed = 0 WHERE queue = 'normal'")
    page = read(client, "/").text
    assert re.search(r"normal: \d+ tasks waiting; none finished in the last minutes", page)
    scene.change(database, "DELETE FROM task_minutes")
    names = "minute, queue, kind, share, submitted, completed, failed, failures"
    for row in kept:
        scene.change(database, f"INSERT INTO task_minutes ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", *row)
    assert "none was finished in the last minutes" not in read(client, "/").text


def test_a_run_that_was_paused_by_hand_is_paused_and_not_stalled_and_is_resumed_from_the_overview(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/paused.db"
    with Ledger.open(url) as ledger:
        scene.embed(ledger)
        ledger.job("embed-pages").pause(actor="ana", reason="the disk is full")
        scene.change(ledger.database, "UPDATE jobs SET updated_at = updated_at - 4000")
        scene.change(ledger.database, "UPDATE runs SET started_at = started_at - 4000")
    stage = Stage(url)
    page = client_of(stage).get("/").text
    assert "paused by ana; 3,557 items pending" in page
    assert "Stalled" not in page
    assert 'aria-label="Resume the run of embed-pages"' in page
    stage.site.close()


def test_every_job_that_runs_is_counted_also_when_others_changed_after_it(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/many.db"
    with Ledger.open(url) as ledger:
        scene.embed(ledger)
        for number in range(10):
            ledger.create(f"later-{number}")
    stage = Stage(url)
    page = Page(client_of(stage).get("/").text)
    assert "embed-pages" in page.text
    assert re.search(r"Jobs running\s*1\b", page.text)
    stage.site.close()


def test_the_number_of_failed_tasks_of_a_cause_leads_to_exactly_those(client: TestClient, stage: Stage):
    for cause in read_task_causes(stage.site.reader.database):
        assert f'href="/tasks?cause={cause.no}"' in client.get("/dead").text
        page = client.get(f"/tasks?cause={cause.no}").text
        ids = set(re.findall(r'href="/tasks/([0-9a-f]{32})"', page))
        assert len(ids) == cause.dead
        sheets = [stage.site.reader.task(id) for id in ids]
        assert {(sheet.task.kind, (sheet.runs[-1].error or "").split(":")[0]) for sheet in sheets} == {
            (cause.kind, cause.type)
        }
    assert client.get("/tasks?cause=99999").status_code == 404


def test_an_empty_installation_says_how_to_begin(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/new.db"
    Ledger.open(url).close()
    stage = Stage(url)
    client = TestClient(stage.app())
    assert "Nothing has run here yet" in read(client, "/").text
    assert "headway run" in read(client, "/jobs").text
    assert "Nothing has failed permanently" in read(client, "/dead").text
    assert "No tasks yet" in read(client, "/me").text
    for path in ("/queues", "/workers", "/tasks", "/projects", "/states", "/performance", "/activity", "/about"):
        read(client, path)
    stage.site.close()


def test_when_nothing_is_wrong_the_overview_says_so(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/calm.db"
    with Ledger.open(url) as ledger:
        scene.thumbnails(ledger)
    stage = Stage(url)
    page = read(TestClient(stage.app()), "/")
    assert "No issues" in page.text
    assert "Nothing is running" in page.text
    stage.site.close()


def test_the_numbers_of_a_job_are_those_of_the_store(client: TestClient, stage: Stage):
    sheet = stage.site.reader.job(INVOICES)
    page = read(client, f"/jobs/{INVOICES}")
    shown = {attributes["data-v"]: place for place, (_, attributes) in enumerate(page.tags) if "data-v" in attributes}
    assert f"jobs/{INVOICES}/done" in shown
    for count in (
        sheet.job.done,
        sheet.job.total,
        sheet.job.dead,
        sheet.job.retrying,
        sheet.job.pending,
        sheet.running,
    ):
        assert f"{count:,}" in page.text
    assert f"{sheet.runs[-1].kept:,} of them kept from before" in page.text
    assert "Killed once (run 1); resumed without loss" in page.text
    assert "headway run docjobs:extract_text" in page.text


def test_the_map_of_a_job_has_a_table_with_the_same_counts(client: TestClient, stage: Stage):
    job = stage.site.reader.job(INVOICES).job
    page = client.get(f"/jobs/{INVOICES}").text
    data = json.loads(re.findall(r"data-mapdata='([^']+)'", page)[0])
    assert sum(length for _, length in data["bases"]) == data["cells"]
    assert sum(mark[2] for mark in data["marks"].values()) == job.dead
    assert sum(mark[0] for mark in data["marks"].values()) == job.retrying
    table = page[page.index("The map as a table") :]
    cells = [
        int(n.replace(",", ""))
        for n in re.findall(r'<td class="n">([\d,]+)</td></tr>', table[: table.index("</table>")])
    ]
    assert sum(cells) == job.dead


def test_causes_are_rows_with_their_number_of_dead_items_in_the_button(client: TestClient, stage: Stage):
    causes = stage.site.reader.dead().causes
    page = read(client, "/dead")
    for cause in causes:
        assert f"Retry {cause.dead}" in page.text
        assert cause.message in page.text
    forms = [form for form in page.all("form") if form.get("action") == "/actions/retry"]
    tasks = read_task_causes(stage.site.reader.database)
    assert tasks
    assert len(forms) == len(causes) + len(tasks) + 2  # each cause, all items, all tasks
    hidden = [(field["name"], field["value"]) for field in page.all("input") if field.get("type") == "hidden"]
    assert ("csrf", "0123456789abcdef" * 2) in hidden
    assert {("job", INVOICES), ("cause", str(causes[0].no)), ("tasks", str(tasks[0].no))} <= set(hidden)


def test_an_item_shows_every_attempt_its_own_frames_and_a_masked_payload(client: TestClient, stage: Stage):
    letter = stage.site.reader.dead_items(INVOICES, limit=1).causes[0].items[0]  # type: ignore[index]  # asked for
    page = read(client, f"/jobs/{INVOICES}/items/{letter.key}")
    assert "after 3 attempts" in page.text
    for no in (1, 2, 3):
        assert f"Attempt {no}" in page.text
    assert "web/scene.py" in page.text
    assert page.text.count("Same traceback as the following attempt.") == 2
    assert "hunter2" not in page.text
    assert "***" in page.text
    stage.role = "viewer"
    assert "Your role may not read payloads" in read(client, f"/jobs/{INVOICES}/items/{letter.key}").text


def test_every_page_shows_the_number_of_dead_letters_of_jobs_and_of_failed_tasks(client: TestClient, stage: Stage):
    reader = stage.site.reader
    jobs = sum(job.dead for job in reader.jobs().jobs)
    tasks = sum(cause.dead for cause in reader.task_causes().causes)
    assert jobs > 0
    assert tasks > 0
    for path in ("/", "/jobs", "/about"):
        assert f'<b id="deadn" class="bad">{jobs + tasks:,}</b>' in client.get(path).text


def test_items_are_paged_by_index_and_every_count_leads_to_exactly_its_items(client: TestClient, stage: Stage):
    job = stage.site.reader.job(INVOICES).job
    found: list[str] = []
    path: str | None = f"/jobs/{INVOICES}/items?state=dead"
    while path:
        html = client.get(path).text
        found += re.findall(r'href="item/(\d+)"', html)
        more = re.findall(r'class="btn" href="(\?[^"]+)">Next page', html)
        path = f"/jobs/{INVOICES}/items{more[0].replace('&amp;', '&')}" if more else None
    assert len(found) == len(set(found)) == job.dead


def test_of_items_whose_keys_are_numbers_each_link_and_each_button_means_the_item_beside_it(tmp_path: Path):
    """Keys from 1 on, as a table's ids are: the key of each is the index of the next."""
    url = f"sqlite:///{tmp_path}/numbers.db"
    with Ledger.open(url) as ledger:
        job = ledger.create("orders")
        job.register([NewItem(idx, "{}", str(idx + 1)) for idx in range(4)])
        scene.fail(job, ledger.hold(job, {}), {1: "fetch", 2: "parse"}, times=3)
    stage = Stage(url, "admin")
    with client_of(stage) as client:
        listed = client.get("/jobs/orders/items?state=dead").text
        links = re.findall(r'href="(item/\d+)">(\d+)<', listed)
        assert [key for _, key in links] == ["2", "3"]
        for link, key in links:
            page = client.get(f"/jobs/orders/{link}").text
            assert f"<h1>{key}</h1>" in page
            assert f"Retry {key} of orders" in page
        for key in ("2", "3"):  # typed by somebody, it is a key
            assert client.get(f"/jobs/orders/items?key={key}").headers["location"] == f"/jobs/orders/items/{key}"
            assert f"<h1>{key}</h1>" in client.get(f"/jobs/orders/items/{key}").text
        examples = re.findall(r'href="/jobs/orders/item/(\d+)">(\d+)</a>, 3 attempts', client.get("/dead").text)
        assert examples
        assert all(int(idx) + 1 == int(key) for idx, key in examples)
        acted = actions.FORMS["retry"](stage.site.reader, User("ada", "admin"), {"job": "orders"}, ["1"])
    assert (acted.touched, stage.site.reader.item("orders", "2").item.status) == (1, "pending")
    stage.site.close()


@pytest.mark.parametrize("key", [".", "..", "a/../b", "%", "?x#y", "💩", "a b", "é", "<b>", "//x", "\\"])
def test_an_item_with_an_odd_key_is_found_and_shown(tmp_path: Path, key: str):
    url = f"sqlite:///{tmp_path}/odd.db"
    with Ledger.open(url) as ledger:
        ledger.create("odd").register([NewItem(0, "{}", "first"), NewItem(1, "{}", key)])
    stage = Stage(url)
    with client_of(stage) as client:
        for path in ("/find?q=", "/jobs/odd/items?key="):
            found = client.get(path + quote(key, safe="")).headers["location"]
            assert urljoin("http://h/jobs/odd/items", found) == f"http://h{found}"  # as a browser goes there
            assert f"<h1>{escape(key)}</h1>" in client.get(found).text
    stage.site.close()


def test_one_item_is_shown_without_a_look_at_the_times_of_all_the_others(url: str):
    """Counted where SQLite executes them: how long a million items took is read for the page of the job alone."""
    stage = Stage(url)
    database = stage.site.reader.database
    statements: list[str] = []
    connection = database._take()
    database._give(connection)
    connection.set_trace_callback(statements.append)
    with client_of(stage) as client:
        assert client.get(f"/jobs/{INVOICES}/items/inv-2025-000003").status_code == 200
        assert client.get(f"/jobs/{INVOICES}/items?state=dead").status_code == 200
        assert statements
        assert [text for text in statements if "ORDER BY seconds" in text] == []
        client.get(f"/jobs/{INVOICES}")
        assert [text for text in statements if "ORDER BY seconds" in text] != []
    stage.site.close()


def test_a_failed_task_shows_where_it_failed_and_not_to_the_person_it_was_for(client: TestClient, stage: Stage):
    [task, *_] = [one for one in stage.site.reader.tasks(status="FAILED").tasks if one.user_id]
    page = read(client, f"/tasks/{task.id}").text
    assert "web/scene.py" in page
    assert "raise " in page
    stage.role, stage.name = "user", str(task.user_id)
    page = read(client, f"/tasks/{task.id}").text
    assert "scene.py" not in page
    assert "Attempt 1" in page
    own = stage.site.reader.task(task.id, user_id=task.user_id)
    assert [run.traceback for run in own.runs] == [None] * len(own.runs)


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        ("inv-1", "headway item odd inv-1"),
        ("$(touch x); `id` 'y' &", """headway item odd '$(touch x); `id` '"'"'y'"'"' &'"""),
        ("--database=/tmp/x", "headway item -- odd --database=/tmp/x"),
    ],
)
def test_what_is_to_be_copied_into_a_shell_is_one_command_whatever_a_key_says(tmp_path: Path, key: str, typed: str):
    url = f"sqlite:///{tmp_path}/odd.db"
    with Ledger.open(url) as ledger:
        ledger.create("odd").register([NewItem(0, "1", key, 1)])
    stage = Stage(url)
    shown = html.unescape(TestClient(stage.app()).get("/jobs/odd/item/0").text)
    assert f"<code>{typed}</code>" in shown
    stage.site.close()


def test_an_item_shows_what_it_printed(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/printed.db"
    with Ledger.open(url) as ledger:
        job = ledger.create("talks")
        job.register([NewItem(0, "{}", "a")])
        job.record([Failed(0, Failure("ValueError", "no"), printed="page 1 of <3>\n")], hold=ledger.hold(job, {}))
    stage = Stage(url)
    with client_of(stage) as client:
        assert "page 1 of &lt;3&gt;" in client.get("/jobs/talks/items/a").text
    stage.site.close()


def test_a_lost_worker_is_removed_where_the_overview_names_it(client: TestClient, stage: Stage):
    page = client.get("/").text
    assert 'aria-label="Remove worker-d"' in page
    assert 'aria-label="Remove worker-a"' not in client.get("/workers").text
    stage.role = "viewer"
    assert "Remove" not in client.get("/").text


def test_a_person_sees_how_far_their_own_task_is(client: TestClient, stage: Stage):
    stage.role, stage.name = "user", "teo"
    page = read(client, "/me")
    assert "Your export is half done." in page.text
    assert "Writing page 31 of 58" in page.text
    assert "Waiting behind your running export" in page.text
    assert "tomas" not in page.text


def test_what_an_action_did_is_told_once_on_the_page(client: TestClient, stage: Stage):
    stage.flash = Flash("done", "41 dead letters pending again.")
    assert "41 dead letters pending again." in read(client, "/dead").text


def test_something_is_found_by_its_name(client: TestClient, stage: Stage):
    task = stage.site.reader.tasks().tasks[0].id
    for text, path in (
        (INVOICES, f"/jobs/{INVOICES}"),
        ("page-000007", "/jobs/embed-pages/items/page-000007"),
        (task, f"/tasks/{task}"),
        ("tomas", "/tasks?user_id=tomas"),
        ("", "/jobs"),
    ):
        answer = client.get("/find", params={"q": text})
        assert (answer.status_code, answer.headers["location"]) == (303, path), text
    assert "Nothing found for “no such thing”" in read(client, "/find?q=no such thing").text


def test_a_search_lists_jobs_items_tasks_users_workers_and_causes(client: TestClient, stage: Stage):
    for text, expected in (
        ("inv-2025-00000", (f"/jobs/{INVOICES}/items/inv-2025-000003", "the first 10")),
        ("worker-", ("/workers#worker-a", "Workers")),
        ("extract_text", (f"/jobs/{INVOICES}", "docjobs:extract_text")),
        ("tom", ("/tasks?user_id=tomas", "Users")),
        ("timed out", (f"/jobs/{INVOICES}/items?state=dead&cause=", "UpstreamTimeout")),
    ):
        answer = client.get("/find", params={"q": text})
        if answer.status_code == 303:  # the only result
            assert any(answer.headers["location"].startswith(one) for one in expected), text
        else:
            assert all(one in html.unescape(answer.text) for one in expected), text


def test_filters_show_counts_and_a_cause_of_several_jobs_is_listed_once_with_its_jobs(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    bad = Failure("OSError", "disk full", "jobs.py:3 in write")
    with Ledger.open(url) as ledger:
        for name, count in (("first", 3), ("second", 2)):
            job = ledger.create(name, max_retries=0)
            job.register([NewItem(idx, "{}", f"{name}-{idx}") for idx in range(4)])
            hold = ledger.hold(job, {"workers": 1})
            job.record([Failed(idx, bad) for idx in range(count)], hold=hold)
            ledger.release(hold, "interrupted")
    stage = Stage(url)
    client = client_of(stage)
    page = read(client, "/dead")
    assert "5 items failed permanently, with 1 cause" in page.text
    assert "first: 3 items" in page.text
    assert "second: 2 items" in page.text
    assert "any (5)" in page.text
    filtered = read(client, "/dead?job=second").text
    assert "2 items failed permanently, with 1 cause" in filtered
    assert "first: 3 items" not in filtered
    assert "All 5 causes" not in read(client, "/").text
    assert "interrupted (2)" in read(client, "/jobs?state=interrupted").text
    assert "OSError, disk full (3 dead)" in read(client, "/jobs/first/items").text
    stage.site.close()


# ---------------------------------------------------------------------------------------------------------------------
# Who may see what


def test_a_viewer_gets_no_form_that_changes_anything(client: TestClient, stage: Stage):
    for role, there in (("viewer", False), ("operator", True)):
        stage.role = role  # type: ignore[assignment]  # one of the roles
        forms = [form for path in PATHS for form in read(client, path).all("form") if form.get("method") == "post"]
        assert bool(forms) is there


def test_for_a_person_of_an_application_nothing_exists_but_their_own_tasks(client: TestClient, stage: Stage):
    reader = stage.site.reader
    mine, others = reader.tasks(user_id="teo").tasks[0].id, reader.tasks(user_id="ana").tasks[0].id
    stage.role, stage.name = "user", "teo"
    assert client.get("/").headers["location"] == "/me"
    read(client, f"/tasks/{mine}")
    read(client, f"/tasks/{others}", status=404)
    for path in (*PATHS, "/find?q=ads"):
        if path != "/me" and not path.startswith("/?") and path != "/":
            page = read(client, path, status=404)
            assert INVOICES not in page.text


# ---------------------------------------------------------------------------------------------------------------------
# Odd input, and a store that is away


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/jobs/nope", 404), ("/jobs/nope/items", 404), (f"/jobs/{INVOICES}/items/nope", 404), ("/queues/nope", 404),
        ("/tasks/nope", 404), ("/states/nope", 404), ("/jobs/" + "x" * 2000, 400), (f"/jobs/{INVOICES}/items?state=odd", 400),
        (f"/jobs/{INVOICES}/items?from=-1", 400), (f"/jobs/{INVOICES}/items?from=99999999999999999999", 400),
        (f"/jobs/{INVOICES}/items?cause=x", 400), ("/jobs?state=odd", 400), ("/tasks?status=odd", 400),
        ("/activity?before=x", 400), ("/?range=odd", 200), ("/jobs?q=%25_!", 200), ("/tasks?before=gone", 404),
        ("/jobs?after=gone", 404), ("/jobs?order=created", 200), ("/jobs/%3Cscript%3E", 400),
    ],
)  # fmt: skip
def test_odd_addresses_get_one_clear_answer(client: TestClient, path: str, status: int):
    page = read(client, path, status=status)
    assert page.all("h1")


def test_hostile_text_is_text_everywhere(tmp_path: Path):
    """Keys, errors, functions, workers, reasons, actors: whoever can write them must not write pages."""
    url = f"sqlite:///{tmp_path}/hostile.db"
    scene.odd(url, HOSTILE)
    stage = Stage(url, name=HOSTILE, role="admin", flash=Flash("failed", HOSTILE))
    client = TestClient(stage.app())
    for path in scene.odd_paths(stage.site.reader):
        answer = client.get(path, params={"q": HOSTILE} if path == "/jobs" else {})
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text, path
        assert "<img" not in answer.text, path
        for tag, attributes in Page(answer.text).tags:
            assert "onerror" not in attributes, (path, tag)
    stage.site.close()


def test_a_store_that_is_away_is_not_shown_as_an_empty_one(tmp_path: Path):
    stage = Stage(f"sqlite:///{tmp_path}/nowhere/headway.db")
    client = TestClient(stage.app())
    answer = client.get("/")
    assert answer.status_code in (404, 503)
    page = Page(answer.text)
    assert "attention" not in page.text
    assert "Nothing" not in page.text
    stage.site.close()


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_style_sheet_and_scripts_may_be_kept_for_ever_because_their_names_change_with_them(client: TestClient):
    name = Assets().path("app.css")
    plain = client.get(name, headers={"accept-encoding": "identity"})
    packed = client.get(name, headers={"accept-encoding": "gzip"})
    assert plain.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert plain.headers["content-type"].startswith("text/css")
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert client.get("/static/app.css").status_code == 404
    assert client.get("/static/..%2f__init__.py").status_code == 404


def test_charts_number_the_changes_that_may_explain_them(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/headway.db"
    scene.lively(url, items=300)
    with Ledger.open(url) as ledger:
        ledger.note("queue.set", "", {"setting": "timeout", "value": "5"}, actor="ana")
    stage = Stage(url)
    client = client_of(stage)
    for path, there, absent in (
        ("/", ("timeout set to 5 by ana",), ()),
        (f"/jobs/{INVOICES}", ("timeout set to 5 by ana", "run 1 died"), ("queue low paused",)),
        ("/queues/low", ("timeout set to 5 by ana", "queue low paused"), ("run 1 died",)),
        ("/queues/high", ("timeout set to 5 by ana",), ("queue low paused",)),
    ):
        text = client.get(path).text
        listed = re.findall(r'<ol class="marks">(.*?)</ol>', text)[0]
        assert [one for one in there if one not in listed] == []
        assert [one for one in absent if one in listed] == []
        assert text.count('class="mk"') == listed.count("<b>")
    stage.site.close()

"""The pages in a real browser: accessible in every theme and width, by keyboard, live, and honest when there is no news."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Self
from zoneinfo import ZoneInfo

import pytest
import uvicorn
from axe_playwright_python.base import AXE_FILE_PATH  # type: ignore[import-untyped]  # it has no types
from playwright.sync_api import Browser, Page, Response, expect, sync_playwright

from headway import local_servers
from headway._sql import connect
from headway.ledger import Done, Ledger
from headway.web import ticket
from headway.web.auth import tokens
from headway.web.site import Flash
from tests.services.chromium import find
from tests.services.waiting import eventually
from tests.web import scene
from tests.web.conftest import Servers, Web, make_tokens
from tests.web.scene import INVOICES
from tests.web.stage import Stage

PATHS = (
    "/", "/jobs", f"/jobs/{INVOICES}", f"/jobs/{INVOICES}/items?state=dead&cause=2", f"/jobs/{INVOICES}/items/DEAD", "/dead",
    "/queues", "/queues/urgent", "/workers", "/tasks?status=QUEUED&queue=urgent", "/tasks/FAILED", "/me", "/projects",
    "/states", "/states/nightly", "/performance", "/alerts", "/activity", "/about", "/jobs/nope",
)  # fmt: skip
#: The checker itself; a page gets it once and is looked at several times.
AXE = AXE_FILE_PATH.read_text("utf-8")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The machine's Chromium; make test installs one where there is none."""
    path = find()
    if path is None:
        pytest.skip("no Chromium on PATH; install it: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Served:
    """A stage on a port of its own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.server = uvicorn.Server(uvicorn.Config(stage.app(), port=0, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> Self:
        self.thread.start()
        eventually(lambda: self.server.started, timeout=30)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(10)
        self.stage.site.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path_factory.mktemp('browser')}/headway.db"
    scene.lively(url, items=3000)
    with Served(Stage(url)) as made:
        yield made


@pytest.fixture
def stage(served: Served) -> Stage:
    stage = served.stage
    stage.role, stage.name, stage.silent, stage.away = "admin", "teo", False, ""
    return stage


class Visit:
    """One tab, with what went wrong in it."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.context = browser.new_context(base_url=address, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def whole(path: str, stage: Stage) -> str:
    """A path with what its names stand for."""
    reader = stage.site.reader
    if "FAILED" in path:
        path = path.replace("FAILED", reader.tasks(status="FAILED").tasks[0].id)
    if "DEAD" in path:
        letters = reader.dead_items(INVOICES, limit=1).causes[0].items
        path = path.replace("DEAD", str(letters[0].idx))  # type: ignore[index]  # they were asked for
    return path


LOOKS: tuple[tuple[str, int, list[str] | None], ...] = (
    # theme, width, rules of axe (None: all; else those that may come out otherwise than before, or with a minus all but one:
    # colours are the same at every width, and to compare them takes longer than all the rest)
    ("light", 1280, None),
    ("dark", 1280, ["color-contrast", "link-in-text-block"]),
    ("light", 390, ["-color-contrast"]),
    # Only whether it fits: a tablet both ways, the narrowest with tables, 1280 px at 200 %, the narrowest phone.
    ("light", 1024, []),
    ("light", 820, []),
    ("light", 701, []),
    ("light", 640, []),
    ("light", 320, []),
)


def look(page: Page, theme: str, width: int, rules: list[str] | None) -> list[str]:
    """What is wrong with a page as it is seen so."""
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # type: ignore[arg-type]  # light or dark
    page.set_viewport_size({"width": width, "height": 800})
    wide = page.evaluate("document.documentElement.scrollWidth")
    wrong = [f"it is {wide} px wide"] if wide > width else []
    if rules != []:
        options: dict[str, Any] = {"resultTypes": ["violations"]}
        if rules and rules[0].startswith("-"):
            options["rules"] = {rule[1:]: {"enabled": False} for rule in rules}
        elif rules:
            options["runOnly"] = {"type": "rule", "values": rules}
        found = page.evaluate("options => axe.run(document, options)", options)
        wrong += [f"{one['id']}: {one['nodes'][0]['html'][:160]}" for one in found["violations"]]
    return wrong


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_accessible_in_both_themes_and_every_width(
    chromium: Browser, served: Served, stage: Stage, path: str
):
    with Visit(chromium, served.address) as visit:
        visit.page.goto(whole(path, stage))
        visit.page.evaluate(AXE)
        found = {
            f"{theme} {width}": wrong
            for theme, width, rules in LOOKS
            if (wrong := look(visit.page, theme, width, rules))
        }
        wrong = [text for text in visit.wrong if "404" not in text]  # of the page that is not there
        assert (found, wrong) == ({}, [])
        assert {url.split("/")[2] for url in visit.asked if url.startswith("http")} == {served.address.split("/")[2]}


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("path", ["/", f"/jobs/{INVOICES}", "/jobs/nightly-export", "/dead", "/queues", "/alerts"])
def test_a_first_load_is_few_requests_and_bytes_and_nothing_jumps(
    chromium: Browser, served: Served, stage: Stage, path: str, width: int
):
    with Visit(
        chromium, served.address, viewport={"width": width, "height": 844}, timezone_id="America/New_York"
    ) as visit:
        sent: list[Response] = []
        visit.page.on("response", lambda answer: sent.append(answer))  # noqa: PLW0108 - it marks what it is given
        visit.page.add_init_script(
            "window.shifted = 0; new PerformanceObserver(list => { for (const entry of list.getEntries()) "
            "window.shifted += entry.value; }).observe({type: 'layout-shift', buffered: true});"
        )
        visit.page.goto(path)
        expect(visit.page.locator(".live")).to_have_text("Live")
        first = list(sent)
        assert len(first) <= 8
        assert sum(len(answer.body()) for answer in first) <= 61_440
        visit.page.reload()
        expect(visit.page.locator(".live")).to_have_text("Live")
        visit.page.wait_for_timeout(500)  # what it draws once it hears something is drawn
        assert visit.page.evaluate("window.shifted") <= 0.02


def test_numbers_move_without_a_reload_and_together_with_their_bar(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit, Ledger.open(stage.url) as ledger:
        visit.page.goto("/jobs")
        expect(visit.page.locator(".live")).to_have_text("Live")
        row = visit.page.locator("tr", has_text="nightly-export")
        before = row.locator(".f-done").get_attribute("width")
        expect(row.locator("[data-v$='/done']")).to_have_text("310")
        ledger.job("nightly-export").record([Done(idx) for idx in range(310, 630)])
        expect(row.locator("[data-v$='/done']")).to_have_text("630")
        expect(row.locator("[data-v$='/percent']")).to_have_text("78.8%")
        assert float(row.locator(".f-done").get_attribute("width") or 0) > float(before or 0)
        assert not visit.wrong


def test_a_page_without_news_says_so_within_six_seconds_and_recovers(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit:
        visit.page.clock.install()
        visit.page.goto("/")
        visit.page.clock.run_for(1000)
        expect(visit.page.locator(".live")).to_have_text("Live")
        expect(visit.page.locator("#stale")).to_be_hidden()
        stage.silent = True
        visit.page.wait_for_timeout(300)  # what was under way has arrived
        visit.page.clock.run_for(7500)
        expect(visit.page.locator("#stale")).to_be_visible()
        expect(visit.page.locator(".live")).to_contain_text("No data for")
        expect(visit.page.locator("body")).to_have_class("stale")
        stage.silent = False
        visit.page.wait_for_timeout(300)
        visit.page.clock.run_for(1500)
        expect(visit.page.locator("#stale")).to_be_hidden()
        expect(visit.page.locator(".live")).to_have_text("Live")


def test_a_store_that_is_away_is_said_in_red_and_nothing_is_green(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit:
        visit.page.goto("/")
        expect(visit.page.locator(".live")).to_have_text("Live")
        assert greens(visit.page)
        stage.away = "The database does not answer."
        expect(visit.page.locator("#stale")).to_contain_text("The database does not answer.")
        expect(visit.page.locator(".live")).to_have_text("Store unreachable")
        assert greens(visit.page) == []


def greens(page: Page) -> list[str]:
    """Marks that are drawn in the colour of what goes well, outside the legends."""
    found: list[str] = page.evaluate(
        "() => { const probe = document.body.appendChild(Object.assign(document.createElement('i'), {className: 'k k-done'}));"
        "const well = getComputedStyle(probe, '::before').backgroundColor; probe.remove();"
        "return [...document.querySelectorAll('.live, main td .s, main li .s, main h1.s')].filter(mark => "
        "getComputedStyle(mark, '::before').backgroundColor === well).map(mark => mark.outerHTML.slice(0, 80)) }"
    )
    return found


def test_what_an_operator_does_works_by_keyboard(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit:
        page = visit.page
        page.goto("/")
        page.keyboard.press("/")
        page.keyboard.type("inv-2025-000003")
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/jobs/{INVOICES}/items/inv-2025-000003")
        page.keyboard.press("g")
        page.keyboard.press("d")
        page.wait_for_url("**/dead")
        opener = page.get_by_role("button", name="Retry").first
        opener.focus()
        page.keyboard.press("Enter")
        dialog = page.locator("dialog[open]")
        expect(dialog).to_contain_text("Attempts restart from 0")
        expect(dialog.locator("form")).to_have_attribute("action", "/actions/retry")
        page.keyboard.press("Escape")
        expect(page.locator("dialog[open]")).to_have_count(0)
        expect(opener).to_be_focused()
        page.goto("/jobs")
        page.keyboard.press("j")
        expect(page.locator("tbody th a").first).to_be_focused()
        page.goto("/about")
        page.get_by_role("button", name="Disable single-key shortcuts").click()
        page.keyboard.press("g")
        page.keyboard.press("d")
        expect(page).to_have_url(f"{served.address}/about")
        assert not visit.wrong


def test_the_item_map_is_read_by_arrow_keys_and_leads_to_its_items(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit:
        page = visit.page
        page.goto(f"/jobs/{INVOICES}")
        page.locator("svg.wide").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".map .say")).to_contain_text("Items 5 to 9")
        page.keyboard.press("x")
        expect(page.locator(".map .say")).to_contain_text("dead")
        page.keyboard.press("Enter")
        page.wait_for_url("**/items?from=*&state=dead")
        expect(page.locator("h1")).to_contain_text("items dead")
        expect(page.locator("tbody tr").first).to_contain_text("inv-2025-")


def test_without_a_script_a_page_is_whole_and_a_dialog_still_opens(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address, java_script_enabled=False) as visit:
        page = visit.page
        page.goto("/")
        expect(page.locator(".live")).to_contain_text("Snapshot")
        expect(page.locator("h1")).to_contain_text("attention")
        expect(page.locator("svg.ch")).to_be_visible()
        expect(page.locator("[data-theme-toggle]")).to_be_hidden()
        page.goto("/dead")
        page.get_by_role("button", name="Retry").first.click()
        expect(page.locator("dialog").first).to_be_visible()


def test_the_chosen_theme_stays(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address, color_scheme="light") as visit:
        visit.page.goto("/about")
        visit.page.get_by_role("button", name="Switch to the dark theme").click()
        visit.page.goto("/jobs")
        expect(visit.page.locator("html")).to_have_attribute("data-theme", "dark")


def test_the_login_and_the_errors_are_pages_like_the_others(chromium: Browser, closed: Web):
    with Visit(chromium, closed.address) as visit:
        page = visit.page

        def looked_at() -> dict[str, list[str]]:
            page.evaluate(AXE)
            return {
                f"{theme} {width}": wrong for theme, width, rules in LOOKS if (wrong := look(page, theme, width, rules))
            }

        page.goto("/jobs?state=dead")
        assert looked_at() == {}
        page.get_by_label("Token").fill("hw_000000000000_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("Unknown or expired token.")
        assert looked_at() == {}
        assert visit.wrong == []
        page.get_by_label("Token").fill(closed.tokens["viewer"])
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs?state=dead")
        for path, text in (
            ("/nothing", "There is no page /nothing"),
            ("/actions/retry", "does not support GET"),
        ):
            page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_contain_text(text)
            expect(page.get_by_role("link", name="Overview", exact=True)).to_be_visible()
            assert looked_at() == {}


def test_a_page_that_was_loaded_while_the_store_was_away_says_so_once_and_becomes_whole_by_itself(
    chromium: Browser, serve: Servers, database: str
):
    web = serve("--no-auth", "--database", database)
    path = Path(database.removeprefix("sqlite:///"))
    files = [path, Path(f"{path}-wal"), Path(f"{path}-shm")]
    with Visit(chromium, web.address) as visit:
        page = visit.page
        page.goto("/")
        page.get_by_text("Live", exact=True).wait_for()
        for file in files:
            file.rename(f"{file}-away")
        eventually(lambda: web.ask("/readyz").status == 503)
        page.goto("/jobs")
        page.get_by_text("Store unreachable").first.wait_for()
        page.locator(".live", has_text="Store unreachable").wait_for()
        assert page.get_by_role("alert").filter(visible=True).count() == 1
        for file in files:
            Path(f"{file}-away").rename(file)
        page.get_by_role("link", name="ads", exact=True).wait_for()


@pytest.mark.parametrize("how", ["while it is open", "while the server is away"])
def test_a_page_of_somebody_who_is_not_known_any_more_leads_to_the_login(
    chromium: Browser, serve: Servers, database: str, how: str
):
    """It would say for ever that it is disconnected and trying again."""
    made = make_tokens(database)
    web = serve("--database", database)
    with Visit(chromium, web.address) as visit:
        page = visit.page
        page.goto("/jobs")
        page.get_by_label("Token").fill(made["viewer"])
        page.keyboard.press("Enter")
        page.get_by_text("Live", exact=True).wait_for()
        if how != "while it is open":
            web.kill()
        with connect(database) as store:
            tokens.revoke(store, made["viewer"].split("_")[1], by="test")
        if how != "while it is open":
            serve("--database", database, "--port", web.address.rpartition(":")[2])
        page.wait_for_url("**/login?next=/jobs", timeout=30_000)
        assert page.get_by_label("Token").is_visible()


def test_the_printed_link_opens_a_session_once_and_another_site_cannot_replace_it(
    chromium: Browser, serve: Servers, database: str, tmp_path: Path
):
    """127.0.0.1 and localhost are two sites to a browser: it withholds strict cookies on the way from one to the other."""
    web = serve("--database", database, env={"HEADWAY_WEB_KEYS": "k" * 32})
    host, _, port = web.host.rpartition(":")
    server = local_servers.find(host, int(port))
    assert server is not None
    evil = f"{web.address}/enter?next=/jobs&ticket={ticket('mallory', 'viewer', key='k' * 32)}"
    with Visit(chromium, web.address) as visit:
        page = visit.page
        page.goto(server.link("/jobs"))
        page.wait_for_url("**/jobs")
        page.get_by_role("link", name="ads", exact=True).wait_for()
        page.goto(f"http://localhost:{port}/login")
        page.evaluate("address => { location.href = address; }", evil)
        page.get_by_role("heading", name="Continue as mallory?").wait_for()
        page.get_by_role("link", name="Stay logged in").click()
        page.wait_for_url(f"{web.address}/")
        assert "local" in page.content()
        page.goto(f"http://localhost:{port}/login")
        page.evaluate("address => { location.href = address; }", evil)
        page.get_by_role("button", name="Continue as mallory").click()
        page.wait_for_url(f"{web.address}/jobs")
        assert "mallory" in page.content()


#: Right to left against the rest, letters of two directions, a family of emoji, and no place to break a line.
ODD = (
    "\N{RIGHT-TO-LEFT OVERRIDE}odd \N{ARABIC LETTER MEEM}\N{ARABIC LETTER REH} "
    + "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}" * 10
    + "W" * 480
)


#: The titles of the dialogs of a page that are wider inside than outside, or whose parts do not stand below each other.
SQUEEZED_DIALOGS = """[...document.querySelectorAll("dialog")].filter(dialog => {
    dialog.showModal();
    const parts = [...dialog.querySelectorAll("h2, ul, label, .row")];
    const squeezed = dialog.scrollWidth > dialog.clientWidth || parts.some(part => part.offsetWidth < dialog.clientWidth - 60);
    dialog.close();
    return squeezed;
}).map(dialog => dialog.querySelector("h2").textContent)"""


def test_no_text_makes_a_page_wider_than_its_window(chromium: Browser, tmp_path: Path):
    """Whoever names a key, a worker or a reason must not push what stands beside it out of sight."""
    url = f"sqlite:///{tmp_path}/odd.db"
    scene.odd(url, ODD)
    wrong = []
    with (
        Served(Stage(url, role="admin", name=ODD, flash=Flash("failed", ODD))) as served,
        Visit(chromium, served.address) as visit,
    ):
        for path in scene.odd_paths(served.stage.site.reader):
            visit.page.goto(path)
            for width in (1440, 820, 390, 320):
                visit.page.set_viewport_size({"width": width, "height": 800})
                wide = visit.page.evaluate("document.documentElement.scrollWidth")
                wrong += [f"{path} at {width} px is {wide} px wide"] if wide > width else []
                wrong += [f"{path} at {width} px: {title}" for title in visit.page.evaluate(SQUEEZED_DIALOGS)]
    assert not wrong


@pytest.mark.parametrize(
    ("zone", "said"),
    [("UTC", "UTC"), ("Asia/Kolkata", "UTC+05:30"), ("America/New_York", "UTC-05:00")],
)
def test_times_are_local_until_utc_is_chosen_and_utc_without_a_script(
    chromium: Browser, served: Served, stage: Stage, zone: str, said: str
):
    stage.silent = True
    with Visit(chromium, served.address, timezone_id=zone) as visit:
        page = visit.page
        page.clock.set_fixed_time("2026-11-17T04:00:00Z")  # winter in New York
        page.goto("/")
        expect(page.locator("#zone")).to_have_text(said)
        utc = page.locator("#asof time").get_attribute("data-utc") or page.locator("#asof time").inner_text()
        there = datetime.fromtimestamp(int(page.locator("#asof time").get_attribute("data-t") or 0), ZoneInfo(zone))
        assert page.locator("#asof time").inner_text().endswith(f"{there:%H:%M:%S}")
        if zone == "UTC":
            expect(page.locator("[data-zone]")).to_have_count(0)
        else:
            page.get_by_role("button", name="Show UTC").click()
            expect(page.locator("#zone")).to_have_text("UTC")
            expect(page.locator("#asof time")).to_have_text(utc)
            page.reload()
            expect(page.locator("[data-zone]")).to_have_text("Show local time")  # the choice is remembered
    with Visit(chromium, served.address, timezone_id=zone, java_script_enabled=False) as visit:
        visit.page.goto("/jobs")
        assert re.search(r"Snapshot \d\d:\d\d:\d\d UTC", visit.page.locator(".live").inner_text())
        assert "Times are UTC" in visit.page.locator("footer").inner_text()


@pytest.mark.parametrize("path", ["/", f"/jobs/{INVOICES}", "/queues/normal", "/performance"])
def test_a_chart_tells_its_values_to_the_pointer_and_to_the_keyboard(
    chromium: Browser, served: Served, stage: Stage, path: str
):
    with Visit(chromium, served.address) as visit:
        chart, tip = visit.page.locator("[data-chart]").first, visit.page.locator(".tipbox")
        visit.page.goto(path)
        chart.hover(position={"x": 40, "y": 60})
        expect(tip).to_have_text(re.compile(r": [\d,]+ (succeeded|items|completed|tasks|task|job)"))
        first = tip.inner_text()
        visit.page.mouse.move(0, 0)
        expect(tip).to_be_hidden()
        chart.focus()
        visit.page.keyboard.press("Home")
        visit.page.keyboard.press("ArrowRight")
        expect(chart).to_have_attribute("aria-valuenow", "1")
        assert (chart.get_attribute("aria-valuetext") or "") == tip.inner_text()
        assert first
        assert not visit.wrong


def test_typed_text_survives_a_lost_connection(chromium: Browser, served: Served, stage: Stage):
    with Visit(chromium, served.address) as visit:
        page = visit.page
        page.goto("/queues")
        page.get_by_role("button", name="Pause normal").click()
        page.locator("dialog[open] [name=reason]").fill("disk is full")
        page.route("**/readyz", lambda route: route.abort())
        page.locator("dialog[open]").get_by_role("button", name="Pause").click()
        expect(page.locator("dialog[open] .unsent")).to_contain_text("Your input is kept")
        assert page.locator("dialog[open] [name=reason]").input_value() == "disk is full"


def test_the_way_back_from_a_filtered_list_shows_the_filter_that_the_list_has(
    chromium: Browser, served: Served, stage: Stage
):
    with Visit(chromium, served.address) as visit:
        page = visit.page
        page.goto("/jobs")
        page.locator("main select[name=state]").select_option("completed")
        page.locator("main").get_by_role("button", name="Filter").click()
        expect(page.locator("h1")).to_have_text("Completed jobs")
        page.go_back()
        expect(page.locator("h1")).to_have_text("Jobs")
        assert page.locator("main select[name=state]").input_value() == ""
        page.go_forward()
        expect(page.locator("h1")).to_have_text("Completed jobs")
        assert page.locator("main select[name=state]").input_value() == "completed"


def test_printed_from_a_dark_screen_a_page_is_black_on_white_and_has_no_buttons(
    chromium: Browser, served: Served, stage: Stage
):
    with Visit(chromium, served.address, color_scheme="dark") as visit:
        page = visit.page
        page.goto("/")
        page.emulate_media(media="print", color_scheme="dark")
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        assert sum(map(int, re.findall(r"\d+", ink)[:3])) < 150
        assert sum(map(int, re.findall(r"\d+", paper)[:3])) > 700
        assert page.locator("main .btn:visible").count() == 0


@pytest.mark.parametrize("width", [320, 390, 768, 1024, 1440, 1920])
def test_no_button_or_link_lies_over_another_one(chromium: Browser, served: Served, stage: Stage, width: int):
    with Visit(chromium, served.address, viewport={"width": width, "height": 900}) as visit:
        for path in ("/", f"/jobs/{INVOICES}", "/queues", "/alerts", "/workers", "/tasks"):
            visit.page.goto(path)
            assert visit.page.evaluate(OVERLAPS) == [], path


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll("main :is(a, button, .s, .tx), .top :is(a, button, input, .live)")]
    .filter(one => one.checkVisibility({visibilityProperty: true}) && !one.closest("dialog"))
    .map(one => ({one, box: one.getBoundingClientRect()})).filter(({box}) => box.width && box.height);
  const found = [];
  for (const [i, {one, box}] of boxes.entries()) for (const {one: other, box: there} of boxes.slice(i + 1)) {
    if (one.contains(other) || other.contains(one) || one.closest("nav") !== other.closest("nav")) continue;
    const wide = Math.min(box.right, there.right) - Math.max(box.left, there.left);
    const tall = Math.min(box.bottom, there.bottom) - Math.max(box.top, there.top);
    if (wide > 2 && tall > 4) found.push(`${one.textContent.trim()} / ${other.textContent.trim()}`);
  }
  return found;
}"""

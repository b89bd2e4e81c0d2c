"""Rows of a live page: each stays what it is, and stands still while somebody uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from headway.core.failure import Failure
from headway.ledger import Failed, Ledger, NewItem
from tests.web import scene
from tests.web.stage import Stage
from tests.web.test_browser import Served, Visit
from tests.web.test_browser import chromium as chromium  # noqa: PLC0414 - the fixture

#: Milliseconds after which each page has asked for itself again.
REFRESHED = 20_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    url = f"sqlite:///{tmp_path}/headway.db"
    with Ledger.open(url) as ledger:
        job = ledger.create("ads", max_retries=0)
        job.register([NewItem(idx, "{}", None, idx) for idx in range(60)])
    die(url, "MemoryError", range(9))
    die(url, "TimeoutError", range(10, 14))
    with Served(Stage(url, role="admin")) as made:
        yield made


def die(url: str, type: str, items: range) -> None:
    with Ledger.open(url) as ledger:
        ledger.job("ads").record([Failed(idx, Failure(type, "it broke", f"{type}.py:f")) for idx in items])


def order(page: Page) -> list[str]:
    return page.locator(".cz .what b").all_inner_texts()


def top(page: Page, text: str) -> float:
    box = page.locator(".cz, tbody tr", has_text=text).bounding_box()
    assert box is not None
    return box["y"]


def test_a_row_that_is_open_and_focused_stays_the_same_cause_in_its_place(chromium: Browser, served: Served):
    with Visit(chromium, served.address) as visit:
        page = visit.page
        page.clock.install()
        page.goto("/dead")
        memory = page.locator(".cz", has_text="MemoryError")
        memory.locator("summary").click()
        memory.locator("summary").click()  # the first one is unfolded from the start
        page.mouse.move(2, 2)
        expect(memory.locator("summary")).to_be_focused()
        before = top(page, "MemoryError")
        die(served.stage.url, "TimeoutError", range(14, 30))  # now the largest
        die(served.stage.url, "ValueError", range(30, 50))  # and a larger one that was not there
        page.clock.run_for(REFRESHED)
        expect(page.locator("#held")).to_be_visible()
        expect(page.locator(".cz", has_text="TimeoutError").locator(".big")).to_have_text("20")
        assert order(page) == ["MemoryError", "TimeoutError"]
        assert top(page, "MemoryError") == before
        assert page.evaluate("document.activeElement.innerText").splitlines()[1] == "MemoryError"
        expect(memory.locator("details")).to_have_attribute("open", "")
        page.keyboard.press("r")
        expect(page.locator("dialog[open] h2")).to_have_text("Retry 9 dead letters of MemoryError in ads")
        page.keyboard.press("Escape")
        memory.locator("summary").focus()
        page.locator("#held").click()
        expect(page.locator("#held")).to_be_hidden()
        assert order(page) == ["TimeoutError", "ValueError", "MemoryError"]
        expect(memory.locator("details")).to_have_attribute("open", "")
        expect(page.locator(".cz", has_text="TimeoutError").locator("details")).not_to_have_attribute("open", "")
        for type in order(page):
            page.locator(".cz", has_text=type).get_by_role("button", name="Retry").click()
            expect(page.locator("dialog[open] h2")).to_contain_text(f"of {type} in ads")
            page.keyboard.press("Escape")
        assert not visit.wrong


def test_no_row_moves_under_the_pointer_and_one_that_is_gone_is_marked(chromium: Browser, served: Served):
    with Visit(chromium, served.address) as visit, Ledger.open(served.stage.url) as ledger:
        for name in ("alpha", "beta", "gamma"):
            ledger.create(name)
        page = visit.page
        page.clock.install()
        page.goto("/jobs")
        rows = page.locator("tbody tr th b")
        expect(rows.first).to_have_text("gamma")
        page.locator("tbody tr", has_text="beta").hover()
        before = top(page, "beta")
        scene.change(ledger.database, "UPDATE jobs SET updated_at = updated_at + 60 WHERE id = 'alpha'")
        ledger.create("delta")
        ledger.forget("gamma", actor="test")
        page.clock.run_for(REFRESHED)
        expect(page.locator("#held")).to_be_visible()
        assert rows.all_inner_texts() == ["gamma", "beta", "alpha", "ads"]
        assert top(page, "beta") == before
        assert page.locator("[data-gone]").get_attribute("data-key") == "gamma"
        page.mouse.move(2, 2)
        page.clock.run_for(2_000)
        expect(page.locator("#held")).to_be_hidden()
        assert rows.all_inner_texts() == ["alpha", "delta", "beta", "ads"]
        assert not visit.wrong

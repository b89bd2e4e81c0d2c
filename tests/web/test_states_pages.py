"""States of a job with many tasks: page by page, through the API, the client and the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.client import Client
from headway.config import Config
from headway.errors import InvalidInput
from headway.states import Manager, open_store
from headway.views import states as view
from headway.views.reading import Reader
from tests.web.conftest import Servers, make_tokens

TASKS = 130


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/states.db"
    store, _ = open_store(url, "nightly", TASKS)
    managers = [Manager("nightly", task, TASKS, store) for task in range(TASKS)]
    for manager in managers:
        manager.set_started("ingest", payload={"rows": "x" * 1000})
    managers[0].close()  # and with it the store that all share
    return url


def test_states_are_read_page_by_page_and_each_page_is_bounded(
    url: str, serve: Servers, monkeypatch: pytest.MonkeyPatch
):
    with Reader(Config(cli={"database": url, "states": url})) as reader:
        whole = reader.states("nightly")
        monkeypatch.setattr(view, "PAGE_BYTES", 20_000)
        first = reader.states("nightly", limit=1000)
        assert 15 <= len(first.states) <= 25
        assert first.counts == whole.counts
        with pytest.raises(InvalidInput, match="not the end of a page"):
            reader.states("nightly", after="x", limit=1)
    token = make_tokens(url)["admin"]
    web = serve("--database", url)
    seen, after = list[int](), ""
    while True:
        page = web.ask(f"/api/v1/states/nightly?limit=50{after}", token=token).json
        assert len(page["states"]) <= 50
        seen += [state["task_id"] for state in page["states"]]
        if page["next_after"] is None:
            break
        after = f"&after={page['next_after']}"
    assert seen == list(range(TASKS))
    monkeypatch.setattr("headway.client.client.PAGE", 40)
    with Client(web.address, token) as client:
        assert client.states("nightly").as_json() == whole.as_json()
    shown, path = list[str](), "?from=0"
    while path:
        html = web.ask(f"/states/nightly{path}", token=token).text
        shown += re.findall(r'<th scope="row">(\d+)</th>', html)
        path = next(iter(re.findall(r'href="(\?from=\d+)">Next page', html)), "")
    assert shown == [str(task) for task in range(TASKS)]
    assert "All tasks by number" in web.ask("/states/nightly", token=token).text


def test_a_matrix_of_many_tasks_is_compact_and_starts_with_the_worst(tmp_path: Path, serve: Servers):
    url = f"sqlite:///{tmp_path}/many.db"
    store, _ = open_store(url, "nightly", 64)
    managers = [Manager("nightly", task, 64, store) for task in range(64)]
    for manager in managers:
        for tag in ("fetch", "parse", "clean", "embed", "index", "check"):
            manager.set_state(tag, status=40)
    managers[41].set_error("disk full", "embed")
    managers[17].set_warning("slow", "clean")
    managers[0].close()
    html = serve("--no-auth", "--database", url).ask("/states/nightly").text
    rows = re.findall(r'<th scope="row">(\d+)</th>', html)
    assert rows[:3] == ["41", "17", "0"]
    assert len(rows) == 64
    assert 'class="mx dense pl"' in html

"""Pictures of every page of the dashboard, of a made-up installation: python tools/screenshots.py [DIRECTORY] [NAME ...]

Each page is taken in the light and the dark theme, on a desk, a tablet and a phone; so are an installation without news,
one that needs nobody, an empty one, and a dialog. Look at them, one by one, after changing a page. With ``--readme`` only
those that the README shows are taken, at the size it shows them: into docs/pictures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import uvicorn  # noqa: E402 - the project is on the path only now
from playwright.sync_api import Browser, sync_playwright  # noqa: E402 - the same

from headway.alerts import Evaluator, Rules  # noqa: E402 - the same
from headway.ledger import Ledger  # noqa: E402 - the same
from tests.services.chromium import find  # noqa: E402 - the same
from tests.web import scene  # noqa: E402 - the same
from tests.web.stage import Stage  # noqa: E402 - the same

PAGES = {
    "overview": "/", "jobs": "/jobs", "job": f"/jobs/{scene.INVOICES}", "job-completed": "/jobs/thumbnails-october",
    "items": f"/jobs/{scene.INVOICES}/items?state=dead", "item": f"/jobs/{scene.INVOICES}/items/DEAD", "dead": "/dead",
    "queues": "/queues", "queue": "/queues/normal", "workers": "/workers", "tasks": "/tasks", "task": "/tasks/FAILED",
    "tasks-of-a-cause": "/tasks?cause=1", "queue-paused": "/queues/low",
    "me": "/me", "projects": "/projects", "states": "/states", "states-job": "/states/nightly",
    "performance": "/performance", "alerts": "/alerts", "activity": "/activity", "about": "/about",
    "not-found": "/jobs/nope",
}  # fmt: skip
#: What people forget to design: (path, what the stage does).
ODD = {"stale": "/", "dialog": "/dead", "calm": "/", "empty": "/"}
LOOKS = [(theme, width) for width in (1440, 768, 390) for theme in ("light", "dark")]
#: name -> (page, theme, width, height)
README = {
    "overview": ("overview", "light", 1280, 820),
    "job": ("job", "dark", 1280, 980),
    "me": ("me", "light", 390, 720),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("screenshots"))
    parser.add_argument("names", nargs="*", help=f"pages: {', '.join([*PAGES, *ODD])}")
    parser.add_argument("--items", type=int, default=120_000, help="items of the largest job")
    parser.add_argument("--readme", action="store_true")
    asked = parser.parse_args()
    chromium = find()
    if chromium is None:
        print("There is no Chromium on PATH. Install it: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            url = f"sqlite:///{folder}/headway.db"
            scene.lively(url, items=asked.items)
            scene.go_on(url)
            with served(url) as (stage, address):
                take_readme(browser, stage, address) if asked.readme else take(browser, stage, address, asked)
            for name in ("calm", "empty"):
                if not asked.readme and name in (asked.names or ODD):
                    url = f"sqlite:///{folder}/{name}.db"
                    with Ledger.open(url) as ledger:
                        if name == "calm":
                            scene.thumbnails(ledger)
                    with served(url) as (_, address):
                        shoot(browser, address, "/", name, asked.directory)
        finally:
            browser.close()
    return 0


@contextmanager
def served(url: str) -> Iterator[tuple[Stage, str]]:
    stage = Stage(url, role="admin")
    server = uvicorn.Server(uvicorn.Config(stage.app(), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield stage, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        stage.site.close()


def judge(stage: Stage) -> None:
    """The rules of the alerts, once."""
    limits = {**Rules().limits, "backlog": 50.0, "delay": 120.0}
    evaluator = Evaluator(stage.site.reader.database, Rules(limits=limits, open_after=0.0))
    evaluator.tick()
    evaluator.tick()
    evaluator.close()


def named(stage: Stage, path: str) -> str:
    """A path with the ids that its names stand for."""
    reader = stage.site.reader
    letters = reader.dead_items(scene.INVOICES, limit=1).causes[0].items
    known = {"FAILED": reader.tasks(status="FAILED").tasks[0].id, "DEAD": str(letters[0].idx)}  # type: ignore[index]  # asked for
    for word, value in known.items():
        path = path.replace(word, value)
    return path


def take(browser: Browser, stage: Stage, address: str, asked: argparse.Namespace) -> None:
    for name in asked.names or [*PAGES, "stale", "dialog"]:
        if name in ("calm", "empty"):
            continue
        if name == "alerts":
            judge(stage)
        stage.name = "teo" if name == "me" else "ana"
        stage.away = "The database at db.internal does not answer." if name == "stale" else ""
        shoot(browser, address, named(stage, {**PAGES, **ODD}[name]), name, asked.directory)


def shoot(browser: Browser, address: str, path: str, name: str, folder: Path) -> None:
    """One page in every look."""
    folder.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(reduced_motion="reduce")
    tab = context.new_page()
    tab.goto(address + path)
    tab.locator(".live.s").wait_for()
    if name == "dialog":
        tab.get_by_role("button", name="Retry").first.click()
    for theme, width in LOOKS:
        tab.emulate_media(color_scheme=theme)  # type: ignore[arg-type]  # light or dark
        tab.set_viewport_size({"width": width, "height": 900})
        tab.screenshot(path=folder / f"{name}-{theme}-{width}.png", full_page=name != "dialog")
    context.close()
    print(folder / name)


def take_readme(browser: Browser, stage: Stage, address: str) -> None:
    for name, (page, theme, width, height) in README.items():
        stage.name, stage.role = ("teo", "user") if page == "me" else ("ana", "admin")
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]  # light or dark
        tab = context.new_page()
        tab.goto(address + named(stage, PAGES[page]))
        tab.get_by_text("Live", exact=True).wait_for()
        path = ROOT / "docs" / "pictures" / f"{name}.png"
        tab.screenshot(path=path)
        context.close()
        print(path)


if __name__ == "__main__":
    sys.exit(main())

"""Pictures of every page of the dashboard, of a made-up installation: python tools/screenshots.py [DIRECTORY] [NAME ...]

Each page is taken in the light and the dark theme and on a phone. Look at them, one by one, after changing a page. With
``--readme`` only those that the README shows are taken, at the size it shows them: into docs/pictures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import uvicorn  # noqa: E402 - the project is on the path only now
from playwright.sync_api import Browser, sync_playwright  # noqa: E402 - the same

from tests.services.chromium import find  # noqa: E402 - the same
from tests.web import scene  # noqa: E402 - the same
from tests.web.stage import Stage  # noqa: E402 - the same

PAGES = {
    "overview": "/", "jobs": "/jobs", "job": f"/jobs/{scene.INVOICES}", "job-completed": "/jobs/thumbnails-october",
    "items": f"/jobs/{scene.INVOICES}/items?state=dead", "item": f"/jobs/{scene.INVOICES}/items/DEAD", "dead": "/dead",
    "queues": "/queues", "queue": "/queues/normal", "workers": "/workers", "tasks": "/tasks", "task": "/tasks/FAILED",
    "me": "/me", "projects": "/projects", "states": "/states", "states-job": "/states/nightly",
    "performance": "/performance", "activity": "/activity", "about": "/about", "not-found": "/jobs/nope",
}  # fmt: skip
LOOKS = {"light": ("light", 1440), "dark": ("dark", 1440), "phone": ("light", 390)}
#: name -> (page, theme, width, height)
README = {
    "overview": ("overview", "light", 1280, 820),
    "job": ("job", "dark", 1280, 980),
    "me": ("me", "light", 390, 720),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=Path("screenshots"))
    parser.add_argument("names", nargs="*", help=f"pages: {', '.join(PAGES)}")
    parser.add_argument("--items", type=int, default=120_000, help="items of the largest job")
    parser.add_argument("--readme", action="store_true")
    asked = parser.parse_args()
    chromium = find()
    if chromium is None:
        print("There is no Chromium on PATH. Install it: apt-get install chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        url = f"sqlite:///{folder}/headway.db"
        scene.lively(url, items=asked.items)
        stage = Stage(url, role="admin")
        server = uvicorn.Server(uvicorn.Config(stage.app(), port=0, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            _take(browser, stage, address, asked)
        finally:
            browser.close()
            server.should_exit = server.force_exit = True
            thread.join(10)
            stage.site.close()
    return 0


def _take(browser: Browser, stage: Stage, address: str, asked: argparse.Namespace) -> None:
    reader = stage.site.reader
    letters = reader.dead_items(scene.INVOICES, limit=1).causes[0].items
    known = {"FAILED": reader.tasks(status="FAILED").tasks[0].id, "DEAD": str(letters[0].idx)}  # type: ignore[index]  # asked for
    if asked.readme:
        folder = ROOT / "docs" / "pictures"
        takes = [(name, page, theme, width, height) for name, (page, theme, width, height) in README.items()]
    else:
        folder = asked.directory
        takes = [
            (f"{page}-{look}", page, theme, width, 0)
            for look, (theme, width) in LOOKS.items()
            for page in asked.names or PAGES
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, page, theme, width, height in takes:
        path = PAGES[page]
        for word, value in known.items():
            path = path.replace(word, value)
        stage.name = "teo" if page == "me" else "ana"
        stage.role = "user" if page == "me" and asked.readme else "admin"
        context = browser.new_context(viewport={"width": width, "height": height or 900}, color_scheme=theme)  # type: ignore[arg-type]  # light or dark
        tab = context.new_page()
        tab.goto(address + path)
        tab.get_by_text("Live", exact=True).wait_for()
        tab.screenshot(path=folder / f"{name}.png", full_page=not height)
        context.close()
        print(folder / f"{name}.png")


if __name__ == "__main__":
    sys.exit(main())

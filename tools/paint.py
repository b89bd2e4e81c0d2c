"""How soon each page is drawn on a slow machine: python tools/paint.py [--slower 4] [--times 5]

For each page, in Chromium with its processor slowed down: the median of the largest contentful paint (target: 800 ms at a
quarter of the speed), the sum of layout shifts (target: 0.02), bytes and requests of a first load. The times are worth what
the machine is: on a busy one they say how busy it is, so nothing in the tests depends on them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, Response, sync_playwright  # noqa: E402 - the project is on the path only now

from tests.services.chromium import find  # noqa: E402 - the same
from tests.web import scene  # noqa: E402 - the same
from tools.screenshots import PAGES, named, served  # noqa: E402 - the same

WATCH = """
window.seen = {paint: 0, shift: 0};
new PerformanceObserver(list => { for (const entry of list.getEntries()) seen.paint = entry.startTime; })
  .observe({type: "largest-contentful-paint", buffered: true});
new PerformanceObserver(list => { for (const entry of list.getEntries()) seen.shift += entry.value; })
  .observe({type: "layout-shift", buffered: true});
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=float, default=4.0, help="by how much the processor is slowed down")
    parser.add_argument("--times", type=int, default=5, help="loads of each page")
    parser.add_argument("--items", type=int, default=20_000, help="items of the largest job")
    asked = parser.parse_args()
    chromium = find()
    if chromium is None:
        print("There is no Chromium on PATH. Install it: apt-get install chromium", file=sys.stderr)
        return 2
    print(f"{'page':<14} {'LCP ms':>7} {'shift':>7} {'bytes':>7} {'requests':>8}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        url = f"sqlite:///{folder}/headway.db"
        scene.lively(url, items=asked.items)
        with served(url) as (stage, address):
            for name, path in PAGES.items():
                loads = [load(browser, address + named(stage, path), asked.slower) for _ in range(asked.times)]
                paint, shift = median(one[0] for one in loads), max(one[1] for one in loads)
                print(f"{name:<14} {paint:>7.0f} {shift:>7.3f} {loads[0][2]:>7,} {loads[0][3]:>8}")
        browser.close()
    return 0


def load(browser: Browser, url: str, slower: float) -> tuple[float, float, int, int]:
    """(largest paint in ms, layout shift, bytes, requests) of one first load."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": slower})
    answers: list[Response] = []

    def note(answer: Response) -> None:
        answers.append(answer)

    page.on("response", note)
    page.add_init_script(WATCH)
    page.goto(url)
    page.locator(".live.s").wait_for()
    page.wait_for_timeout(300)
    seen = page.evaluate("window.seen")
    size = sum(len(answer.body()) for answer in answers)
    context.close()
    return float(seen["paint"]), float(seen["shift"]), size, len(answers)


if __name__ == "__main__":
    sys.exit(main())

"""Draw the diagrams of the documents: docs/pictures/*.svg.

    python tools/diagrams.py

`make docs` fails when a file differs from what this draws. Each picture brings its own background for light and dark, so
that it is readable on any page, and a title and a description for people who do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"

STYLE = """
  .card { fill: #f7f8fa; stroke: #d3d8de }
  .box { fill: #ffffff; stroke: #8a94a3; stroke-width: 1.5 }
  .truth { fill: #e3f0ff; stroke: #2f6fb5; stroke-width: 1.5 }
  .speed { fill: #fff1e0; stroke: #b56a1e; stroke-width: 1.5 }
  .end { fill: #e5f5e8; stroke: #3a8a4d; stroke-width: 1.5 }
  .bad { fill: #fde8e8; stroke: #b84444; stroke-width: 1.5 }
  text { font: 13px system-ui, 'Segoe UI', 'Liberation Sans', sans-serif; fill: #1c2430; text-anchor: middle }
  .name { font-weight: 600 }
  .label { font-size: 12px; fill: #4a5565 }
  .left { text-anchor: start }
  .line { stroke: #5b6778; stroke-width: 1.5; fill: none }
  .dashed { stroke-dasharray: 5 4 }
  .head { fill: #5b6778 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1b2028; stroke: #39424f }
    .box { fill: #252c36; stroke: #7d899a }
    .truth { fill: #17324f; stroke: #6aa9ea }
    .speed { fill: #45301a; stroke: #e0a25c }
    .end { fill: #1b3a24; stroke: #6cc083 }
    .bad { fill: #472424; stroke: #e28080 }
    text { fill: #e8ecf1 }
    .label { fill: #b6c0cd }
    .line { stroke: #9aa6b6 }
    .head { fill: #9aa6b6 }
  }
"""

HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>'
)


class Box(NamedTuple):
    """A rectangle with a name and lines below it."""

    x: int
    y: int
    width: int
    height: int
    name: str
    lines: Sequence[str] = ()
    kind: str = "box"


class Arrow(NamedTuple):
    """A line through points, with a head at its end and a label."""

    points: Sequence[tuple[int, int]]
    label: str = ""
    at: tuple[int, int] | None = None
    dashed: bool = False
    left: bool = False


class Picture(NamedTuple):
    """A diagram with its text alternative."""

    width: int
    height: int
    title: str
    description: str
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


def _draw_box(box: Box) -> str:
    middle = box.x + box.width // 2
    first = box.y + box.height // 2 + 5 - 9 * len(box.lines)
    texts = [f'<text class="name" x="{middle}" y="{first}">{escape(box.name)}</text>']
    texts += [
        f'<text class="label" x="{middle}" y="{first + 18 * number}">{escape(line)}</text>'
        for number, line in enumerate(box.lines, 1)
    ]
    shape = f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8"/>'
    return "\n".join([shape, *texts])


def _draw_arrow(arrow: Arrow) -> str:
    path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(arrow.points))
    style = "line dashed" if arrow.dashed else "line"
    parts = [f'<path class="{style}" d="{path}" marker-end="url(#head)"/>']
    if arrow.label:
        (x1, y1), (x2, y2) = arrow.points[0], arrow.points[-1]
        x, y = arrow.at or ((x1 + x2) // 2, (y1 + y2) // 2 - 6)
        side = "label left" if arrow.left else "label"
        parts += [
            f'<text class="{side}" x="{x}" y="{y + 15 * number}">{escape(line)}</text>'
            for number, line in enumerate(arrow.label.split("\n"))
        ]
    return "\n".join(parts)


def draw(picture: Picture) -> str:
    """Return the picture as SVG."""
    size = picture.width, picture.height
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img"',
        f'width="{size[0]}" height="{size[1]}" aria-labelledby="title description">',
        f'<title id="title">{escape(picture.title)}</title>',
        f'<desc id="description">{escape(picture.description)}</desc>',
        f"<style>{STYLE}</style>",
        HEAD,
        f'<rect class="card" x="1" y="1" width="{picture.width - 2}" height="{picture.height - 2}" rx="12"/>',
        *map(_draw_arrow, picture.arrows),
        *map(_draw_box, picture.boxes),
        "</svg>\n",
    ])  # fmt: skip


DRAWN = {
    "big-picture": Picture(
        820, 400, "The big picture",
        "Programs, web applications and the command line write to SQL, which is the truth. Redis makes waiting short and is "
        "rebuilt from SQL. The relay delivers events from SQL and Redis to sinks. Server, client and command line read SQL.",
        [
            Box(30, 30, 170, 64, "your programs", ["map, track, open_job"]),
            Box(225, 30, 170, 64, "headway run", ["functions or programs"]),
            Box(420, 30, 170, 64, "web application", ["submits tasks"]),
            Box(615, 30, 175, 64, "crawlers, partitions", ["counts and states"]),
            Box(150, 175, 330, 80, "SQL: SQLite or PostgreSQL", ["jobs, items, tasks, counts, events", "the truth"], "truth"),
            Box(560, 175, 230, 80, "Redis (optional)", ["hints, live counters, states", "rebuilt from SQL"], "speed"),
            Box(30, 312, 170, 64, "headway worker", ["runs tasks and fleets"]),
            Box(240, 312, 170, 64, "headway serve", ["dashboard, API, alerts"]),
            Box(450, 312, 150, 64, "relay", ["delivers events"]),
            Box(640, 312, 150, 64, "sinks", ["webhook, mail, log"], "end"),
        ],
        [
            Arrow([(115, 94), (200, 173)]), Arrow([(310, 94), (310, 173)], "commits", (345, 138)),
            Arrow([(505, 94), (430, 173)]), Arrow([(700, 94), (690, 173)], "counts", (735, 138)),
            Arrow([(482, 215), (558, 215)], "rebuilds", (520, 207)),
            Arrow([(115, 312), (190, 257)], "claims", (120, 285)), Arrow([(320, 312), (320, 257)], "reads", (348, 290)),
            Arrow([(440, 257), (510, 310)], "outbox", (512, 280)), Arrow([(600, 344), (638, 344)]),
        ],
    ),
    "run": Picture(
        820, 300, "A run",
        "headway run plans: it compares the items with the ledger and registers new ones. It takes a lease on the job. The "
        "parent sends items to workers; workers report results; the parent commits them in groups. The commit that records "
        "the last item also records the completion and its event. After a crash the same command starts at the plan again.",
        [
            Box(30, 40, 150, 70, "plan", ["compare items", "register new ones"]),
            Box(220, 40, 150, 70, "hold", ["lease with a token", "one run per job"]),
            Box(410, 40, 150, 70, "work", ["worker processes,", "threads or a loop"]),
            Box(600, 40, 190, 70, "record", ["results of 20 ms", "in one commit"], "truth"),
            Box(600, 190, 190, 70, "completed", ["same commit as the", "last item, one event"], "end"),
            Box(220, 190, 340, 70, "crash, kill -9, Ctrl-C",
                ["the same command starts at the plan", "and skips what is recorded"], "bad"),
        ],
        [
            Arrow([(180, 75), (218, 75)]), Arrow([(370, 75), (408, 75)]), Arrow([(560, 75), (598, 75)]),
            Arrow([(640, 110), (640, 148), (485, 148), (485, 112)], "next items", (562, 141)),
            Arrow([(720, 110), (720, 188)], "last item", (755, 155)),
            Arrow([(300, 190), (105, 190), (105, 112)], "again", (75, 165), dashed=True),
        ],
    ),
    "task-life": Picture(
        820, 330, "The life of a task",
        "submit makes a task QUEUED. A worker's claim makes it RUNNING under a lease. The worker records COMPLETED when the "
        "handler returns, FAILED when no attempt is left or on GiveUp, CANCELLED after a cancellation. A failed attempt with "
        "attempts left, or a lost worker found by the sweeper, makes it QUEUED again. Cancelling a waiting task ends it.",
        [
            Box(40, 120, 150, 64, "QUEUED", ["waits for a worker"]),
            Box(330, 120, 160, 64, "RUNNING", ["lease of 12 s, renewed"], "speed"),
            Box(640, 30, 150, 56, "COMPLETED", kind="end"),
            Box(640, 124, 150, 56, "FAILED", kind="bad"),
            Box(640, 232, 150, 56, "CANCELLED"),
        ],
        [
            Arrow([(115, 50), (115, 118)], "submit", (142, 80)),
            Arrow([(190, 142), (328, 142)], "worker claims", (259, 135)),
            Arrow([(330, 168), (192, 168)], "attempt failed: waits 2, 4, 8 s", (262, 202), dashed=True),
            Arrow([(360, 184), (360, 220), (115, 220), (115, 186)], "worker lost: the sweeper", (238, 238), dashed=True),
            Arrow([(490, 140), (638, 62)], "handler returns", (540, 82)),
            Arrow([(490, 152), (638, 152)], "no attempt left, GiveUp", (570, 145)),
            Arrow([(470, 184), (638, 250)], "cancel, then return", (520, 245)),
            Arrow([(80, 186), (80, 275), (638, 275)], "cancel while waiting", (360, 268)),
        ],
    ),
    "finish-line": Picture(
        820, 320, "The finish line",
        "Analysers report items. With a journal the count is committed to SQL first. One Lua script in Redis checks whether "
        "the item was counted, raises done, and when done reaches the total sets DONE and appends job.completed to the event "
        "stream. The relay delivers the event to every sink. If Redis loses the project, it is rebuilt from SQL.",
        [
            Box(30, 40, 160, 66, "analysers", ["item_done(project, id)"]),
            Box(30, 200, 160, 66, "crawler", ["finish_crawl, set_total"]),
            Box(270, 40, 170, 66, "SQL journal", ["commit first"], "truth"),
            Box(270, 165, 330, 120, "one Lua script in Redis",
                ["1. counted before? then DUPLICATE", "2. done + 1", "3. done = total? DONE and one event"], "speed"),
            Box(660, 165, 130, 50, "event stream", kind="speed"),
            Box(660, 245, 130, 50, "sinks", kind="end"),
        ],
        [
            Arrow([(190, 73), (268, 73)]), Arrow([(330, 106), (330, 163)], "then count", (375, 138)),
            Arrow([(110, 106), (110, 140), (288, 140), (288, 163)], "without journal", (190, 133), dashed=True),
            Arrow([(190, 233), (268, 233)]), Arrow([(600, 190), (658, 190)]),
            Arrow([(725, 215), (725, 243)], "relay", (750, 234)),
            Arrow([(440, 73), (540, 73), (540, 163)], "rebuild after a loss", (560, 66), dashed=True),
        ],
    ),
    "replay-then-live": Picture(
        820, 250, "Replay, then live",
        "A subscription first yields the current state of each key, oldest first. Then it yields one sentinel. After that it "
        "yields every change in the store's order. Changes that happen during the replay follow the sentinel.",
        [
            Box(30, 60, 240, 90, "replay", ["current state of each key", "oldest first"]),
            Box(310, 60, 130, 90, "sentinel", ["event.state is None", "exactly once"], "speed"),
            Box(480, 60, 310, 90, "live", ["every change, in the store's order", "a slow reader delays nobody"], "end"),
        ],
        [
            Arrow([(270, 105), (308, 105)]), Arrow([(440, 105), (478, 105)]),
            Arrow([(40, 195), (780, 195)], "time since subscribe()", (410, 218)),
            Arrow([(150, 40), (150, 24), (620, 24), (620, 58)],
                  "a change during the replay comes after the sentinel", (385, 42), dashed=True),
        ],
    ),
    "fleet": Picture(
        820, 330, "A fleet",
        "One command registers the items in PostgreSQL and may end. Workers on all machines take slots, which are tasks of the "
        "queue. A slot claims a block of items under a lease, runs them and records them. If a machine dies its blocks expire "
        "after 12 seconds and other slots continue.",
        [
            Box(30, 30, 200, 66, "headway run --fleet", ["registers items, then may end"]),
            Box(290, 30, 240, 66, "PostgreSQL", ["items, blocks, results"], "truth"),
            Box(590, 30, 200, 66, "Redis (optional)", ["wakes workers"], "speed"),
            Box(30, 190, 230, 100, "machine 1: headway worker", ["slot: block 1-500", "slot: block 501-900"]),
            Box(295, 190, 230, 100, "machine 2: headway worker", ["slot: block 901-1400", "slot: retries"]),
            Box(560, 190, 230, 100, "machine 3 died", ["its block expires after 12 s,", "other slots continue it"], "bad"),
        ],
        [
            Arrow([(230, 63), (288, 63)]),
            Arrow([(145, 190), (330, 98)], "claim and record blocks", (150, 140)),
            Arrow([(410, 190), (410, 98)]), Arrow([(675, 190), (490, 98)], "lease expires", (630, 140), dashed=True),
        ],
    ),
    "architecture": Picture(
        420, 640, "Layers of the source",
        "Imports point downward. Command line; web and client; run and views; alerts; ledger, queue, finishline, states "
        "and watcher; events and config; local servers; storage: SQL and Redis; core, telemetry and errors.",
        [
            Box(20, 24, 380, 40, "headway.cli"),
            Box(20, 76, 183, 40, "headway.web"), Box(217, 76, 183, 40, "headway.client"),
            Box(20, 128, 183, 40, "headway.run"), Box(217, 128, 183, 40, "headway.views"),
            Box(20, 180, 380, 40, "headway.alerts"),
            Box(20, 232, 183, 50, "ledger", ["jobs, items"]), Box(217, 232, 183, 50, "queue", ["tasks"]),
            Box(20, 294, 118, 50, "finishline", ["counts"]), Box(151, 294, 118, 50, "states", ["partitions"]),
            Box(282, 294, 118, 50, "watcher", ["RQ failures"]),
            Box(20, 356, 183, 40, "headway.events"), Box(217, 356, 183, 40, "headway.config"),
            Box(20, 408, 380, 40, "headway.local_servers"),
            Box(20, 460, 183, 50, "headway._sql", ["SQLite, PostgreSQL"], "truth"),
            Box(217, 460, 183, 50, "headway._redis", ["clients, keys, Lua"], "speed"),
            Box(20, 522, 380, 40, "headway.core"),
            Box(20, 574, 183, 40, "headway.telemetry"), Box(217, 574, 183, 40, "headway.errors"),
        ],
        [],
    ),
}  # fmt: skip


def main() -> None:
    for name, picture in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw(picture), "utf-8")


if __name__ == "__main__":
    main()

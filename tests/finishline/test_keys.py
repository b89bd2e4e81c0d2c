"""Every key is listed once, documented, and of the type and lifetime that the list says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from headway import _redis
from headway.events import CallableSink
from headway.finishline.rebuild import STAGE_SECONDS
from tests.finishline.conftest import OpenLine
from tests.finishline.lines import at_line
from tests.services.redis import RedisServer

ROOT = Path(__file__).parents[2]


def test_the_page_about_redis_lists_every_key_with_its_type_and_lifetime():
    page = (ROOT / "docs" / "reference" / "redis.md").read_text("utf-8")
    rows = re.findall(r"^\| `(smap:[^`]+|headway:[^`]+)` \| (\w+) \| ([^|]+) \|", page, re.MULTILINE)
    listed = {(pattern, kind, lifetime.strip()) for pattern, kind, lifetime in rows}
    assert listed == {(key.pattern, key.kind, key.lifetime) for key in _redis.KEYS}
    assert len({key.pattern for key in _redis.KEYS}) == len(_redis.KEYS)


def test_every_key_of_the_finish_line_is_listed_with_type_and_lifetime(open_line: OpenLine, redis_server: RedisServer):
    state: Any = redis_server.client(1)
    seen: dict[str, str] = {}
    lives: dict[str, int] = {}

    def look() -> None:
        for name in state.scan_iter():
            seen[name], lives[name] = state.type(name), state.ttl(name)

    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    relay = line.relay([CallableSink("listener", lambda event: None)])
    line.create("p", total=3)
    line.items_done("p", [1, "a"])
    line.checkpointer.tick()
    state.xadd("smap:events", {"not": "an event"})
    relay.tick()
    line.outbox().acquire("listener")
    line.outbox().count_refusal("listener", "1-1", seen=0, apart=5.0)
    look()
    state.flushall()
    state.xadd("smap:events", {"not": "an event"})
    relay.tick()
    for number in range(200):  # look before each line of the rebuilding
        state.delete("none", *state.scan_iter("smap:proj:*"))
        with at_line(number, look, "finishline/rebuild.py") as steps:
            line.progress("p")
        if not steps.reached:
            break
    look()
    families: dict[str, str] = {}
    for name, kind in seen.items():
        [key] = [key for key in _redis.KEYS if key.matches(name)]
        assert key.kind == kind, name
        families[key.pattern] = name
    ours = {key.pattern for key in _redis.KEYS if key.pattern.startswith("smap:") and key.kind != "channel"}
    assert families.keys() == ours | {"headway:lease:token"}
    staged = [life for name, life in lives.items() if name.count(":") == 4 and name.startswith("smap:proj:")]
    assert staged
    assert all(0 < life <= STAGE_SECONDS for life in staged)
    assert 0 < lives["smap:proj:p:rebuild"] <= 30
    assert 0 < lives["smap:checkpointer"] <= 5
    assert 0 < lives["smap:events:hold"] <= 120


def test_a_key_matches_its_own_family_only():
    assert _redis.PROJECT.matches("smap:proj:p.1-x")
    assert not _redis.PROJECT.matches("smap:proj:p:meta")
    assert _redis.STAGED_BITS.matches("smap:proj:p:bits:0a1b")
    assert not _redis.PROJECT_BITS.matches("smap:proj:p:bits:0a1b")


def test_every_script_has_a_header_and_gets_all_its_keys_by_name():
    folder = ROOT / "src" / "headway" / "_redis" / "lua" / "finishline"
    scripts = sorted(folder.glob("*.lua"))
    assert len(scripts) >= 6
    for path in scripts:
        text = path.read_text("utf-8")
        assert text.startswith(f"-- {path.name}: "), path
        assert re.search(r"^-- .*\breturns\b", text, re.MULTILINE), path
        code = re.sub(r"--.*", "", text)
        for call in re.findall(r"redis\.call\(\s*'(\w+)',\s*([^,)]+)", code):
            assert call[1].startswith("KEYS["), (path, call)

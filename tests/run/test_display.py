"""What a run shows: on a terminal, in a log, to a program."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import termios
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

import pytest

from headway.run.display.display import (
    PROGRESS_KEYS,
    Display,
    RunSnapshot,
    bar,
    cells,
    interrupted,
    open_display,
    summary,
)

NOW = RunSnapshot(
    total=120_000,
    kept=41_200,
    done=33_313,
    running=8,
    retrying=212,
    dead=64,
    failures=300,
    last_error="UpstreamTimeout",
    last_error_count=41,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A stream that says it is a terminal, or not, and which letters it knows."""

    def __init__(self, *, tty: bool = True, letters: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._letters = tty, letters

    def isatty(self) -> bool:
        return self._tty

    @property
    def encoding(self) -> str:  # type: ignore[override]  # StringIO says None
        return self._letters


def opened(
    kind: str,
    stream: Terminal,
    clock: Clock | None = None,
    *,
    columns: int = 110,
    color: str = "never",
    environment: dict[str, str] | None = None,
) -> Display:
    return open_display(
        kind, stream=stream, color=color, environment=environment or {}, clock=clock or Clock(), columns=lambda: columns
    )


def plainly(stream: Terminal) -> str:
    """What was written, without the marks that let a terminal show a drawing at once."""
    return stream.getvalue().replace("\x1b[?2026h", "").replace("\x1b[?2026l", "")


def drawn(stream: Terminal) -> list[str]:
    """The lines of the last drawing, without its cursor movements."""
    last = plainly(stream).split("\x1b[J")[-1].replace("\x1b[1A", "")
    return [line.strip("\r") for line in last.split("\n")]


def warmed_up(display: Display, clock: Clock, snapshot: RunSnapshot = NOW, *, seconds: int = 60) -> None:
    """Let the run come to ``snapshot`` at a steady pace."""
    for second in range(seconds + 1):
        clock.now += 1.0
        display.show(replace(snapshot, done=snapshot.done * second // seconds))


# ---- which one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tty", "environment", "live"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),  # colour only, never liveness
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True),
    ],
)
def test_only_a_terminal_that_can_draw_gets_live_lines(tty: bool, environment: dict[str, str], live: bool):
    stream = Terminal(tty=tty)
    display = opened("auto", stream, environment=environment)
    display.begin("Run 7f3a: 120,000 items")
    display.show(NOW)
    assert ("\r" in stream.getvalue()) is live


def test_an_unknown_kind_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="none of auto, bar, plain, json, none"):
        opened("fancy", Terminal())


def test_none_shows_nothing():
    stream = Terminal()
    display = opened("none", stream)
    display.begin("a")
    display.show(NOW)
    display.say("b")
    display.end(NOW)
    assert stream.getvalue() == ""


# ---- the bar --------------------------------------------------------------------------------------------------------


def test_the_bar_shows_a_run_as_promised():
    stream, clock = Terminal(), Clock()
    display = opened("bar", stream, clock, columns=120)
    warmed_up(display, clock, seconds=800)
    first, second = drawn(stream)
    assert re.fullmatch(r" 62\.1% ─+━+╸? +   74,513/120,000   41\.\d/s   ~18 min left", first)
    assert second == (
        " done 74,513 (41,200 kept) · running 8 · retrying 212 · dead 64         last error: UpstreamTimeout x41"
    )


def test_the_first_line_stands_alone_and_nothing_wraps_however_narrow_the_terminal_is():
    for columns in range(1, 140):
        stream, clock = Terminal(), Clock()
        warmed_up(opened("bar", stream, clock, columns=columns), clock)
        lines = drawn(stream)
        assert len(lines) == 2
        assert all(cells(line) < max(columns, 2) for line in lines), (columns, lines)


def test_a_narrow_terminal_drops_fields_from_the_right():
    shown = []
    for columns in (100, 50, 40, 30, 18, 7):
        stream, clock = Terminal(), Clock()
        warmed_up(opened("bar", stream, clock, columns=columns), clock)
        first = drawn(stream)[0]
        shown.append([field in first for field in ("62.1%", "━", "74,513/120,000", "/s", "left")])
    assert shown == [
        [True, True, True, True, True],
        [True, True, True, True, False],
        [True, True, True, False, False],
        [True, True, False, False, False],
        [True, True, False, False, False],
        [True, False, False, False, False],
    ]


def test_what_was_kept_looks_different_with_and_without_colour():
    assert bar(0.25, 0.25, 20) == "─────━━━━━          "
    assert bar(0.25, 0.25, 20, ascii_only=True) == "=====####>.........."
    assert bar(0.25, 0.25, 20, colored=True) == "\x1b[34m─────\x1b[32m━━━━━\x1b[0m          "
    assert bar(1.0, 0.5, 4) == "────"


def test_a_stream_without_unicode_gets_an_ascii_bar_and_escaped_names():
    stream, clock = Terminal(letters="ascii"), Clock()
    warmed_up(opened("bar", stream, clock), clock, replace(NOW, last_error="Fehlerübel"))
    assert stream.getvalue().isascii()
    assert "=#" in drawn(stream)[0]
    assert "Fehler\\xfcbel" in stream.getvalue()


def test_an_unknown_total_shows_count_and_rate_and_no_percent():
    stream, clock = Terminal(), Clock()
    warmed_up(opened("bar", stream, clock), clock, replace(NOW, total=None, kept=0, done=600), seconds=60)
    first = drawn(stream)[0]
    assert first.startswith(" 600 done   9.")
    assert "%" not in first
    assert "left" not in first


def test_it_waits_to_retry_only_when_no_other_item_is_left():
    for dead, waits in ((64, False), (120_000 - 74_513 - 212, True)):
        stream = Terminal()
        opened("bar", stream).show(replace(NOW, running=0, dead=dead))
        assert ("waiting to retry" in drawn(stream)[0]) is waits


def test_a_hundred_percent_is_only_what_is_complete():
    stream = Terminal()
    opened("bar", stream).show(replace(NOW, kept=0, done=119_999))
    assert drawn(stream)[0].startswith(" 99.9%")


def test_it_is_drawn_ten_times_a_second_at_most():
    stream, clock = Terminal(), Clock()
    display = opened("bar", stream, clock)
    for _ in range(1000):
        clock.now += 0.001
        display.show(NOW)
    assert stream.getvalue().count("41,200 kept") <= 11


def test_talk_goes_above_the_live_lines_which_come_back_below_it():
    stream, clock = Terminal(), Clock()
    display = opened("bar", stream, clock)
    display.begin("Resuming run 7f3a")
    display.show(NOW)
    display.say("Stopping: finishing 8 items")
    display.show(NOW)
    text = plainly(stream)
    assert text.startswith("Resuming run 7f3a\n")
    assert "\r\x1b[JStopping: finishing 8 items\n 62.1%" in text


def test_the_end_leaves_the_last_state_on_the_screen_and_the_cursor_below_it():
    stream, clock = Terminal(), Clock()
    display = opened("bar", stream, clock)
    display.show(NOW)
    display.end(replace(NOW, done=78_736, running=0, retrying=0))
    assert drawn(stream)[-1] == ""
    assert "119,936/120,000" in drawn(stream)[0]
    assert not plainly(stream).endswith("\x1b[1A\r")


@pytest.mark.parametrize("kind", ["bar", "plain"])
def test_a_run_that_is_over_forecasts_nothing_and_waits_for_nothing(kind: str):
    for last in (NOW, replace(NOW, running=0)):
        stream, clock = Terminal(), Clock()
        display = opened(kind, stream, clock)
        warmed_up(display, clock)
        stream.truncate(0)
        stream.seek(0)
        display.end(last)
        assert "left" not in stream.getvalue()
        assert "waiting" not in stream.getvalue()


@pytest.mark.parametrize(
    ("color", "tty", "environment", "colored"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_follows_the_flag_then_no_color_then_force_color(
    color: str, tty: bool, environment: dict[str, str], colored: bool
):
    stream = Terminal(tty=tty)
    display = opened("bar", stream, color=color, environment=environment)
    display.show(NOW)
    assert ("\x1b[32m" in stream.getvalue()) is colored


def test_an_error_whose_name_moves_the_cursor_does_not():
    stream = Terminal()
    opened("bar", stream).show(replace(NOW, last_error="\x1b[2J\rEvil\nName"))
    assert "\x1b[2J" not in stream.getvalue()
    assert len(drawn(stream)) == 2


def test_a_stall_is_said_instead_of_a_forecast():
    stream, clock = Terminal(), Clock()
    display = opened("bar", stream, clock)
    warmed_up(display, clock)
    clock.now += 40
    display.show(NOW)
    assert drawn(stream)[0].endswith("stalled 40 s")


class Gone(Terminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["bar", "plain", "json"])
def test_a_display_whose_stream_is_gone_falls_silent_and_does_not_stop_the_work(kind: str):
    display = opened(kind, Gone())
    display.begin("Run 7f3a")
    display.show(NOW)
    display.say("still here")
    display.end(NOW)
    assert display is not None


def test_on_a_real_terminal_the_lines_are_redrawn_in_place_and_survive_a_resize():
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 100))
    clock = Clock()
    with os.fdopen(child, "w", encoding="utf-8") as stream:
        display = open_display("auto", stream=stream, environment={"TERM": "xterm"}, clock=clock)
        display.show(NOW)
        wide = os.read(parent, 65536).decode()
        termios.tcsetwinsize(child, (24, 40))
        clock.now += 1
        display.show(NOW)
        narrow = os.read(parent, 65536).decode()
    os.close(parent)
    assert wide.count("\n") == 1
    assert wide.endswith("\x1b[1A\r\x1b[?2026l")
    assert narrow.startswith("\x1b[?2026h\r\x1b[J"), "shown at once by a terminal that can"
    plain = re.sub(r"\x1b\[\??\d*[A-Za-z]", "", narrow).strip("\r").splitlines()
    assert all(len(line) < 40 for line in plain)


# ---- plain ----------------------------------------------------------------------------------------------------------


def plain_lines(stream: Terminal) -> list[str]:
    text = stream.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    lines = text.splitlines()
    for line in lines:
        datetime.fromisoformat(line.split(" ")[0])
    return [line.split(" ", 1)[1] for line in lines]


@pytest.mark.parametrize(
    ("seconds_per_percent", "lines"),
    [
        (1.0, 3),  # 5 % take 5 s: a line every 30 s
        (60.0, 20),  # 5 % take 5 min: a line every 5 %
    ],
)
def test_a_plain_line_comes_every_30_seconds_or_5_percent_whichever_is_later(seconds_per_percent: float, lines: int):
    stream, clock = Terminal(tty=False), Clock()
    display = opened("plain", stream, clock, environment={"FORCE_COLOR": "1"})
    for tenth in range(1000):
        display.show(RunSnapshot(1000, 0, tenth, 8, 0, 0, 0))
        clock.now += seconds_per_percent / 10
    display.end(RunSnapshot(1000, 0, 1000, 0, 0, 0, 0))
    assert abs(len(plain_lines(stream)) - 1 - lines) <= 1


def test_every_change_of_state_is_a_plain_line_too():
    stream, clock = Terminal(tty=False), Clock()
    display = opened("plain", stream, clock)
    display.begin("Resuming run 7f3a")
    warmed_up(display, clock, replace(NOW, total=10_000_000), seconds=20)
    for _ in range(400):
        clock.now += 0.1
        display.show(replace(NOW, total=10_000_000))
    display.show(replace(NOW, total=10_000_000, done=NOW.done + 1))
    display.say("Stopping: finishing 8 items")
    lines = plain_lines(stream)
    assert lines[0] == "Resuming run 7f3a"
    assert "stalled" in lines[1]
    assert "stalled" not in lines[2]
    assert lines[3:] == ["Stopping: finishing 8 items"]


def test_a_plain_line_says_everything():
    stream = Terminal(tty=False)
    opened("plain", stream).end(NOW)
    (line,) = plain_lines(stream)
    assert line == (
        "62.1%  74,513/120,000  done 74,513 (41,200 kept)  running 8  retrying 212  dead 64  "
        "last error: UpstreamTimeout x41"
    )


# ---- JSON -----------------------------------------------------------------------------------------------------------


def test_json_lines_have_the_documented_keys_and_come_once_a_second_at_most():
    stream, clock = Terminal(tty=False), Clock()
    display = opened("json", stream, clock)
    display.begin("Run 7f3a")
    for _ in range(100):
        clock.now += 0.1
        display.show(NOW)
    display.say("Stopping")
    display.end(NOW)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    progress = [line for line in lines if line["event"] == "progress"]
    assert 8 <= len(progress) <= 11
    assert [line["event"] for line in lines if line["event"] != "progress"] == ["begin", "message", "end"]
    assert list(progress[0]) == ["t", "event", *PROGRESS_KEYS]
    assert list(lines[-1]) == ["t", "event", *PROGRESS_KEYS]
    assert (progress[0]["done"], progress[0]["kept"], progress[0]["percent"]) == (74_513, 41_200, 62.09)
    datetime.fromisoformat(progress[0]["t"])


# ---- the last words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    no: int
    type: str
    message: str
    dead: int


CAUSES = [
    Cause(2, "DocumentCorrupt", "{id}.pdf: xref table not found at offset {n}", 20),
    Cause(1, "UpstreamTimeout", "GET https://store.internal/docs/{id}.pdf timed out", 41),
    Cause(3, "KeyError", "'page_count'", 3),
    Cause(4, "Flaky", "went well in the end", 0),
]
END = replace(NOW, done=78_736, running=0, retrying=0)


@pytest.mark.req("S3-13", "S3-51")
def test_the_summary_counts_and_reports_the_dead_apart_by_cause_with_the_commands_to_type():
    assert summary("7f3a", END, seconds=2892, retries=1204, causes=CAUSES) == [
        "Run 7f3a finished in 48 min 12 s: 119,936 done (41,200 kept), 64 dead, 1,204 retries, 27.2/s",
        "  41  #1  UpstreamTimeout  GET https://store.internal/docs/{id}.pdf timed out    headway retry 7f3a --cause 1",
        "  20  #2  DocumentCorrupt  {id}.pdf: xref table not found at offset {n}          headway retry 7f3a --cause 2",
        "   3  #3  KeyError         'page_count'                                          headway retry 7f3a --cause 3",
        "Details:  headway dead show 7f3a",
    ]


def test_the_commands_of_a_summary_carry_its_options():
    lines = summary(
        "7f3a", END, seconds=10, retries=1, causes=CAUSES[1:2], options="--database sqlite:///x.db", columns=160
    )
    assert lines[1].endswith("    headway retry 7f3a --cause 1 --database sqlite:///x.db")
    assert lines[2] == "Details:  headway dead show 7f3a --database sqlite:///x.db"
    assert ", 1 retry," in lines[0]


def test_a_run_without_trouble_has_one_line():
    quiet = RunSnapshot(total=10, kept=0, done=10, running=0, retrying=0, dead=0, failures=0)
    assert summary("ads", quiet, seconds=0.5, retries=0) == [
        "Run ads finished in 0.5 s: 10 done, 0 dead, 0 retries, 20.0/s"
    ]


def test_a_run_that_had_nothing_to_do_claims_no_pace():
    kept = RunSnapshot(total=10, kept=10, done=0, running=0, retrying=0, dead=0, failures=0)
    assert summary("ads", kept, seconds=0.1, retries=0) == [
        "Run ads finished in 0.1 s: 10 done (10 kept), 0 dead, 0 retries"
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_narrow_terminal_the_commands_stand_below_the_causes_and_only_they_may_be_longer_than_it(columns: int):
    lines = summary("7f3a", END, seconds=2892, retries=1204, causes=CAUSES, columns=columns)
    assert lines[-2:] == ["  headway retry 7f3a --cause 1", "Details:  headway dead show 7f3a"]
    assert [line.split()[:2] for line in lines[-5:-2]] == [["41", "#1"], ["20", "#2"], ["3", "#3"]]
    assert all(len(line) <= max(columns, 46) for line in lines), lines
    command = "headway run jobs:extract_text --items items.jsonl --job extract-text-november"
    assert interrupted("7f3a", NOW, command, columns=columns)[1] == f"  {command}"


def test_where_there_is_no_room_zeros_go_first_and_the_dead_stay():
    stream = Terminal()
    opened("bar", stream, columns=40).show(replace(NOW, kept=0, retrying=0, done=33_313, dead=64))
    assert drawn(stream)[1].strip() == "done 33,313 · running 8 · dead 64"


def test_a_long_first_line_is_broken_between_words():
    stream = Terminal()
    opened("bar", stream, columns=40).begin("Resuming run 7f3a (started 14:02, interrupted 15:31): 41,200 of 120,000")
    assert stream.getvalue().splitlines() == [
        "Resuming run 7f3a (started 14:02,",
        "  interrupted 15:31): 41,200 of 120,000",
    ]


@pytest.mark.parametrize(("total", "place"), [(120_000, "74,513 of 120,000"), (None, "74,513")])
def test_an_interrupted_run_says_where_it_is_and_how_to_go_on(total: int | None, place: str):
    command = "headway run jobs:extract_text --items items.jsonl"
    assert interrupted("7f3a", replace(NOW, total=total), command) == [f"Run 7f3a is at {place}. Continue:  {command}"]


def test_wide_letters_take_two_columns():
    measure: Callable[[str], int] = cells
    assert measure("エラー") == 6
    assert measure("plain") == 5

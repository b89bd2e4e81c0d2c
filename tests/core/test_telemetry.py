"""What is logged, what is measured."""

import ast
import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import telemetry
from headway.telemetry import FIELDS, LineFormatter, Log, Metrics, configure


@pytest.fixture
def _restored_logging() -> Iterator[None]:
    logger = logging.getLogger("headway")
    handlers, level = list(logger.handlers), logger.level
    logger.propagate = False  # pytest's own capture cannot carry half a character from process to process
    yield
    logger.propagate = True
    logger.handlers[:] = handlers
    logger.setLevel(level)


def lines(*, as_json: bool, **fields: telemetry.Field) -> str:
    stream = io.StringIO()
    configure(level="INFO", as_json=as_json, stream=stream)
    Log("ledger").warning("item failed", **fields)
    return stream.getvalue()


HOSTILE = 'a\nERROR forged\r\x1b[2J\x9b2J\u2028x\u202egnp.exe\u0085\x7f\0 "quoted" password=hunter2'


@pytest.mark.usefixtures("_restored_logging")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_hostile_error_makes_one_printable_line_and_no_more(as_json: bool):
    written = lines(as_json=as_json, error=HOSTILE, job="ads")
    assert written.endswith("\n")
    assert len(written[:-1].splitlines()) == 1
    assert written[:-1].isprintable()
    assert "hunter2" not in written
    written.encode()


@pytest.mark.parametrize("as_json", [True, False])
def test_half_a_character_can_be_written_too(as_json: bool):
    facts = {"msg": "half \ud800", "name": "headway.x", "levelname": "INFO", "fields": {"error": "\udfff"}}
    line = LineFormatter(as_json=as_json).format(logging.makeLogRecord(facts)).encode()
    assert b"half \\ud800" in line
    assert b'"\\udfff"' in line


@pytest.mark.usefixtures("_restored_logging")
def test_a_hostile_message_makes_one_line_too():
    stream = io.StringIO()
    configure(stream=stream)
    logging.getLogger("headway.other").warning("from elsewhere: %s", HOSTILE)
    assert stream.getvalue()[:-1].isprintable()
    assert "hunter2" not in stream.getvalue()


@pytest.mark.usefixtures("_restored_logging")
def test_a_json_line_has_the_fixed_fields_and_the_facts():
    line = json.loads(lines(as_json=True, job="ads", idx=17, seconds=0.5, error="multi\nline", done=None))
    assert line.pop("t").endswith("Z")
    assert line == {
        "level": "WARNING", "logger": "ledger", "message": "🟡 item failed", "job": "ads", "idx": 17, "seconds": 0.5,
        "error": "multi\nline", "done": None,
    }  # fmt: skip
    assert not FIELDS & {"t", "level", "logger", "message"}


@pytest.mark.usefixtures("_restored_logging")
def test_a_plain_line_has_time_level_package_message_and_fields():
    line = lines(as_json=False, job="ads", idx=17)
    when, level, where, rest = line.split(" ", 3)
    assert (level, where, rest) == ("WARNING", "ledger:", '🟡 item failed job="ads" idx=17\n')
    assert when.endswith("Z")


@pytest.mark.usefixtures("_restored_logging")
def test_an_exception_is_logged_redacted():
    stream = io.StringIO()
    configure(as_json=True, stream=stream)
    try:
        int("password=hunter2")
    except ValueError:
        logging.getLogger("headway.x").exception("it failed")
    assert json.loads(stream.getvalue())["error"].startswith("ValueError: ")
    assert "hunter2" not in stream.getvalue()


@pytest.mark.usefixtures("_restored_logging")
def test_an_unknown_field_is_refused():
    configure(stream=io.StringIO())
    with pytest.raises(ValueError, match="colour"):
        Log("ledger").info("x", colour="red")


@pytest.mark.usefixtures("_restored_logging")
def test_configuring_again_replaces_the_earlier_choice():
    first, second = io.StringIO(), io.StringIO()
    configure(stream=first)
    configure(stream=second, level="ERROR")
    Log("x").warning("quiet")
    Log("x").error("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


@pytest.mark.req("S3-53")
def test_metrics_keep_counters_gauges_and_histograms_by_label():
    kept = Metrics()
    kept.count("a", sink="x", kind="y")
    kept.count("a", 2, kind="y", sink="x")
    kept.gauge("g", 5)
    kept.gauge("g", 3)
    kept.observe("h", 0.0005)
    kept.observe("h", 1e9)
    assert kept.value("a", sink="x", kind="y") == 3
    assert kept.value("a") == 0
    assert kept.value("g") == 3
    histogram = kept.histogram("h")
    assert (histogram.count, histogram.counts[1], histogram.counts[-1]) == (2, 1, 1)
    assert {(name, kind) for name, kind, _, _ in kept.collect()} == {
        ("a", "counter"),
        ("g", "gauge"),
        ("h", "histogram"),
    }


def test_threads_that_count_together_lose_nothing():
    kept = Metrics()

    def work() -> None:
        for _ in range(5000):
            kept.count("n")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept.value("n") == 20_000


def test_a_sink_hears_every_measurement():
    heard: list[tuple[str, str, float]] = []

    class Ear:
        def measured(self, name: str, kind: str, value: float, labels: object) -> None:
            heard.append((name, kind, value))

    kept = Metrics()
    kept.add_sink(Ear())
    kept.count("a")
    kept.gauge("b", 2)
    kept.observe("c", 3)
    assert heard == [("a", "counter", 1), ("b", "gauge", 2), ("c", "histogram", 3)]


def test_a_child_forked_while_a_thread_was_counting_can_count():
    counting, forked = threading.Event(), threading.Event()

    def count() -> None:
        with telemetry.metrics._lock:
            counting.set()
            forked.wait(60)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert counting.wait(60)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # a child that hangs ends itself
            telemetry.metrics.count("in_the_child")
            os._exit(int(telemetry.metrics.value("in_the_child")) + 4)
    finally:
        forked.set()
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_a_signal_handler_may_count_during_a_count():
    """A signal handler runs between any two steps of the main thread."""
    counted = Metrics()

    class Interrupting(str):
        __slots__ = ()

        def __hash__(self) -> int:  # asked for while the counter is looked up
            counted.count("within")
            counted.observe("within_seconds", 1.0)
            return str.__hash__(self)

    counting = threading.Thread(target=lambda: counted.count("outside", store=Interrupting("a")), daemon=True)
    counting.start()
    counting.join(30)
    assert not counting.is_alive()
    assert counted.value("within") > 0


@pytest.mark.req("S1-66")
@pytest.mark.usefixtures("_restored_logging")
@pytest.mark.parametrize("as_json", [True, False])
def test_every_error_begins_with_the_red_mark_and_every_warning_with_the_yellow_one(as_json: bool):
    lines = io.StringIO()
    telemetry.configure(level="DEBUG", as_json=as_json, stream=lines)
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(telemetry.Log("states"), level)(f"a {level}", jobID="nightly")
    found = lines.getvalue().splitlines()
    messages = (
        [json.loads(line)["message"] for line in found] if as_json else [line.split(": ", 1)[1] for line in found]
    )
    begins = [message.partition(" a ")[0] for message in messages[2:]]
    assert begins == ["🟡", "🔴", "🔴"]
    assert [message[:2] for message in messages[:2]] == ["a ", "a "]


@pytest.mark.req("S1-66")
def test_every_log_call_of_the_package_goes_through_log_and_leaves_the_mark_to_it():
    """A call of `logging` itself would have no mark, and a message with its own mark would have two."""
    source = Path(telemetry.__file__).parents[1]
    calls = 0
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if path.name != "log.py":
                assert not (isinstance(owner, ast.Name) and owner.id == "logging"), f"{path}:{node.lineno}"
            if node.func.attr in ("warning", "error", "critical") and isinstance(owner, ast.Name) and owner.id == "log":
                calls += 1
                text = "".join(
                    part.value
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                assert not {"🔴", "🟡"} & set(text), f"{path}:{node.lineno}"
    assert calls > 100

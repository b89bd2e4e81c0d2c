"""What a store says about itself: numbers that match what was done, and log lines with fixed fields."""

from __future__ import annotations

import io
import json
import logging
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import headway.states
from headway import telemetry
from headway.errors import StorageError
from headway.states import LiveStore, Manager, State, Subscription
from headway.telemetry import metrics
from tests.states.conftest import Place, live, replayed


class Tally:
    """A sink of one's own."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float, dict[str, str]]] = []

    def measured(self, name: str, kind: str, value: float, labels: Mapping[str, str]) -> None:
        self.told.append((name, kind, value, dict(labels)))


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


@pytest.mark.req("S1-57", "S1-58")
@pytest.mark.stores(("sqlite", "postgresql", "redis"))
def test_a_scrape_after_a_scripted_run_shows_exactly_what_was_done(place: Place):
    kind = place.kind
    with telemetry.serve_metrics(0) as server:
        before = scraped(server.port)
        store, writer = place.open(), place.open()
        subscription = store.subscribe(depth=4)
        replayed(subscription)
        for number in range(5):
            writer.set_state(State("job", 0, "a", number))
            assert live(subscription)[0].status == number
        for _ in range(10):
            store.get_state(0, "a")
        for number in range(3):
            store.set_state(State("job", 1, "b", number))
        while subscription.waiting < 3:
            continue
        subscription.close()
        after = scraped(server.port)

    def grew(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grew(f'headway_states_writes_total{{result="ok",store="{kind}"}}') == 8
    assert grew(f'headway_states_writes_total{{result="error",store="{kind}"}}') == 0
    assert grew(f'headway_states_write_seconds_count{{store="{kind}"}}') == 8
    assert grew('headway_states_reads_total{result="hit"}') >= 10
    assert grew('headway_states_reads_total{result="miss"}') == 0
    assert grew("headway_states_replay_seconds_count") == 1
    assert grew("headway_states_delivery_seconds_count") == 5
    assert grew("headway_states_dropped_total") == 3
    assert grew(f'headway_states_version_gaps_total{{store="{kind}"}}') == 0
    assert grew(f'headway_states_listener_reconnects_total{{store="{kind}"}}') == 0
    assert grew(f'headway_states_live_seconds_count{{store="{kind}"}}') >= 1


@pytest.mark.req("S1-57")
def test_a_version_that_was_missed_is_counted_as_drift(store: LiveStore):
    name, label = "headway_states_version_gaps", store._backend.kind
    before = metrics.value(name, store=label)
    for version in (1, 2, 6):
        store._cache.apply([headway.states.store.contract.Change((2, "x"), State("job", 2, "x", version=version))])
    assert metrics.value(name, store=label) - before == 3


@pytest.mark.req("S1-57")
@pytest.mark.stores(("sqlite",))
def test_a_write_that_fails_is_counted(place: Place):
    store = place.open()
    store._backend._database.run = lambda *_, **__: (_ for _ in ()).throw(StorageError("no"))  # type: ignore[attr-defined]
    before = metrics.value("headway_states_writes", store="sqlite", result="error")
    with pytest.raises(StorageError, match="could not be written"):
        store.set_state(State("job", 0, "a"))
    assert metrics.value("headway_states_writes", store="sqlite", result="error") - before == 1


@pytest.mark.req("S1-58")
def test_every_measurement_can_go_to_a_sink_of_ones_own_as_it_happens():
    tally = Tally()
    private = telemetry.Metrics()
    private.add_sink(tally)
    private.count("headway_x", 2, store="redis")
    private.observe("headway_y", 0.5)
    assert tally.told == [("headway_x", "counter", 2, {"store": "redis"}), ("headway_y", "histogram", 0.5, {})]


@pytest.mark.req("S1-58")
def test_the_exposition_has_cumulative_buckets_and_every_kind():
    private = telemetry.Metrics()
    private.count("headway_c", 3, a="1")
    private.count("headway_c", 4, a="2")
    private.gauge("headway_g", 7.5)
    for value in (0.00005, 0.02, 0.02, 10_000):
        private.observe("headway_h_seconds", value)
    text = telemetry.exposition(private).decode()
    assert 'headway_c_total{a="1"} 3.0' in text
    assert 'headway_c_total{a="2"} 4.0' in text
    assert "headway_g 7.5" in text
    assert 'headway_h_seconds_bucket{le="0.0001"} 1.0' in text
    assert 'headway_h_seconds_bucket{le="0.05"} 3.0' in text
    assert 'headway_h_seconds_bucket{le="+Inf"} 4.0' in text
    assert "headway_h_seconds_count 4.0" in text


@pytest.mark.req("S1-58")
def test_nothing_of_cloud_monitoring_is_imported_and_no_metric_is_stored():
    rooms = (headway.states, telemetry)
    text = "".join(path.read_text() for room in rooms for path in Path(str(room.__file__)).parent.glob("*.py"))
    assert not re.search(r"cloud.monitoring|stackdriver|opencensus|cloud_logging", text, re.IGNORECASE)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    logger = logging.getLogger("headway")
    before, level = list(logger.handlers), logger.level
    stream = io.StringIO()
    telemetry.configure(level="DEBUG", as_json=True, stream=stream)
    yield stream
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.mark.req("S1-56")
def test_log_lines_carry_job_tag_task_version_and_event(store: LiveStore, lines: io.StringIO):
    store.set_state(State("job", 1, "ingest", event_id="e-9"))
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    (line,) = [line for line in written if line["message"] == "state written"]
    assert {name: line[name] for name in ("jobID", "taskID", "tag", "version", "eventID")} == {
        "jobID": "job",
        "taskID": 1,
        "tag": "ingest",
        "version": 1,
        "eventID": "e-9",
    }


@pytest.mark.req("S1-56")
@pytest.mark.stores(("memory",))
def test_an_error_in_the_log_begins_with_the_red_sign_and_says_what_failed(store: LiveStore, lines: io.StringIO):
    store._backend._database.run = lambda *_, **__: (_ for _ in ()).throw(StorageError("full\nforged"))  # type: ignore[attr-defined]
    with pytest.raises(StorageError):
        Manager("job", 0, 3, store).set_started("ingest")
    (line,) = [line for line in map(json.loads, lines.getvalue().splitlines()) if line["level"] == "ERROR"]
    assert line["message"] == "\U0001f534 failed to write state"
    assert line["error"] == "full\nforged"
    assert (line["jobID"], line["taskID"], line["tag"]) == ("job", 0, "ingest")


@pytest.mark.req("S1-57", "S1-28")
def test_dropped_and_skipped_events_are_counted_apart():
    before = {name: metrics.value(f"headway_states_{name}") for name in ("dropped", "skipped")}
    subscription = Subscription(depth=4, overflow="latest")
    subscription.start([])
    for version in range(1, 11):
        subscription.offer(State("job", 0, "a", version=version))
    subscription.close()
    grown = {name: metrics.value(f"headway_states_{name}") - value for name, value in before.items()}
    assert grown == {"dropped": 5, "skipped": 5}

"""Contract of the finish line's SQL stores, over both engines: records, journal, deliveries."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headway._sql import Database, connect
from headway.errors import InvalidInput, NotFound, Refused
from headway.events import Event
from headway.finishline import Progress, Status
from headway.finishline.store.deliveries import Deliveries
from headway.finishline.store.journal import Journal
from headway.finishline.store.records import CHUNK, Records, Row


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path}/p.db" if request.param == "sqlite" else request.getfixturevalue("postgres_with_tables")
    with connect(url) as opened:
        yield opened


def create(records: Records, name: str = "p", *, total: int = 3, journaled: bool = True, live: bool = True) -> Row:
    return records.create(name, total=total, journaled=journaled, live=live)[0]


def completed(row: Row) -> Event:
    data = {"total": 3, "succeeded": 2, "failed": 1}
    return Event(
        f"job.completed:{row.id}:{row.epoch}", "job.completed", datetime.now(UTC), "finishline", row.id, 1, data
    )


def test_a_project_is_created_once_and_keeps_its_first_values(database: Database):
    records = Records(database)
    row, new = records.create("p", total=3, journaled=True, live=True)
    again, new_again = records.create("p", total=9, journaled=False, live=False)
    assert (new, new_again) == (True, False)
    assert again == row == records.find("p")
    assert row.progress() == Progress(Status.INITIALIZING, 3, live=False)
    assert records.find("other") is None


def test_changes_keep_other_values_and_raise_the_version(database: Database):
    records = Records(database)
    before = create(records)
    first = records.change("p", total=5, status=None, crawled=None)
    second = records.change("p", total=None, status=Status.PROCESSING, crawled=True)
    assert first is not None
    assert second is not None
    assert (second.total, second.status, second.crawled) == (5, Status.PROCESSING, True)
    assert before.version < first.version < second.version
    assert records.change("other", total=1, status=None, crawled=None) is None


def test_a_completed_project_does_not_change_and_its_counts_never_fall(database: Database):
    records = Records(database)
    row = create(records)
    for done, errors in ((3, 1), (2, 0)):
        records.completed("p", row.epoch, Progress(Status.DONE, 3, done, errors))
    found = records.change("p", total=9, status=Status.FAILED, crawled=None)
    assert found is not None
    assert found.progress() == Progress(Status.DONE, 3, 3, 1, live=False)
    assert not records.is_over(found)
    records.delivered("p", row.epoch, completed(row).data)
    delivered = records.find("p")
    assert delivered is not None
    assert records.is_over(delivered)


def test_the_first_call_that_claims_a_completion_keeps_it(database: Database):
    records = Records(database)
    row = create(records)
    assert [records.claim_completion("p", row.epoch, by) for by in ("a.1", "b.1", "a.1")] == [True, False, True]


def test_writes_for_another_epoch_change_nothing(database: Database):
    records = Records(database)
    row = create(records, journaled=False)
    records.completed("p", "another", Progress(Status.DONE, 3, 3, 0))
    records.delete("p", "another")
    assert records.find("p") == row
    records.delete("p", row.epoch)
    assert records.find("p") is None


def test_pages_of_recent_projects_have_each_project_once(database: Database):
    records = Records(database)
    names = {f"p{number}" for number in range(CHUNK + 1)}
    for name in names:
        create(records, name)
    pages = list(records.recent(delivered=False))
    assert [len(page) for page in pages] == [CHUNK, 1]
    assert {row.id for page in pages for row in page} == names


def test_the_journal_counts_each_item_once_and_keeps_its_first_verdict(database: Database):
    records, journal = Records(database), Journal(database)
    row = create(records)
    first = journal.write("p", {"#1": (False, None), "$a": (True, "404")})
    second = journal.write("p", {"#1": (True, "late"), "#2": (False, None)})
    assert (first.fresh, second.fresh) == (2, 1)
    assert second.verdicts == {"#1": False, "#2": False}
    assert (first.epoch, first.version) == (row.epoch, row.version)
    assert [item for page in records.counts(row) for item in page] == [("#1", False), ("#2", False), ("$a", True)]
    found = records.find("p")
    assert found is not None
    assert (found.done, found.errors) == (3, 1)


def test_the_journal_refuses_projects_without_one(database: Database):
    records, journal = Records(database), Journal(database)
    create(records, journaled=False)
    with pytest.raises(Refused, match="without a journal"):
        journal.write("p", {"#1": (False, None)})
    with pytest.raises(NotFound):
        journal.write("other", {"#1": (False, None)})


def test_deliveries_are_known_per_sink_until_every_sink_has_the_event(database: Database):
    records = Records(database)
    deliveries = Deliveries(database, records)
    one, two = (create(records, name) for name in ("one", "two"))
    events = [completed(one), completed(two)]
    deliveries.note("a", events[:1])
    deliveries.note("a", events[:1])
    assert deliveries.taken("a", events) == {events[0].id}
    assert deliveries.taken("b", events) == set()
    deliveries.settled(events[:1])
    assert deliveries.taken("b", events) == {events[0].id}
    assert database.all("SELECT * FROM project_deliveries") == []


def test_an_invalid_database_is_refused():
    with pytest.raises(InvalidInput, match="database"):
        Records(datetime.now(UTC))  # type: ignore[arg-type]  # the error under test

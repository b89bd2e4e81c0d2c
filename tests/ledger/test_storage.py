"""What the ledger keeps and how: schema, plans of queries, hostile and unacceptable input, what the log says."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway._sql import Database, Tx
from headway.core.failure import shortened
from headway.errors import InvalidInput
from headway.ledger import Done, Failed, Failure, Job, Ledger, NewItem, ProgressManager, canonical
from headway.ledger.manager import JOB
from headway.ledger.store.recorder import ERROR_KEPT
from tests.core.databases import everywhere, sqlite_url

# ---- schema ---------------------------------------------------------------------------------------------------------


def columns(database: Database, table: str) -> dict[str, tuple[str, bool, str | None]]:
    """Of each column its type, whether it must have a value, and its default."""
    if database.engine == "sqlite":
        rows = database.all(f"SELECT name, type, \"notnull\", dflt_value FROM pragma_table_info('{table}')")
        return {name: (kind.lower(), bool(required), default) for name, kind, required, default in rows}
    rows = database.all(
        "SELECT column_name, data_type, is_nullable = 'NO', column_default FROM information_schema.columns "
        "WHERE table_schema = 'headway' AND table_name = ?",
        (table,),
    )
    return {name: (kind, required, default) for name, kind, required, default in rows}


@pytest.mark.req("S3-44")
@everywhere
def test_progress_has_the_columns_of_its_document(url: str):
    with Ledger.open(url) as ledger:
        found = columns(ledger.database, "progress")
        assert found["idx"] == ("bigint", True, None)
        assert found["status"][:2] == ("text", True)
        assert found["meta"] == ("text", False, None)
        assert found["attempts"] == ("integer", True, "0")
        assert found["updated_at"][1] is True


@pytest.mark.req("S3-46")
@everywhere
def test_dead_letters_have_the_columns_of_their_document(url: str):
    with Ledger.open(url) as ledger:
        found = columns(ledger.database, "dead_letters")
        assert found["idx"] == ("bigint", True, None)
        assert found["meta"] == ("text", False, None)
        assert found["error"] == ("text", True, None)
        assert found["created_at"][1] is True


@pytest.mark.req("S3-45")
@everywhere
def test_the_two_indexes_of_progress_exist(url: str):
    with Ledger.open(url) as ledger:
        database = ledger.database
        if database.engine == "sqlite":
            rows = database.all("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = 'progress'")
        else:
            rows = database.all("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'progress'")
        indexes = {name: definition or "" for name, definition in rows}
        assert "status" in indexes["idx_progress_status"]
        assert "updated_at" in indexes["idx_progress_updated"]


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy_job(tmp_path: Path) -> Iterator[Job]:
    """2,000 items in every state, and statistics, so that the planner knows what is cheap."""
    with Ledger.open(sqlite_url(tmp_path / "a.db")) as ledger:
        job = ledger.create("ads")
        job.register(NewItem(n, "{}", f"key-{n}") for n in range(2000))
        job.record([Done(n) for n in range(1000)])
        for _ in range(3):
            job.record([Failed(n, Failure("ValueError", "no")) for n in range(1000, 1050)])
        job.record([Failed(n, Failure("ValueError", "no")) for n in range(1050, 1100)])
        ledger.database.run(lambda tx: tx.execute("ANALYZE"))
        yield job


@pytest.mark.req("S3-36")
def test_no_query_of_daily_work_reads_a_whole_table(busy_job: Job, monkeypatch: pytest.MonkeyPatch):
    """Every statement the ledger really sends is explained; none may scan a table that grows with the items, nor the
    whole of an index on it.

    (`SCAN d LEFT-JOIN` is the grouped handful of causes, not the table.)
    """
    sent: dict[str, object] = {}
    execute, executemany = Tx.execute, Tx.executemany
    database = busy_job.database

    def note(sql: str, parameters: object) -> None:
        sent.setdefault(sql, parameters)

    for name in ("execute", "one", "all"):
        original = getattr(Tx, name)

        def spy(self, sql, parameters=(), original=original):
            note(sql, parameters)
            return original(self, sql, parameters)

        monkeypatch.setattr(Tx, name, spy)

    def spy_many(self, sql, rows):
        rows = list(rows)
        if rows:
            note(sql, rows[0])
        return executemany(self, sql, rows)

    monkeypatch.setattr(Tx, "executemany", spy_many)
    one = type(database).one

    def spy_one(self, sql, parameters=()):
        note(sql, parameters)
        return one(self, sql, parameters)

    monkeypatch.setattr(type(database), "one", spy_one)

    (claimed, *_) = busy_job.claim("w", limit=3)
    busy_job.renew([claimed])
    busy_job.record([Done(claimed.idx, token=claimed.token)])
    busy_job.record([Done(1500), Done(1501, result="1")])
    busy_job.record([Failed(1502, Failure("KeyError", "sku"))])
    busy_job.give_back([claimed.idx])
    assert busy_job.is_done(5)
    assert busy_job.untouched(-1, 10)
    assert busy_job.due(10, within=1000.0)
    busy_job.last_pass(10)
    busy_job.history(1000)
    assert busy_job.dead_letters()
    assert busy_job.dead_letters(cause=1)
    busy_job.causes()
    busy_job.minutes(0)
    busy_job.results()
    busy_job.info()
    busy_job.retry_dead(indices=[1000])
    assert list(busy_job.fingerprints())
    monkeypatch.undo()

    growing = re.compile(r"^SCAN (input_products|progress|attempts|dead_letters|results|p|i|d|a|r)\b(?! LEFT-JOIN)")
    explained = 0
    for sql, parameters in sent.items():
        if not sql.lstrip().upper().startswith(("SELECT", "INSERT", "UPDATE", "DELETE")):
            continue
        with database.read() as tx:
            plan = tx.all(f"EXPLAIN QUERY PLAN {sql}", parameters)  # type: ignore[arg-type]
        explained += 1
        assert not [detail for *_, detail in plan if growing.search(detail)], (sql, plan)
    assert explained > 20
    assert execute is Tx.execute


# ---- hostile text ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "'; DROP TABLE jobs; --",
    '" OR 1=1 --',
    "Robert'); DELETE FROM progress; --",
    "%s %(name)s ? :x $1 {0} \\",
    "\u202egnp.exe\u2028\x1b[31m",
    "é\N{COMBINING ACUTE ACCENT} 🎈 \U0010ffff",
    "a" * 100 + "\n" * 50,
    "NULL",
]


@pytest.mark.req("S3-40")
@everywhere
def test_hostile_text_is_kept_as_text_and_nothing_is_executed(url: str):
    with Ledger.open(url) as ledger:
        job = ledger.create("ads", function=HOSTILE[0], source=HOSTILE[1])
        job.register([NewItem(n, canonical({"text": text}), text) for n, text in enumerate(HOSTILE)])
        claimed = {item.idx: item for text in HOSTILE for item in job.claim(text, limit=1)}
        assert [json.loads(item.payload or "")["text"] for item in claimed.values()] == HOSTILE
        assert [item.key for item in claimed.values()] == HOSTILE
        for idx, item in claimed.items():
            job.record([Failed(idx, Failure(HOSTILE[idx][:40], HOSTILE[idx], HOSTILE[0]), token=item.token)])
        job.record([Done(n, canonical({"text": text}), canonical(text), worker=text) for n, text in enumerate(HOSTILE)])
        found = {item.idx: item for item in job.items()}
        for idx, text in enumerate(HOSTILE):
            assert found[idx].status == "done"
            assert found[idx].worker == text
            assert json.loads(found[idx].meta or "") == {"text": text}
            (first, last) = job.history(idx)
            assert (first.worker, last.worker) == (None, text)
            assert first.error == shortened(f"{text[:40]}: {text}", ERROR_KEPT)
        assert [json.loads(result) for _, _, _, result in job.results()] == HOSTILE
        info = job.info()
        assert (info.function, info.source, info.total, info.done) == (
            HOSTILE[0],
            HOSTILE[1],
            len(HOSTILE),
            len(HOSTILE),
        )


@pytest.mark.req("S3-40")
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_through_the_manager_comes_back_as_it_went_in(tmp_path: Path, text: str):
    with ProgressManager(tmp_path / "a.db", max_retries=0) as progress:
        progress.register([{"text": text}, text])
        progress.claim(text)
        progress.mark_failed(0, {"error": text, "text": text})
        progress.mark_done(1, {"text": text})
        (dead,) = progress.dead_letters()
        assert text in (dead.error, json.loads(dead.meta or "")["text"])
        assert progress.is_done(1)
        assert "1 of 2 done" in progress.stats()


# ---- unacceptable input ---------------------------------------------------------------------------------------------


class Weird:
    pass


LOOP: list[object] = []
LOOP.append(LOOP)


@pytest.mark.req("S3-41")
@pytest.mark.parametrize("idx", [-1, True, False, 2**63, 10**30, 1.0, float("nan"), "1", None, b"1", [1]])
def test_an_index_is_a_whole_number_from_0_and_nothing_else(tmp_path: Path, idx):
    with ProgressManager(tmp_path / "a.db") as progress:
        for call in (
            progress.is_done,
            progress.mark_done,
            progress.mark_failed,
            lambda bad: progress.mark_many([(1, None), (bad, None)]),
            lambda bad: progress.job.register([NewItem(bad)]),
        ):
            with pytest.raises(InvalidInput):
                call(idx)
        assert progress.job.info().total == 0
        progress.mark_done(2**63 - 1)
        assert progress.is_done(2**63 - 1)


@pytest.mark.req("S3-41")
@pytest.mark.parametrize(
    "meta",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": Weird()}, {"a": {1, 2}}, {"a": b"x"}, {"a": "\ud800"},
     {"a": "x\0y"}, {"a": LOOP}, {("t",): 1}, [1], "text", 5],
    ids=["nan", "inf", "object", "set", "bytes", "surrogate", "nul", "loop", "tuple key", "list", "text", "number"],
)  # fmt: skip
@everywhere
def test_meta_that_is_no_json_is_refused_alike_and_nothing_is_written(url: str, meta, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_DATABASE", url)
    with ProgressManager() as progress:
        with pytest.raises(InvalidInput):
            progress.mark_done(1, meta)
        with pytest.raises(InvalidInput):
            progress.mark_many([(2, None), (3, meta)])
        assert progress.job.info().total == 0
        progress.mark_done(1, {"fine": [1, None, "é", {"x": 0.5}]})
        assert progress.is_done(1)


@pytest.mark.req("S3-41")
@everywhere
@pytest.mark.parametrize("payload", [{"a": float("nan")}, "\ud800", "x\0y", {"a": Weird()}, {1, 2}])
def test_a_payload_that_is_not_json_is_refused(url: str, payload: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_DATABASE", url)
    with ProgressManager() as progress:
        with pytest.raises(InvalidInput):
            progress.register([{"fine": 1}, payload])
        assert progress.job.info().done == 0


@pytest.mark.req("S3-41")
@everywhere
def test_a_worker_name_of_half_a_character_is_refused_alike(url: str):
    with Ledger.open(url) as ledger:
        job = ledger.create("ads")
        job.register([NewItem(1)])
        with pytest.raises(InvalidInput):
            job.claim("half \ud800")
        assert len(job.claim("whole")) == 1


@pytest.mark.req("S3-41")
@everywhere
@pytest.mark.parametrize(
    "arguments", [{"limit": 0}, {"limit": -1}, {"lease": 0}, {"lease": -1.0}, {"lease": float("nan")}, {"lease": 1e12}]
)
def test_a_claim_of_nothing_or_for_no_time_is_refused(url: str, arguments):
    with Ledger.open(url) as ledger, pytest.raises(InvalidInput):
        ledger.create("ads").claim("w", **arguments)


@pytest.mark.req("S3-41")
@everywhere
def test_ids_and_numbers_of_retries_are_checked(url: str):
    with Ledger.open(url) as ledger:
        for bad in ("", "a b", "../x", "a" * 129, "__x__", None, 5):
            with pytest.raises(InvalidInput):
                ledger.create(bad)  # type: ignore[arg-type]  # that is the point
        for retries in (-1, True, 1.5, "2", 10**9):
            with pytest.raises(InvalidInput):
                ledger.create("ads", max_retries=retries)  # type: ignore[arg-type]  # that is the point
        assert ledger.jobs() == []


# ---- what the log says ----------------------------------------------------------------------------------------------


@pytest.mark.req("S3-52")
def test_the_log_of_a_manager_tells_of_updates_retries_failures_and_the_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("DEBUG", "headway")
    with ProgressManager(tmp_path / "a.db", max_retries=1) as progress:
        progress.register(range(3))
        progress.mark_done(0)
        progress.mark_failed(1, {"error": "timeout"})
        progress.mark_failed(1, {"error": "timeout"})
        progress.mark_failed(0, {"error": "too late"})
        progress.retry_dead()
    told = [(record.message, record.fields) for record in caplog.records if hasattr(record, "fields")]
    messages = [message for message, _ in told]
    assert messages.count("transaction begun") == messages.count("transaction committed") + messages.count(
        "transaction rolled back"
    )
    assert ("transaction committed", {"operation": "record"}) in told
    facts = dict(told)
    assert facts["items registered"]["count"] == 3
    assert (facts["item failed"]["idx"], facts["item failed"]["attempt"]) == (1, 1)
    assert facts["item is dead"]["error"] == "timeout"
    assert facts["dead letters are retried"]["count"] == 1
    assert "a failure of an item that is done was ignored" in messages
    with contextlib.closing(ProgressManager(tmp_path / "a.db", max_retries=1)):
        facts = {record.message: record.fields for record in caplog.records if hasattr(record, "fields")}
        assert (
            facts["resuming: done items are skipped"]["done"],
            facts["resuming: done items are skipped"]["job"],
        ) == (1, JOB)

"""The verbs that change recorded work: they ask first, say what they did, and leave a trace."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from headway.ledger import Done, Ledger
from tests.cli.conftest import COMMAND, Answer
from tests.services.redis import RedisServer

Cli = Callable[..., Answer]


def statuses(path: Path) -> dict[str, int]:
    with Ledger.open(f"sqlite:///{path}") as ledger:
        info = ledger.job("ads").info()
    return {"done": info.done, "retrying": info.failed, "dead": info.dead, "pending": info.remaining - info.failed}


# ---- dead letters ---------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-51")
def test_dead_letters_are_reported_apart_grouped_by_cause(cli: Cli, ads: Path):
    lines = cli("dead", "list").out.splitlines()
    assert lines[0].split() == ["JOB", "CAUSE", "DEAD", "LAST", "SEEN", "TYPE", "MESSAGE"]
    assert [line.split()[:3] for line in lines[1:]] == [["ads", "1", "4"], ["ads", "2", "2"]]
    document = cli("dead", "list", "ads", "--json").json
    assert document["schema"] == "headway.dead/1"
    assert [(cause["job"], cause["dead"], cause["type"]) for cause in document["causes"]] == [
        ("ads", 4, "TimeoutError"),
        ("ads", 2, "JSONDecodeError"),
    ]


def test_dead_show_gives_each_cause_with_its_items_and_the_command_to_retry(cli: Cli, ads: Path):
    text = cli("dead", "show", "ads", "--limit", "3").out
    assert "Cause 1: 4 dead, 13 failed runs" in text
    assert "in conftest.py:fetch" in text
    assert "40 (sku-40)  2 failures  TimeoutError: GET https://store.internal/docs/sku-40.pdf timed out" in text
    assert "... and 1 more" in text
    assert "Retry them:  headway retry ads --cause 1" in text
    assert "Cause 2" not in cli("dead", "show", "ads", "--cause", "1").out
    document = cli("dead", "show", "ads", "--cause", "2", "--json").json
    assert [item["idx"] for item in document["causes"][0]["items"]] == [44, 45]


def test_an_unknown_cause_is_a_usage_error_that_says_which_there_are(cli: Cli, ads: Path):
    for arguments in (("dead", "show", "ads"), ("retry", "ads", "--yes"), ("dead", "export", "ads")):
        answer = cli(*arguments, "--cause", "9")
        assert answer.code == 2
        assert "no cause 9 (it has: 1, 2)" in answer.err


@pytest.mark.req("S3-43")
@pytest.mark.parametrize("verb", [("dead", "retry"), ("retry",)])
def test_retrying_one_cause_moves_exactly_its_items_and_is_audited(cli: Cli, ads: Path, verb: tuple[str, ...]):
    answer = cli(*verb, "ads", "--cause", "2", "--yes", "--reason", "fixed the parser")
    assert (answer.code, answer.out) == (0, "")
    assert "2 dead letters of job ads pending again." in answer.err
    assert f"Run them:  {COMMAND}" in answer.err
    assert statuses(ads) == {"done": 40, "retrying": 5, "dead": 4, "pending": 11}
    (entry,) = cli("audit", "--json").json["audit"]
    assert (entry["action"], entry["job"], entry["detail"]["reason"]) == ("retry", "ads", "fixed the parser")
    assert entry["actor"] not in ("", "headway")
    assert cli("dead", "list", "ads", "--json").json["causes"][0]["no"] == 1


def test_single_items_are_retried_by_key_or_index(cli: Cli, ads: Path):
    assert cli("retry", "ads", "--item", "sku-40", "--item", "41", "--yes").code == 0
    assert statuses(ads)["dead"] == 4
    answer = cli("retry", "ads", "--item", "sku-3", "--yes")
    assert answer.code == 2
    assert "is not dead, it is done" in answer.err


def test_all_dead_letters_are_retried_when_none_are_named(cli: Cli, ads: Path):
    assert "6 dead letters" in cli("retry", "ads", "--yes").err
    assert statuses(ads)["dead"] == 0
    again = cli("retry", "ads", "--yes")
    assert (again.code, again.err) == (0, "Job ads has no dead letters.\n")


def test_cause_and_item_together_are_refused(cli: Cli, ads: Path):
    assert cli("retry", "ads", "--cause", "1", "--item", "40", "--yes").code == 2
    assert statuses(ads)["dead"] == 6


@pytest.mark.req("S3-42")
def test_the_export_is_jsonl_and_has_payloads_only_on_demand(cli: Cli, ads: Path):
    letters = [json.loads(line) for line in cli("dead", "export", "ads").out.splitlines()]
    assert [letter["idx"] for letter in letters] == [40, 41, 42, 43, 44, 45]
    assert letters[0].keys() == {"job", "idx", "key", "error", "cause", "failures", "died_at", "printed"}
    (first, *_) = cli("dead", "export", "ads", "--cause", "2", "--payload").out.splitlines()
    assert json.loads(first)["payload"]["sku"] == "sku-44"


def test_no_dead_letters_is_talk_and_no_data(cli: Cli, ads: Path):
    cli("retry", "ads", "--yes")
    for arguments in (("dead", "list"), ("dead", "show", "ads"), ("dead", "export", "ads")):
        assert cli(*arguments).out == ""
        assert cli(*arguments).code == 0


# ---- forgetting -----------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-43")
def test_forgetting_deletes_the_job_and_is_audited(cli: Cli, ads: Path):
    answer = cli("forget", "ads", "--yes")
    assert (answer.code, answer.err) == (0, "Job ads and its 60 items are deleted.\n")
    assert cli("jobs", "--all", "--json").json["jobs"] == []
    assert [entry["action"] for entry in cli("audit", "ads", "--json").json["audit"]] == ["forget"]
    assert "forget" in cli("audit").out


def test_a_job_that_is_being_run_is_not_forgotten(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        hold = ledger.hold(ledger.job("ads"), {})
        answer = cli("forget", "ads", "--yes")
        ledger.release(hold, "interrupted")
    assert answer.code == 5
    assert statuses(ads)["done"] == 40


@pytest.mark.req("S3-43", "S3-54")
def test_purging_deletes_finished_jobs_older_than_the_retention(cli: Cli, ads: Path, monkeypatch: pytest.MonkeyPatch):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        ledger.job("ads").record([Done(idx) for idx in range(46, 60)])
        ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET updated_at = updated_at - 10 * 86400"))
        ledger.create("unfinished")
    assert "0 jobs deleted" in cli("purge", "--yes").err  # 30 days by default
    monkeypatch.setenv("HEADWAY_RETENTION_DAYS", "none")
    assert cli("purge", "--yes").code == 2
    monkeypatch.setenv("HEADWAY_RETENTION_DAYS", "7")
    assert "1 job deleted that had not changed for 7 days." in cli("purge", "--yes").err
    assert [job["id"] for job in cli("jobs", "--json").json["jobs"]] == ["unfinished"]
    assert [entry["action"] for entry in cli("audit", "--json").json["audit"]] == ["purge"]


@pytest.mark.parametrize(
    "arguments", [("retry", "ads"), ("dead", "retry", "ads"), ("forget", "ads"), ("purge", "--older-than", "0")]
)
def test_without_a_terminal_a_question_is_refused_with_its_flag(cli: Cli, ads: Path, arguments: tuple[str, ...]):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        ledger.job("ads").record([Done(idx) for idx in range(46, 60)])
    before = statuses(ads)
    answer = cli(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "--yes" in answer.err
    assert statuses(ads) == before


def test_an_empty_audit_trail_has_a_message(cli: Cli, ads: Path):
    answer = cli("audit", "ads")
    assert (answer.code, answer.out, answer.err) == (0, "", "Nothing is in the audit trail about ads.\n")


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-54")
def test_config_shows_each_setting_and_where_it_comes_from(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "headway.toml").write_text("workers = 3\n[profiles.production]\nretries = 9\n")
    monkeypatch.setenv("HEADWAY_TIMEOUT", "2.5")
    monkeypatch.setenv("HEADWAY_PROFILE", "production")
    text = cli("config", "--show-origin", "-d", "sqlite:///other.db").out
    assert 'database = "sqlite:///other.db"    # command line' in text
    assert "timeout = 2.5    # HEADWAY_TIMEOUT" in text
    assert "workers = 3    # headway.toml" in text
    assert "retries = 9    # headway.toml [profiles.production]" in text
    assert 'mode = "process"    # default' in text
    document = cli("config", "--json").json
    assert document["schema"] == "headway.config/1"
    assert document["settings"]["workers"] == {
        "value": 3,
        "origin": "headway.toml",
        "help": document["settings"]["workers"]["help"],
    }
    assert "#" not in cli("config").out


@pytest.mark.req("S3-42", "S3-54")
def test_config_shows_no_password_and_no_webhooks_path(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADWAY_DATABASE", "postgresql://headway:geheim@db/headway")
    monkeypatch.setenv("HEADWAY_WEBHOOK", "https://hooks.example.com/services/T0/B0/geheim")
    for arguments in (("config",), ("config", "--json"), ("config", "--show-origin")):
        answer = cli(*arguments)
        assert "geheim" not in answer.out + answer.err
        assert "postgresql://headway:***@db/headway" in answer.out
        assert "https://hooks.example.com/***" in answer.out


def test_a_setting_that_cannot_be_is_exit_2(cli: Cli, tmp_path: Path):
    (tmp_path / "headway.toml").write_text("wokers = 3")
    answer = cli("jobs")
    assert answer.code == 2
    assert "Did you mean 'workers'?" in answer.err


# ---- doctor ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-53")
def test_doctor_finds_a_healthy_store_healthy(cli: Cli, ads: Path):
    answer = cli("doctor")
    assert answer.code == 0
    assert {line.split()[1] for line in answer.out.splitlines()} == {
        "version", "config", "mode", "store", "writable", "schema", "integrity", "wal", "disk", "clock",
    }  # fmt: skip
    assert {line.split()[0] for line in answer.out.splitlines()} == {"ok"}
    document = cli("doctor", "--json").json
    assert (document["schema"], document["healthy"]) == ("headway.doctor/1", True)
    assert cli("audit", "--json").json["audit"] == []  # its test of writing left nothing


def test_doctor_asks_the_redis_of_the_queue(
    cli: Cli, ads: Path, redis_factory: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch
):
    def redis_line() -> tuple[int, str]:
        answer = cli("doctor")
        return answer.code, "".join(line for line in answer.out.splitlines() if line.split()[1] == "redis")

    server = redis_factory(maxmemory="50mb")
    monkeypatch.setenv("HEADWAY_QUEUE_REDIS", server.url())
    code, line = redis_line()
    assert (code, line[:4]) == (0, "ok  ")
    assert "version" in line
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    code, line = redis_line()
    assert (code, line[:4]) == (0, "warn")
    assert "maxmemory-policy allkeys-lru" in line
    server.kill9()
    code, line = redis_line()
    assert (code, line[:4]) == (1, "fail")
    assert "cannot be reached" in line
    monkeypatch.setenv("HEADWAY_QUEUE_MODE", "database")
    assert redis_line() == (0, ""), "the queue does not use it"


@pytest.mark.req("S3-39")
def test_doctor_warns_of_a_database_that_others_can_read(cli: Cli, ads: Path):
    ads.chmod(0o644)
    answer = cli("doctor")
    assert answer.code == 0
    assert "warn  mode      others can read headway.db" in answer.out


def test_doctor_warns_of_a_write_ahead_log_that_a_reader_keeps_from_being_checkpointed(cli: Cli, ads: Path):
    with closing(sqlite3.connect(ads)) as reader, closing(sqlite3.connect(ads)) as writer:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM jobs").fetchone()
        writer.execute("CREATE TABLE ballast (content BLOB)")
        for megabytes, verdict in ((60, "ok  "), (10, "warn")):  # the limit is 64 MiB, which is 67 MB
            for _ in range(megabytes):
                writer.execute("INSERT INTO ballast VALUES (zeroblob(1000000))")
            writer.commit()
            answer = cli("doctor")
            assert f"{verdict}  wal       write-ahead log of " in answer.out
            assert ("end it" in answer.out) == (verdict == "warn")


HOLD = """
import sys, time
from headway.ledger import Ledger
with Ledger.open("sqlite:///headway.db") as ledger:
    ledger.hold(ledger.job("ads"), {})
    print("held", flush=True)
    time.sleep(600)
"""


def test_doctor_tells_a_job_that_runs_from_one_whose_process_died(cli: Cli, ads: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=ads.parent, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            assert f"ok    job       ads is being run by process {holder.pid}" in cli("doctor").out
        finally:
            holder.kill()
    with Ledger.open(f"sqlite:///{ads}") as ledger:  # its lease has lapsed
        ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET lease_until = 1"))
    text = cli("doctor").out
    assert f"warn  job       ads: process {holder.pid}" in text
    assert f"Continue it: {COMMAND}" in text


def test_doctor_notices_a_clock_that_was_set_back(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        ledger.database.run(lambda tx: tx.execute("UPDATE jobs SET updated_at = updated_at + 3600"))
    assert "warn  clock     a job was changed " in cli("doctor").out


@pytest.mark.req("S3-29")
@pytest.mark.parametrize("content", [b"", b"not a database at all" * 10])
def test_doctor_fails_on_a_store_that_cannot_be_used(cli: Cli, tmp_path: Path, content: bytes):
    (tmp_path / "headway.db").write_bytes(content)
    answer = cli("doctor")
    assert answer.code == 1
    assert "fail  store" in answer.out


def test_doctor_says_that_a_database_is_missing_and_makes_none(cli: Cli, tmp_path: Path):
    answer = cli("doctor")
    assert answer.code == 1
    assert "fail  store     There is no database at headway.db." in answer.out
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_damaged_pages(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        (row,) = ledger.database.all("SELECT rootpage FROM sqlite_schema WHERE name = 'idx_dead_letters_cause'")
        (size,) = ledger.database.all("PRAGMA page_size")
    with closing(sqlite3.connect(ads)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with ads.open("r+b") as file:
        file.seek((row[0] - 1) * size[0])
        file.write(b"\xff" * size[0])
    answer = cli("doctor")
    assert answer.code == 1
    assert "fail  integrity" in answer.out

"""The verbs that read: what they say, to people and to programs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headway._sql.postgresql import PostgreSQL
from headway.cli.jobs.items import own_frames_first
from headway.ledger import Done, Ledger, NewItem
from headway.ledger.values import OF_THE_CAUSE
from tests.cli.conftest import COMMAND, Answer, seed

Cli = Callable[..., Answer]


# ---- jobs, runs, show ------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-13")
def test_jobs_lists_every_job_with_counts_that_agree_with_the_rows(cli: Cli, ads: Path):
    answer = cli("jobs")
    assert answer.code == 0
    assert answer.err == ""
    head, line = answer.out.splitlines()
    assert head.split() == ["JOB", "STATUS", "DONE", "RETRYING", "DEAD", "CHANGED", "FUNCTION"]
    assert re.split(r"\s{2,}", line)[:6] == ["ads", "interrupted", "40/60", "66.7%", "5", "6"]
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        (dead,) = ledger.database.all("SELECT count(*) FROM dead_letters")
        (done,) = ledger.database.all("SELECT count(*) FROM progress WHERE status = 'done'")
    (found,) = cli("jobs", "--json").json["jobs"]
    assert (found["done"], found["dead"]) == (done[0], dead[0])


def test_jobs_as_json_has_a_versioned_schema_and_stable_keys(cli: Cli, ads: Path):
    document = cli("jobs", "--json").json
    assert document["schema"] == "headway.jobs/1"
    (found,) = document["jobs"]
    assert list(found) == [
        "id", "status", "function", "source", "total", "done", "pending", "retrying", "dead", "failures", "percent",
        "sealed", "archived", "max_retries", "created_at", "updated_at", "finished_at", "holder", "command",
    ]  # fmt: skip
    assert (found["total"], found["pending"], found["retrying"], found["failures"]) == (60, 9, 5, 17)
    assert found["updated_at"].endswith("Z")


def test_an_empty_ledger_says_how_to_start_and_prints_nothing_on_stdout(cli: Cli, tmp_path: Path):
    Ledger.open(f"sqlite:///{tmp_path}/headway.db").close()
    answer = cli("jobs")
    assert (answer.code, answer.out) == (0, "")
    assert "headway run" in answer.err
    assert cli("jobs", "--json").json["jobs"] == []


@pytest.mark.req("S3-13", "S3-14", "S3-53")
def test_show_says_counts_runs_causes_and_the_exact_command_to_continue(cli: Cli, ads: Path):
    text = cli("show", "ads").out
    assert "Job ads: interrupted" in text
    assert "done 40, pending 9, retrying 5, dead 6; 17 failed runs of items" in text
    assert re.search(r"1 .* interrupted +0 +process \d+ on ", text)
    assert "4  TimeoutError     GET https://store.internal/docs/{id}.pdf timed out" in text
    assert text.rstrip().endswith(f"Continue:  {COMMAND}")
    document = cli("show", "ads", "--json").json
    assert document["schema"] == "headway.job/1"
    assert document["job"]["dead"] == 6
    assert [cause["dead"] for cause in document["causes"]] == [4, 2]
    assert document["runs"][0]["settings"]["workers"] == 2
    assert document["database"]["bytes"] > 0


def test_show_says_how_long_items_took_and_which_took_longest(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        job = ledger.create("timed")
        job.register([NewItem(idx, str(idx), f"inv\x1b[31m-{idx}\n" if idx else None, idx) for idx in range(20)])
        job.record([Done(idx, seconds=0.01 + 0.1 * idx) for idx in range(20)])
    text = cli("show", "timed").out
    assert "an item took 1.0 s (p50), 1.9 s (p95); slowest: inv [31m-19  1.9 s, inv [31m-18  1.8 s, inv" in text
    assert "\x1b" not in text
    found = cli("show", "timed", "--json").json["durations"]
    assert (found["p50"], found["p95"], found["looked_at"]) == (1.01, 1.91, 20)
    assert found["slowest"][0] == {"idx": 19, "key": "inv\x1b[31m-19\n", "seconds": 1.91}
    assert len(found["slowest"]) == 5


def test_show_names_the_process_that_runs_the_job(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        job = ledger.job("ads")
        hold = ledger.hold(job, {})
        job.record([Done(55)], hold=hold)
        text = cli("show", "ads").out
        assert f"processing by process {os.getpid()} on " in text
        assert "Continue" not in text
        assert "/s" in text
        document = cli("show", "ads", "--json").json
        assert document["job"]["holder"]["pid"] == os.getpid()
        assert document["rate"] > 0
        ledger.release(hold, "interrupted")


def test_the_rate_of_a_job_is_that_of_the_run_in_progress(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        job = ledger.job("ads")
        hold = ledger.hold(job, {})  # 40 items were done by the run before, in this very minute
        assert cli("show", "ads", "--json").json["rate"] is None
        job.record([Done(55)], hold=hold)
        document = cli("show", "ads", "--json").json
        assert 0 < document["rate"] <= 1
        assert document["eta_seconds"] is None  # one item says nothing about the rest
        ledger.release(hold, "interrupted")


def test_a_finished_job_with_dead_letters_offers_to_retry_them(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        ledger.job("ads").record([Done(idx) for idx in range(46, 60)])
    text = cli("show", "ads", "--database", f"sqlite:///{ads}").out
    assert "Job ads: completed" in text
    assert f"Retry what is dead:  headway retry ads --database sqlite:///{ads}" in text


def test_runs_lists_every_start(cli: Cli, ads: Path):
    document = cli("runs", "ads", "--json").json
    assert document["schema"] == "headway.runs/1"
    (run,) = document["runs"]
    assert (run["no"], run["outcome"], run["kept"]) == (1, "interrupted", 0)
    assert cli("runs", "ads").out.splitlines()[0].split() == ["RUN", "STARTED", "TOOK", "OUTCOME", "KEPT", "WHERE"]


def test_status_is_jobs_and_with_a_job_it_is_show(cli: Cli, ads: Path):
    assert cli("status", "--json").out == cli("jobs", "--json").out
    assert cli("status", "ads").out == cli("show", "ads").out


def test_watching_needs_a_terminal(cli: Cli, ads: Path):
    for arguments in (("status", "-w"), ("show", "ads", "--watch"), ("jobs", "-w", "--json")):
        answer = cli(*arguments)
        assert (answer.code, answer.out) == (2, "")
        assert "--json" in answer.err


def test_archived_jobs_are_listed_on_demand(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        aside = ledger.archive("ads")
        ledger.create("other")
    assert [job["id"] for job in cli("jobs", "--json").json["jobs"]] == ["other"]
    assert {job["id"] for job in cli("jobs", "--all", "--json").json["jobs"]} == {"other", aside}


# ---- items ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "indices"),
    [
        (("--status", "dead"), [40, 41, 42, 43, 44, 45]),
        (("--status", "dead", "--limit", "2"), [40, 41]),
        (("--status", "dead", "--after", "43"), [44, 45]),
        (("--cause", "2"), [44, 45]),
        (("--status", "retrying"), [46, 47, 48, 49, 50]),
        (("--status", "pending"), list(range(51, 60))),
        (("--after", "0", "--limit", "2"), [1, 2]),
    ],
)
def test_items_are_filtered_by_state_cause_and_place(
    cli: Cli, ads: Path, arguments: tuple[str, ...], indices: list[int]
):
    document = cli("items", "ads", "--json", *arguments).json
    assert document["schema"] == "headway.items/1"
    assert [item["idx"] for item in document["items"]] == indices
    assert all("payload" not in item for item in document["items"])


def test_a_page_that_is_not_the_last_says_how_to_get_the_next(cli: Cli, ads: Path):
    answer = cli("items", "ads", "--limit", "2", "--status", "dead")
    assert len(answer.out.splitlines()) == 3
    assert answer.err == "More:  headway items ads --status dead --after 41\n"
    assert cli("items", "ads", "--limit", "2", "--json").json["next_after"] == 1
    assert cli("items", "ads", "--limit", "60", "--json").json["next_after"] is None


@pytest.mark.req("S3-04", "S3-09", "S3-10")
def test_item_shows_every_run_with_the_error_and_the_users_own_frames(cli: Cli, ads: Path):
    text = cli("item", "ads", "sku-44").out
    assert "Item 44 (sku-44) of job ads: dead, 2 failures" in text
    assert text.count("failed after 0.5 s on w1: JSONDecodeError") == 2
    assert "in parse" in text
    assert "library frames; all of it: --traceback" in text
    assert "json/decoder.py" not in text
    assert "json/decoder.py" in cli("item", "ads", "44", "--traceback").out
    assert "headway retry ads --item 44" in text
    document = cli("item", "ads", "44", "--json").json
    assert document["schema"] == "headway.item/1"
    assert [attempt["outcome"] for attempt in document["attempts"]] == ["failed", "failed"]


@pytest.mark.req("S3-42")
def test_a_payload_is_masked_unless_asked_for_and_secrets_in_it_always(cli: Cli, ads: Path):
    assert "***" in cli("item", "ads", "3").out
    assert "sku-3" not in cli("item", "ads", "3").out.split("payload")[1]
    assert "payload" not in cli("item", "ads", "3", "--json").json["item"]
    shown = cli("item", "ads", "3", "--payload").out
    assert '{"sku": "sku-3", "api_token": "***"}' in shown
    assert cli("item", "ads", "3", "--payload", "--json").json["item"]["payload"] == {
        "sku": "sku-3",
        "api_token": "***",
    }


def test_an_item_that_waits_says_until_when(cli: Cli, ads: Path):
    assert "tried again from 20" in cli("item", "ads", "46").out


def test_an_unknown_item_is_a_usage_error(cli: Cli, ads: Path):
    answer = cli("item", "ads", "sku-999")
    assert answer.code == 2
    assert "no item 'sku-999'" in answer.err


def test_own_frames_come_first_and_library_frames_are_folded():
    detail = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/jobs.py", line 3, in extract\n    read(page)\n'
        '  File "/usr/lib/python3.11/json/decoder.py", line 1, in decode\n    raise it\n'
        '  File "/home/me/.venv/lib/python3.11/site-packages/x/y.py", line 1, in z\n    raise it\n'
        "ValueError: no\x1b[2J\n"
    )
    assert own_frames_first(detail) == [
        '  File "/home/me/jobs.py", line 3, in extract',
        "    read(page)",
        "  (2 library frames; all of it: --traceback)",
        "ValueError: no [2J",
    ]
    of_cause = f"{OF_THE_CAUSE}\n{detail}"
    assert own_frames_first(of_cause) == [OF_THE_CAUSE, *own_frames_first(detail)]
    assert own_frames_first(of_cause, whole=True)[0] == OF_THE_CAUSE


# ---- the log --------------------------------------------------------------------------------------------------------


@pytest.mark.req("S3-04")
def test_the_log_is_a_table_for_grep_with_every_run_of_every_item(cli: Cli, ads: Path):
    lines = cli("log", "ads", "--tsv").out.splitlines()
    assert lines[0].split("\t") == ["idx", "key", "outcome", "at", "seconds", "worker", "error"]
    assert len(lines) == 1 + 40 + 17
    assert lines[41].split("\t")[:3] == ["40", "sku-40", "failed"]
    document = cli("log", "ads", "--json").json
    assert document["schema"] == "headway.log/1"
    assert len(document["log"]) == 57
    assert document["log"][0]["outcome"] == "done"
    assert len(cli("log", "ads").out.splitlines()) == 57


def test_hostile_keys_cannot_break_a_table_or_move_the_cursor(cli: Cli, tmp_path: Path):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        job = ledger.create("evil")
        job.register([NewItem(0, "1", "a\tb\nc\x1b[2J", 1)])
        job.record([Done(0)])
    lines = cli("log", "evil", "--tsv").out.splitlines()
    assert len(lines) == 2
    assert len(lines[1].split("\t")) == 7
    for verb in ("items", "log"):
        assert "\x1b" not in cli(verb, "evil").out
    assert json.loads(cli("items", "evil", "--json").out)["items"][0]["key"] == "a\tb\nc\x1b[2J"


# ---- what is not there ----------------------------------------------------------------------------------------------

READERS = [
    ("jobs",), ("status",), ("show", "x"), ("runs", "x"), ("items", "x"), ("item", "x", "0"), ("log", "x", "--tsv"),
    ("dead", "list"), ("dead", "show", "x"), ("dead", "export", "x"), ("audit",), ("retry", "x", "--yes"),
    ("forget", "x", "--yes"), ("purge", "--yes"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_a_missing_database_is_reported_with_a_hint_and_not_created(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...]
):
    answer = cli(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "There is no database at headway.db." in answer.err
    assert "--database" in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [reader for reader in READERS if "x" in reader], ids=" ".join)
def test_an_unknown_job_is_a_usage_error_that_names_its_likes(cli: Cli, tmp_path: Path, arguments: tuple[str, ...]):
    with Ledger.open(f"sqlite:///{tmp_path}/headway.db") as ledger:
        ledger.create("ads-november")
    answer = cli(*(word.replace("x", "ads-novembre") if word == "x" else word for word in arguments))
    assert (answer.code, answer.out) == (2, "")
    assert "no job 'ads-novembre'" in answer.err
    assert "Did you mean ads-november?" in answer.err


def test_reading_an_empty_postgresql_makes_nothing_in_it(cli: Cli, postgres_url: str):
    answer = cli("jobs", "--database", postgres_url)
    assert answer.code == 2
    assert "no Headway tables" in answer.err
    Ledger.open(postgres_url).close()
    assert cli("jobs", "--database", postgres_url, "--json").json["jobs"] == []


def test_a_postgresql_ledger_is_read_by_the_same_verbs(cli: Cli, postgres_url: str):
    with Ledger.open(postgres_url) as ledger:
        seed(ledger)
    assert "dead 6; 17 failed runs" in cli("show", "ads", "-d", postgres_url).out
    assert cli("doctor", "-d", postgres_url).code == 0
    assert cli("retry", "ads", "--cause", "2", "--yes", "-d", postgres_url).code == 0
    assert "dead 4;" in cli("show", "ads", "-d", postgres_url).out


def test_a_server_that_is_away_is_exit_6(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PostgreSQL, "patience", -1.0)  # how long it waits is in test_bad_input
    answer = cli("jobs", "-d", "postgresql://headway:geheim@127.0.0.1:1/x")
    assert answer.code == 6
    assert "geheim" not in answer.err


@pytest.mark.req("S3-29")
def test_a_damaged_database_is_exit_1_and_left_as_it_is(cli: Cli, tmp_path: Path):
    path = tmp_path / "headway.db"
    path.write_bytes(b"")
    assert cli("jobs").code == 1
    assert path.read_bytes() == b""


def test_a_reader_works_while_a_writer_holds_the_database(cli: Cli, ads: Path):
    with Ledger.open(f"sqlite:///{ads}") as ledger:
        answers: list[Answer] = []
        ledger.database.run(lambda tx: answers.append(cli("jobs")))
    assert answers[0].code == 0

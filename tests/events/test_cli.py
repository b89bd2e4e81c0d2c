"""``headway relay``: serve, drain, look, and deal with what a sink refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway.cli
from headway._sql import connect
from headway.events import Event, Relay, SqlOutbox, append, open_sinks
from headway.finishline import FinishLine
from headway.ledger import ProgressManager
from tests.events.scene import event
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def database(tmp_path: Path) -> str:
    address = f"sqlite:///{tmp_path}/headway.db"
    with connect(address) as opened:
        opened.run(lambda tx: append(tx, event(1)))
    return address


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`cli("--status", sinks="log:")`: the verb in this process; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, sinks: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("HEADWAY_SINKS", sinks)
        code = headway.cli.invoke(["relay", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def told(receiver: Any) -> list[str]:
    return [Event.from_json(body).id for _, _, body in receiver.requests]


def test_once_delivers_the_waiting_events_and_exits(cli: Any, database: str, receiver: Any):
    for _ in range(2):
        assert cli("--once", "--database", database, sinks=receiver.url)[0] == 0
    assert told(receiver) == ["e-1"]


def test_once_ends_with_6_when_a_sink_did_not_take_everything(cli: Any, database: str, receiver: Any):
    receiver.answers = [503]
    code, _, said = cli("--once", "--seconds", "0.5", "--database", database, sinks=receiver.url)
    assert code == 6
    assert "still wait" in said


def test_it_serves_every_outbox_until_it_is_stopped(
    spawn_cli: Spawn, database: str, redis_server: RedisServer, receiver: Any
):
    environment = {
        "HEADWAY_SINKS": receiver.url, "HEADWAY_DATABASE": database, "HEADWAY_PROJECTS_REDIS": redis_server.url(1),
    }  # fmt: skip
    relay = spawn_cli("relay", env=environment)
    eventually(lambda: told(receiver) == ["e-1"], 60)
    with FinishLine(redis_server.url(1), database, checkpointer=False) as line:
        line.create("p", total=1)
        assert line.item_done("p", 1).completed
        eventually(lambda: len(receiver.requests) == 2, 60)
        eventually(lambda: redis_server.client(1).xlen("smap:events") == 0, 60)  # and it is noted in SQL
        row = connect(database).one("SELECT delivered_at FROM projects WHERE id = 'p'")
        assert row is not None
        assert row[0] is not None
    with ProgressManager(Path(database.removeprefix("sqlite:///"))) as progress:
        progress.register([0])
        progress.mark_done(0)
    eventually(lambda: len(receiver.requests) == 3, 60)
    os.kill(relay.pid, signal.SIGTERM)
    relay.communicate(timeout=60)
    assert relay.returncode == 0


def test_without_a_sink_the_relay_refuses_to_start(cli: Any, database: str):
    code, _, said = cli("--database", database)
    assert code == 2
    assert "HEADWAY_SINKS" in said


@pytest.mark.parametrize(
    ("arguments", "sinks"),
    [
        (("--once", "--status"), "log:"),
        (("--sink", "x"), "log:"),
        (("--poison", "eat"), "log:"),
        (("--once",), "smtp://host"),
        (("--once",), "redis://host/1"),
        (("--forget", "log"), "log:"),
        (("--forget", "nobody", "--yes"), "log:"),
    ],
)
def test_invalid_options_are_exit_2_and_change_nothing(cli: Any, database: str, arguments: tuple[str, ...], sinks: str):
    code, out, said = cli(*arguments, "--database", database, sinks=sinks)
    assert (code, out) == (2, "")
    assert said
    with connect(database) as opened:
        assert opened.one("SELECT count(*) FROM sinks") == (0,)


def test_the_status_says_who_is_behind_and_who_was_never_served(cli: Any, database: str, receiver: Any):
    with connect(database) as opened:
        SqlOutbox(opened).subscribe("removed one")
        SqlOutbox(opened).subscribe("on_complete x", "x")
    code, out, _ = cli("--status", "--json", "--database", database, sinks=receiver.url)
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "headway.relay/1"
    [place] = document["outboxes"]
    assert (place["outbox"], place["error"]) == ("database", None)
    [behind] = place["sinks"]  # the job's own sink has everything: it is over
    assert behind["oldest_seconds"] > 0
    assert {**behind, "oldest_seconds": None} == {
        "sink": "removed one", "configured": False, "waiting": 1, "oldest_seconds": None, "refused": 0, "holder": None,
    }  # fmt: skip
    assert [name.split()[0] for name in place["never_served"]] == ["webhook"]
    _, text, _ = cli("--status", "--database", database, sinks=receiver.url)
    assert "removed one" in text
    assert "never served" in text
    assert "not configured" in text


def test_the_status_of_an_outbox_out_of_reach_is_unknown_and_not_fine(cli: Any, database: str):
    arguments = ("--status", "--database", database, "--projects-redis", "redis://127.0.0.1:9/1")
    code, out, _ = cli(*arguments, "--json", sinks="log:")
    assert code == 6
    one, two = json.loads(out)["outboxes"]
    assert one["error"] is None
    assert "cannot be reached" in two["error"]
    code, _, said = cli(*arguments, sinks="log:")
    assert code == 6
    assert "unknown" in said


def test_a_database_without_events_is_not_an_error(cli: Any, tmp_path: Path):
    assert cli("--status", "--database", f"sqlite:///{tmp_path}/none.db", sinks="log:")[0] == 0
    assert cli("--poison", "list", "--database", f"sqlite:///{tmp_path}/none.db", sinks="log:")[0] == 0
    assert not (tmp_path / "none.db").exists()


@pytest.fixture
def refused(database: str, receiver: Any) -> str:
    """An event that the webhook refused for good; the sink's name."""
    now = [0.0]
    receiver.answers = [404]
    sinks = open_sinks(receiver.url)
    with connect(database) as opened:
        relay = Relay(SqlOutbox(opened), sinks, clock=lambda: now[0])
        for _ in range(5):
            relay.tick()
            now[0] += 100
    receiver.answers = [204]
    receiver.requests.clear()
    return sinks[0].name


def test_a_refused_event_is_listed_and_can_be_delivered(cli: Any, database: str, receiver: Any, refused: str):
    code, out, _ = cli("--poison", "list", "--json", "--database", database, sinks=receiver.url)
    document = json.loads(out)
    assert (code, document["schema"]) == (0, "headway.relay-poison/1")
    [found] = document["refused"]
    assert (found["sink"], found["event"], found["job"]) == (refused, "e-1", "ads")
    assert "HTTP 404" in found["reason"]
    assert "HTTP 404" in cli("--poison", "list", "--database", database, sinks=receiver.url)[1]
    assert cli("--poison", "retry", "--database", database, sinks=receiver.url)[0] == 2  # nobody can answer here
    assert cli("--poison", "retry", "--sink", "other", "--yes", "--database", database, sinks=receiver.url)[0] == 2
    code, _, _ = cli("--poison", "retry", "--event", "e-1", "--yes", "--database", database, sinks=receiver.url)
    assert code == 0
    assert cli("--once", "--database", database, sinks=receiver.url)[0] == 0
    assert told(receiver) == ["e-1"]


def test_a_refused_event_can_be_discarded(cli: Any, database: str, receiver: Any, refused: str):
    assert cli("--poison", "discard", "--yes", "--database", database, sinks=receiver.url)[0] == 0
    assert cli("--once", "--database", database, sinks=receiver.url)[0] == 0
    assert told(receiver) == []
    assert cli("--poison", "discard", "--yes", "--database", database, sinks=receiver.url)[0] == 0
    assert "Nothing is put aside" in cli("--poison", "list", "--database", database, sinks=receiver.url)[2]


def test_a_sink_without_a_holder_is_shown_as_between_tries(cli: Any, database: str, receiver: Any):
    receiver.answers = [503]
    assert cli("--once", "--seconds", "0.5", "--database", database, sinks=receiver.url)[0] == 6
    [row] = [
        line
        for line in cli("--status", "--database", database, sinks=receiver.url)[1].splitlines()
        if "webhook" in line
    ]
    assert row.endswith("between tries, or no relay")


def test_a_sink_that_was_removed_can_be_forgotten(cli: Any, database: str, receiver: Any, refused: str):
    assert cli("--forget", refused, "--yes", "--database", database, sinks="log:")[0] == 0
    assert refused not in cli("--status", "--database", database, sinks="log:")[1]


def test_the_settings_show_sinks_without_their_secrets(cli: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    sinks = (
        "https://me:geheim@example.org/T0/geheim?sig=geheim redis://:geheim@h/1?channel=c command:/bin/x --token=geheim"
    )
    for value, shown in ((sinks, "webhook example.org"), ("smtp://geheim", "not the address of a sink")):
        monkeypatch.setenv("HEADWAY_SINKS", value)
        assert headway.cli.invoke(["config"]) == 0
        out = capsys.readouterr().out
        assert "geheim" not in out
        assert shown in out


def test_a_run_tells_the_sinks_of_the_settings(headway_cli: Cli, tmp_path: Path, receiver: Any):
    (tmp_path / "items.txt").write_text("1\n2\n")
    (tmp_path / "jobs.py").write_text("def work(item):\n    return item\n")
    (tmp_path / "headway.toml").write_text(f'sinks = ["{receiver.url}", "command:/bin/sh -c \'cat > told\'"]\n')
    done = headway_cli("run", "jobs:work", "--items", "items.txt", "--job", "a", "--progress", "none")
    assert done.returncode == 0, done.stderr
    [(_, _, body)] = receiver.requests
    assert json.loads(body)["data"] == {"total": 2, "succeeded": 2, "failed": 0}
    assert json.loads((tmp_path / "told").read_text()) == json.loads(body)


def test_a_run_with_a_wrong_address_of_a_sink_is_refused_before_anything_is_written(headway_cli: Cli, tmp_path: Path):
    (tmp_path / "items.txt").write_text("1\n2\n")
    (tmp_path / "jobs.py").write_text("def work(item):\n    return item\n")
    (tmp_path / "headway.toml").write_text('sinks = ["smtp://somebody"]\n')
    refused = headway_cli("run", "jobs:work", "--items", "items.txt", "--job", "a", "--progress", "none")
    assert refused.returncode == 2
    assert "not the address of a sink" in refused.stderr
    assert not (tmp_path / "headway.db").exists()

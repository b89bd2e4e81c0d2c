"""The adapters on replies that a well-behaved server does not give, and the promises made to the type checker."""

from __future__ import annotations

import ast
import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import headway.watcher
from headway.errors import ServerRefused, StorageError, Unavailable
from headway.watcher import adapters
from headway.watcher.adapters import connect
from headway.watcher.reports import Kind
from tests.services.waiting import eventually
from tests.watcher.scene import Scene

SOURCE = Path(headway.watcher.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


class Canned:
    """A server that answers every command with the next canned reply."""

    def __init__(self, *replies: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._replies = list(replies)
        self.pause = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            while data := connection.recv(65_536):
                for _ in range(data.count(b"CLIENT")):
                    connection.sendall(b"+OK\r\n")
                if b"CLIENT" not in data:
                    for number, part in enumerate(self._replies.pop(0).split(b"|")):
                        if number:
                            self.pause.wait(10)
                        connection.sendall(part)


def bulk(*texts: str) -> bytes:
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(t), t.encode()) for t in texts)


def test_a_message_that_is_half_here_is_waited_for_and_no_dead_link():
    confirmation = b"*3\r\n$10\r\npsubscribe\r\n$1\r\np\r\n:1\r\n"
    server = Canned(confirmation + b"*4\r\n$8\r\npmessage\r\n$1\r\np\r\n$1\r|\nc\r\n$4\r\nzadd\r\n")
    link = connect(server.url).pubsub()
    link.psubscribe("p")
    confirmed = eventually(lambda: link.get_message(0.0))
    assert confirmed is not None
    assert (confirmed.kind, confirmed.channel) == ("subscribed", "p")
    threading.Timer(0.3, server.pause.set).start()
    message = eventually(lambda: link.get_message(0.01))
    assert message is not None
    assert (message.kind, message.channel, message.name) == ("event", "c", "zadd")


def test_a_message_of_an_unknown_kind_is_refused(monkeypatch):
    server = Canned(b"*3\r\n$10\r\npsubscribe\r\n$1\r\np\r\n:1\r\n")
    link = connect(server.url).pubsub()
    link.psubscribe("p")
    monkeypatch.setattr(adapters, "_KINDS", {})
    with pytest.raises(ServerRefused, match="unknown type"):
        eventually(lambda: link.get_message(0.0))


def test_a_wake_up_without_a_message_is_none(monkeypatch):
    link = connect(Canned(b"*3\r\n$10\r\npsubscribe\r\n$1\r\np\r\n:1\r\n").url).pubsub()
    link.psubscribe("p")
    assert isinstance(link, adapters.PubSubAdapter)
    eventually(lambda: link._pubsub.connection.can_read(0.0))
    monkeypatch.setattr(link._pubsub, "get_message", lambda timeout: None)
    assert link.get_message(1.0) is None


@pytest.mark.parametrize(
    ("reply", "ask"),
    [
        (b":5\r\n", lambda redis: redis.config_get("x")),
        (b"*2\r\n:1\r\n:2\r\n", lambda redis: redis.config_get("x")),
        (b"+soon\r\n", lambda redis: redis.zcard("x")),
        (b"*0\r\n", lambda redis: redis.zcard("x")),
        (bulk("a", "much"), lambda redis: redis.zrange("x", 0, 1)),
        (b"-ERR no\r\n", lambda redis: redis.time()),
        (b"-ERR no\r\n", lambda redis: redis.have_results(["x"])),
        (b"-NOPERM no\r\n" * 2, lambda redis: redis.executions(["x:y"])),
    ],
)
def test_an_invalid_reply_is_refused_with_its_reason(reply, ask):
    with pytest.raises((ServerRefused, StorageError, Unavailable), match="Redis"):
        ask(connect(Canned(reply).url))


def test_a_server_that_does_not_answer_in_time_is_unavailable(monkeypatch):
    monkeypatch.setattr(adapters, "REPLY_S", 0.2)
    with pytest.raises(Unavailable, match="cannot be reached"):
        connect(Canned(b"|never").url).time()


def test_the_client_never_tries_again_by_itself():
    kwargs = connect("redis://127.0.0.1:1/0")._client.get_connection_kwargs()  # type: ignore[attr-defined]  # redis-py's
    assert kwargs["retry"]._retries == 0
    assert kwargs["socket_timeout"] == kwargs["socket_connect_timeout"] == adapters.REPLY_S


def test_a_guard_that_may_not_watch_says_that_it_does_not_know(scene: Scene):
    scene.redis.execute_command("ACL", "SETUSER", "operator", "on", ">word", "~*", "&*", "+@all", "-watch")
    guard = connect(scene.url.replace("redis://", "redis://operator:word@")).guard(["a"])
    assert [guard.untouched(), guard.untouched()] == [False, False]
    scene.redis.execute_command("ACL", "SETUSER", "operator", "+watch")
    assert [guard.untouched(), guard.untouched()] == [False, True]


def test_an_unknown_setting_is_none(scene: Scene):
    assert connect(scene.url).config_get("no-such-setting") is None


def test_a_result_of_a_type_we_do_not_know_counts_as_a_failure(scene: Scene):
    scene.redis.xadd("rq:results:j", {"type": "77"})
    scene.redis.xadd("rq:results:j", {"type": "1"})
    (record,) = connect(scene.url).jobs(["j"], running=True)
    assert [one.outcome for one in record.results] == ["successful", "failed"]
    assert not record.exists


def test_the_record_of_events_is_kept_in_a_stream_when_one_is_named(scene: Scene):
    with scene.watching(stream="digits:log", stream_length=1000):
        scene.burst(2)
        first, second = scene.events.expect(("burst-00000", "failed"), ("burst-00001", "failed"))
    kept = str(scene.redis.xrange("digits:log"))
    assert kept.count(first["id"]) == kept.count(second["id"]) == 1


def test_without_redis_the_error_names_the_extra():
    program = (
        "import sys; sys.modules['rq'] = None\n"
        "from headway.errors import MissingExtra\n"
        "try:\n import headway.watcher.adapters\nexcept MissingExtra as error:\n print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "headway-jobs[redis]" in done.stdout


# ---- promises about the source ---------------------------------------------------------------------------------------


@pytest.mark.req("S4-36")
def test_the_parts_are_where_they_are_looked_for():
    names = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert {"watcher", "runner", "adapters", "ports", "reports", "publisher", "store"} <= names


@pytest.mark.req("S4-15")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_any_no_cast_and_no_ignore(path):
    text = path.read_text()
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    imported = {
        alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not {"Any", "cast"} & (names | imported)
    assert "type: ignore" not in text


@pytest.mark.req("S4-15")
def test_the_protocols_have_the_verbs_the_watcher_needs():
    from headway.watcher.ports import PubSubProto, RedisProto

    assert {"psubscribe", "punsubscribe", "get_message", "close"} <= vars(PubSubProto).keys()
    assert {"pubsub", "config_get", "zrevrangebyscore", "zrank"} <= vars(RedisProto).keys()


@pytest.mark.req("S4-16")
@pytest.mark.parametrize("path", [path for path in FILES if path.name != "adapters.py"], ids=lambda path: path.name)
def test_redis_and_rq_are_reached_only_through_the_ports(path):
    tree = ast.parse(path.read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {module for module in modules if module.split(".")[0] in ("redis", "rq")}


@pytest.mark.req("S4-29")
def test_make_check_demands_strict_types_and_every_statement_and_branch():
    root = Path(__file__).parents[2]
    recipe = subprocess.run(["make", "-n", "check"], cwd=root, capture_output=True, text=True, check=True).stdout
    for step in ("ruff check .", "ruff format --check .", "bin/mypy", "pytest", "--cov"):
        assert step in recipe
    assert "coverage report --include='src/headway/watcher/*' --fail-under=100" in recipe
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    assert settings["mypy"]["strict"] is True
    assert settings["coverage"]["run"]["branch"] is True


@pytest.mark.req("S4-30")
def test_the_document_is_where_it_is_looked_for_and_names_every_setting():
    text = (Path(__file__).parents[2] / "docs" / "reference" / "watcher.md").read_text()
    for name in sorted(set(re.findall(r'"((?:RQ_|REDIS_|DIGITS_)\w+)"', (SOURCE / "runner.py").read_text()))):
        assert f"`{name}`" in text


@pytest.mark.req("S4-34")
def test_the_schema_in_the_document_lists_the_fields_of_an_event(scene: Scene):
    text = (Path(__file__).parents[2] / "docs" / "reference" / "watcher.md").read_text()
    found = re.search(r"```json schema\n(.*?)```", text, re.DOTALL)
    assert found
    schema = json.loads(found.group(1))
    with scene.watching():
        scene.burst(1)
        (event,) = scene.events.expect(("burst-00000", "failed"))
    assert set(event) == set(schema["properties"]) == set(schema["required"])
    assert set(event["data"]) == set(schema["properties"]["data"]["properties"])
    assert event["data"]["kind"] in schema["properties"]["data"]["properties"]["kind"]["enum"]
    assert set(schema["properties"]["data"]["properties"]["kind"]["enum"]) == set(get_args(Kind))

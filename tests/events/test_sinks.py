"""Sinks: what each sends, what it takes for an answer, how long it waits, and which addresses there are."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import Config
from headway.errors import ConfigError, HeadwayError, InvalidInput, ServerRefused, Unavailable
from headway.events import (
    CommandSink,
    Event,
    EventRefused,
    LogSink,
    RedisChannelSink,
    RedisStreamSink,
    WebhookSink,
    open_sink,
    open_sinks,
    verify,
)
from tests.events.scene import event
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

# ---- webhooks -------------------------------------------------------------------------------------------------------


def hook(server: Any, timeout: float = 30.0) -> WebhookSink:
    return WebhookSink(f"{server.url}?token=hunter2", timeout)


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_webhook_gets_the_envelope_and_its_id(receiver: Any, status: int):
    receiver.answers = [status]
    hook(receiver).deliver(event(7))
    ((path, headers, body),) = receiver.requests
    assert path == "/hook?token=hunter2"
    assert headers["Headway-Event-Id"] == "e-7"
    assert headers["Content-Type"] == "application/json"
    assert Event.from_json(body) == event(7)


def _hang_up(handler: Any) -> None:
    handler.wfile.write(b"nonsense\r\n\r\n")
    handler.close_connection = True


@pytest.mark.parametrize("answer", [301, 302, 307, 408, 409, 425, 429, 500, 503, _hang_up])
def test_a_temporary_answer_is_retried_and_no_secret_is_shown(receiver: Any, answer: int | Callable[[Any], None]):
    receiver.answers = [answer]
    with pytest.raises(Unavailable) as caught:
        hook(receiver).deliver(event())
    assert "hunter2" not in str(caught.value)
    assert [request[0] for request in receiver.requests] == ["/hook?token=hunter2"]  # no redirect was followed


def _announce(*announced: int, then: int) -> Callable[[Any], None]:
    def answer(handler: Any) -> None:
        for code in announced:
            handler.send_response_only(code)
            handler.send_header("Link", "</style.css>; rel=preload")
            handler.end_headers()
        handler.send_response(then)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


@pytest.mark.parametrize("announced", [[100], [102], [103], [100, 102, 102, 103]])
def test_an_answer_that_announces_another_one_is_not_the_answer(receiver: Any, announced: list[int]):
    receiver.answers = [_announce(*announced, then=204)]
    hook(receiver).deliver(event())
    receiver.answers = [_announce(*announced, then=422)]
    with pytest.raises(ServerRefused, match="HTTP 422"):
        hook(receiver).deliver(event())


@pytest.mark.parametrize("answer", [400, 401, 403, 404, 410, 413, 422])
def test_an_answer_that_will_not_change_means_never(receiver: Any, answer: int):
    receiver.answers = [answer]
    with pytest.raises(ServerRefused, match=f"HTTP {answer}") as caught:
        hook(receiver).deliver(event())
    assert "hunter2" not in str(caught.value)


def test_a_receiver_that_does_not_answer_costs_the_deadline_and_no_more(receiver: Any, gate: threading.Event):
    receiver.answers = [lambda handler: gate.wait(60)]
    with pytest.raises(Unavailable, match="no answer within"):
        hook(receiver, timeout=0.2).deliver(event())


def test_a_connection_that_is_accepted_and_never_read_costs_the_deadline_and_no_more(
    tcp_proxy: Callable[[int], TcpProxy], receiver: Any
):
    proxy = tcp_proxy(receiver.server_port)
    proxy.black_hole()
    with pytest.raises(Unavailable, match="no answer within"):
        WebhookSink(f"http://127.0.0.1:{proxy.port}/", 0.3).deliver(event(1, text="x" * 1_000_000))


def test_a_closed_port_is_unavailable():
    with pytest.raises(Unavailable, match="refused"):
        WebhookSink("http://127.0.0.1:9/x").deliver(event())


def test_user_and_password_of_an_address_go_into_a_header_and_nowhere_else(receiver: Any):
    sink = WebhookSink(receiver.url.replace("http://", "http://me:p%40ss%2Fword@"))
    sink.deliver(event())
    ((path, headers, _),) = receiver.requests
    assert base64.b64decode(headers["Authorization"].removeprefix("Basic ")).decode() == "me:p@ss/word"
    assert path == "/hook"
    assert headers["Host"] == f"127.0.0.1:{receiver.server_port}"
    receiver.answers = [500]
    with pytest.raises(Unavailable) as caught:
        sink.deliver(event())
    for secret in ("p%40ss", "p@ss", "word", "me:"):
        assert secret not in str(caught.value) + sink.name


def test_two_webhooks_that_differ_in_their_query_are_two_sinks():
    addresses = [f"https://example.org/hook?to={name}" for name in ("a", "b")]
    one, two = (WebhookSink(address).name for address in addresses)
    assert one != two
    assert WebhookSink(addresses[0]).name == one  # and stay the same over restarts
    assert "hook" not in one.removeprefix("webhook")
    assert "to=" not in one


@pytest.mark.parametrize(
    "address",
    [
        "", "ftp://h/x", "file:///etc/passwd", "example.org", "javascript:alert(1)", "http://", "http:///path",
        "http://host:port/x", "http://me:pa/ss@host/x", "http://me:p@ss/word@host/x", "http://ho st/x", "http://host:0/x",
        "http://[::1/x", "http://hös t/", "http://host/\n",
    ],
)  # fmt: skip
def test_an_invalid_web_address_is_refused_without_repeating_it(address: str):
    with pytest.raises(InvalidInput) as caught:
        WebhookSink(address)
    assert caught.value.hint
    for part in ("pa/ss", "p@ss", "word@", "port"):
        assert part not in str(caught.value)


def test_an_odd_id_does_not_break_the_headers(receiver: Any):
    import dataclasses

    odd = dataclasses.replace(event(), id="é\r\nX-Forged: 1 \ud800", job="\udfff")
    hook(receiver).deliver(odd)
    ((_, headers, body),) = receiver.requests
    assert "X-Forged" not in headers
    assert json.loads(body)["id"] == "é\r\nX-Forged: 1 \ufffd"


# ---- Redis ----------------------------------------------------------------------------------------------------------


def test_a_channel_and_a_stream_get_the_envelope(redis_server: RedisServer):
    client: Any = redis_server.client(0)
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("news")
    eventually(lambda: client.pubsub_numsub("news")[0][1])
    for address in (f"{redis_server.url(0)}?channel=news", f"{redis_server.url(0)}?stream=log&maxlen=2"):
        sink = open_sink(address)
        for number in range(1, 301):
            sink.deliver(event(number))
    message: Any = eventually(lambda: listener.get_message(timeout=1))
    assert json.loads(message["data"])["id"] == "e-1"
    entries: Any = client.xrange("log")
    assert json.loads(entries[-1][1]["event"])["id"] == "e-300"
    assert len(entries) < 300  # about its length
    listener.close()


def test_a_redis_that_is_away_or_silent_means_not_now(redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]):
    from headway import _redis

    proxy = tcp_proxy(redis_server.port)
    client = _redis.connect(f"redis://127.0.0.1:{proxy.port}/0", role="queue", timeout=60)
    sink = RedisChannelSink(client, "news")
    sink._timeout = 0.3
    sink.deliver(event())
    proxy.black_hole()
    with pytest.raises(Unavailable, match="within"):
        sink.deliver(event())
    proxy.refuse()
    with pytest.raises(Unavailable):
        sink.deliver(event())


def test_a_stream_key_of_another_type_is_reported(redis_server: RedisServer):
    client: Any = redis_server.client(0)
    client.set("log", "a text")
    with pytest.raises(HeadwayError, match="WRONGTYPE"):
        RedisStreamSink(client, "log").deliver(event())


# ---- commands -------------------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_reads_the_envelope_and_its_arguments_are_never_a_shells(tmp_path: Path):
    called = program(
        tmp_path / "take", f"open({str(tmp_path / 'out')!r}, 'w').write(repr(sys.argv[1:]) + sys.stdin.read())"
    )
    sink = open_sink(f"command:{called} '$(touch {tmp_path}/owned)' ; x")
    sink.deliver(event(5))
    words, _, body = (tmp_path / "out").read_text().partition("]")
    assert words == f"['$(touch {tmp_path}/owned)', ';', 'x'"
    assert Event.from_json(body) == event(5)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(("code", "kind"), [(1, Unavailable), (75, Unavailable), (65, ServerRefused)])
def test_another_exit_code_means_not_taken_and_says_why(tmp_path: Path, code: int, kind: type[HeadwayError]):
    said = program(tmp_path / "fail", f"sys.stderr.write('password=hunter2 no room'); sys.exit({code})")
    with pytest.raises(kind, match=f"ended with {code}: .*no room") as caught:
        CommandSink([said]).deliver(event())
    assert "hunter2" not in str(caught.value)


def test_a_program_that_reads_nothing_and_ends_well_has_taken_a_large_event(tmp_path: Path):
    ran = tmp_path / "ran"
    skip = program(tmp_path / "skip", f"open({str(ran)!r}, 'a').write('once ')\nsys.exit(0)")
    CommandSink([skip]).deliver(event(1, text="x" * 2_000_000))
    assert ran.read_text() == "once "


def test_a_program_that_takes_too_long_is_killed_with_its_children(tmp_path: Path):
    pids = tmp_path / "pids"
    text = f"child = os.fork()\nopen({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10))\ntime.sleep(60)"
    sink = CommandSink([program(tmp_path / "hang", text)], 1.0)
    with pytest.raises(Unavailable, match="longer than"):
        sink.deliver(event())
    for line in pids.read_text().split() if pids.exists() else []:
        eventually(lambda line=line: not os.path.exists(f"/proc/{line}"), 20)  # type: ignore[misc]  # a loop variable


def test_a_program_that_cannot_be_started_means_not_now(tmp_path: Path):
    with pytest.raises(Unavailable, match="cannot be started"):
        CommandSink([str(tmp_path / "absent")]).deliver(event())


def _in_a_process(setting: str, called: str) -> str:
    """What a delivery to a program comes to in a process that has set something first."""
    script = (
        "import os, signal\n"
        "from headway.events import CommandSink\n"
        "from tests.events.scene import event\n"
        "def reap(*_):\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        f"signal.signal(signal.SIGCHLD, {setting})\n"
        "try:\n"
        f"    CommandSink([{called!r}]).deliver(event())\n"
        "    print('taken')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_an_unknown_exit_status_does_not_repeat_the_event_forever(tmp_path: Path):
    told = tmp_path / "told"
    take = program(tmp_path / "take", f"open({str(told)!r}, 'a').write('told ')")
    assert _in_a_process("signal.SIG_DFL", take) == "taken\n"
    assert "ignores SIGCHLD" in _in_a_process("signal.SIG_IGN", take)
    assert told.read_text() == "told "


def test_a_failing_program_has_not_taken_the_event_even_if_reaped_elsewhere(tmp_path: Path):
    fail = program(tmp_path / "fail", "sys.exit(1)")
    assert _in_a_process("reap", fail).startswith("Unavailable ")


# ---- the log --------------------------------------------------------------------------------------------------------


def test_the_log_gets_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="headway"):
        LogSink().deliver(event(4))
    [record] = caplog.records
    assert record.__dict__["fields"]["eventID"] == "e-4"


# ---- settings -------------------------------------------------------------------------------------------------------


def names(text: str | None, *more: str) -> list[str]:
    return [sink.name.rsplit(" ", 1)[0] if " " in sink.name else sink.name for sink in open_sinks(text, *more)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, []),
        ("", []),
        (" , \n ", []),
        ("log:", ["log"]),
        ("log:,https://a.org/x?y=1,2", ["log", "webhook a.org"]),
        ("https://a.org/x https://b.org:8443", ["webhook a.org", "webhook b.org:8443"]),
        ("command:/bin/tell one two, log:", ["command tell", "log"]),
        ("command:'/bin/te ll' 'log: x'\nlog:", ["command te ll", "log"]),
        ("redis://h/1?channel=c rediss://h:7/2?stream=s", ["channel c h", "stream s h:7"]),
        ("unix:///run/redis.sock?channel=c", ["channel c /run/redis.sock"]),
        ("log: log:", ["log"]),
    ],
)
def test_addresses_are_separated_by_commas_spaces_or_lines(text: str | None, found: list[str]):
    assert names(text) == found


def test_the_webhook_of_the_settings_is_one_more_sink():
    assert names("log:", "https://a.org/x") == ["log", "webhook a.org"]
    assert names("https://a.org/x", "https://a.org/x") == ["webhook a.org"]


@pytest.mark.parametrize(
    "address",
    [
        "nonsense", "log", "log:x", "smtp://host", "https://", "redis://h/1", "redis://h/1?channel=a&stream=b",
        "redis://h/1?channel=", "redis://h/1?channel=a&decode_responses=1", "redis://h/x?channel=a", "redis://h:p/1?channel=a",
        "redis://h/1?stream=a&maxlen=0", "redis://h/1?stream=a&maxlen=1e9", "redis://h/1?channel=a&maxlen=5",
        "redis://me:s3cr3t/x@h/1?channel=a", "redis://me:s3@cr3t/x@h/1?channel=a", "command:", "command:'open", "command:''",
        "command:/bin/x\0y", "redis://h/1?channel=a&channel=b", "redis://h/1?channel",
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_is_one_clear_error_that_repeats_no_secret(address: str):
    with pytest.raises(InvalidInput) as caught:
        open_sink(address)
    assert caught.value.hint
    assert "cr3t" not in str(caught.value) + caught.value.hint


def test_sinks_are_a_list_in_the_file_and_a_text_in_the_environment(tmp_path: Path):
    (tmp_path / "headway.toml").write_text('sinks = ["log:", "command:/bin/tell one, two"]\n')
    found = Config(environment={}, directory=tmp_path)
    assert names(str(found["sinks"])) == ["log", "command tell"]
    found = Config(environment={"HEADWAY_SINKS": "log: https://a.org"}, directory=tmp_path)
    assert names(str(found["sinks"])) == ["log", "webhook a.org"]
    for bad in ("sinks = 3", 'sinks = ["log:", 3]', "sinks = {a = 1}"):
        (tmp_path / "headway.toml").write_text(bad)
        with pytest.raises(ConfigError, match="sinks"):
            Config(environment={}, directory=tmp_path)


def test_a_signed_webhook_is_verified_by_its_receiver(receiver: Any):
    receiver.answers = [204, 204]
    address = receiver.url
    open_sink(address, secret="s3cret").deliver(event(7))
    open_sink(address).deliver(event(7))
    (_, headers, body), (_, unsigned, _) = receiver.requests
    header = headers["Headway-Signature"]
    assert verify("s3cret", header, body)
    assert "Headway-Signature" not in unsigned
    at = int(header.partition(",")[0].removeprefix("t="))
    assert not verify("other", header, body)
    assert not verify("s3cret", header, body + b" ")
    assert not verify("s3cret", header.replace(str(at), str(at + 1)), body)
    assert verify("s3cret", header, body, now=at + 299)
    assert not verify("s3cret", header, body, now=at + 301)
    assert not verify("s3cret", header, body, now=at - 301)


@pytest.mark.parametrize(
    "header", ["", "t=,v1=", "t=x,v1=y", "v1=abc", "t=1", "t=-1,v1=aa", "=,=", "t=1,v1=é", "t=٣,v1=a"]
)
def test_a_damaged_signature_is_refused(header: str):
    assert not verify("s3cret", header, b"{}", now=1)


def test_a_sink_is_named_and_limited_to_types_by_options_of_its_address():
    plain = "https://example.org/hook?team=ads"
    [first, second, third, fourth] = open_sinks(
        f"{plain}#name=billing&types=job.completed,task.*, {plain}#name=ops {plain}#types=alert.* log:#types=alert.opened"
    )
    assert (first.name, getattr(first, "types", None)) == ("webhook billing", ("job.completed", "task.*"))
    assert (second.name, getattr(second, "types", None)) == ("webhook ops", None)
    assert third.name == open_sink(plain).name  # it keeps its place when types are added
    assert (fourth.name, getattr(fourth, "types", None)) == ("log", ("alert.opened",))
    assert open_sink("command:/bin/true --x #name=pager").name == "command pager"


@pytest.mark.parametrize(
    "options", ["types=task.faild", "types=", "types=job.completed,", "name=", "name=a/b", "name=a&x=1"]
)
def test_a_sink_with_wrong_options_is_refused(options: str):
    with pytest.raises(InvalidInput, match=r"sink|type of event"):
        open_sink(f"https://example.org/hook#{options}")


def test_an_answer_about_the_content_of_an_event_refuses_that_event(receiver: Any):
    receiver.answers = [400, 422, 404]
    sink = hook(receiver)
    for refusal in (EventRefused, EventRefused, ServerRefused):
        with pytest.raises(ServerRefused) as caught:
            sink.deliver(event())
        assert type(caught.value) is refusal

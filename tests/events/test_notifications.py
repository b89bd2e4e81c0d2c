"""Notifications: what slack:// and mailto: send, what they refuse, and `headway notify test`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import headway.cli
from headway.config import Config
from headway.errors import ConfigError, InvalidInput, ServerRefused, Unavailable
from headway.events import Event, Json, MailSink, Relay, SlackSink, SqlOutbox, append_all, configured_sinks, open_sink
from headway.events.sinks import MailServer
from tests.services.smtp import SmtpServer, smtp_server

AT = datetime(2026, 11, 18, 9, 30, tzinfo=UTC)


def an(type: str, job: str = "ads", source: str = "headway.ledger", **data: Json) -> Event:
    return Event(f"{type}:{job}", type, AT, source, job, 1, data)


DONE = an("job.completed", total=120, succeeded=120, failed=0)
DEAD = an("job.completed", total=1200, succeeded=1198, failed=2)
PROJECT = an("job.completed", "site 7", "finishline", total=9, succeeded=8, failed=1)
TASK = an("task.failed", "7f3a", "headway.queue", kind="caption", user_id="anna", attempts=3, error="TimeoutError")
OPENED = an("alert.opened", "alerts/backlog", "headway.alerts", alert=4, severity="warning", text="9 tasks wait")
CLOSED = an(
    "alert.closed", "alerts/backlog", "headway.alerts", alert=4, severity="warning", text="9 tasks wait", seconds=75.2
)

MESSAGES = [
    (DONE, "Job ads completed: all 120 items succeeded.", "Run: headway show ads", "/jobs/ads"),
    (
        DEAD, "Job ads finished with failures: 1,198 of 1,200 items succeeded, 2 failed.",
        "Run: headway dead list ads", "/jobs/ads",
    ),
    (
        PROJECT, "Project site 7 finished: 8 of 9 items succeeded, 1 failed.",
        "Run: headway progress 'site 7'", "/projects",
    ),
    (
        TASK, "Task 7f3a (caption) of user anna failed after 3 tries: TimeoutError",
        "Run: headway task show 7f3a", "/tasks/7f3a",
    ),
    (OPENED, "Alert (warning): 9 tasks wait", "Run: headway alerts ack 4", "/alerts"),
    (CLOSED, "Alert closed: 9 tasks wait It was open for 75 s.", "Run: headway alerts --history", "/alerts"),
]  # fmt: skip


def slack(receiver: Any, timeout: float = 30.0, **options: Any) -> SlackSink:
    return SlackSink(f"slack+http://127.0.0.1:{receiver.server_port}/services/T0/hunter2", timeout, **options)


@pytest.fixture
def smtp() -> Iterator[SmtpServer]:
    with smtp_server() as server:
        yield server


def mail(smtp: SmtpServer, to: str = "ops@example.org", timeout: float = 30.0, **options: Any) -> MailSink:
    server = MailServer("127.0.0.1", "headway@example.org", smtp.port, "none")
    return MailSink(f"mailto:{to}", server, timeout, **options)


# ---- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "sentence", "command", "page"), MESSAGES)
def test_a_chat_message_has_the_event_and_the_next_command(
    event: Event, sentence: str, command: str, page: str, receiver: Any
):
    slack(receiver, web_url="https://headway.example.org/").deliver(event)
    ((path, headers, body),) = receiver.requests
    assert path == "/services/T0/hunter2"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {"text": f"{sentence}\n{command}\nOpen: https://headway.example.org{page}"}


@pytest.mark.parametrize(("event", "sentence", "command", "page"), MESSAGES)
def test_a_mail_has_the_event_and_the_next_command(
    event: Event, sentence: str, command: str, page: str, smtp: SmtpServer
):
    mail(smtp, web_url="https://headway.example.org").deliver(event)
    [found] = smtp.mails
    assert found["Subject"] == sentence
    assert found["From"] == "headway@example.org"
    assert found["To"] == "ops@example.org"
    assert found.get_content().splitlines()[:4] == [sentence, "", command, f"Open: https://headway.example.org{page}"]
    assert found["Message-ID"].startswith("<")


def test_without_a_web_address_a_message_has_no_link(receiver: Any):
    slack(receiver).deliver(DONE)
    assert "Open:" not in json.loads(receiver.requests[0][2])["text"]


def test_a_repeated_delivery_has_the_same_message_id(smtp: SmtpServer):
    for _ in range(2):
        mail(smtp).deliver(DONE)
    mail(smtp).deliver(DEAD)
    first, second, other = (found["Message-ID"] for found in smtp.mails)
    assert first == second
    assert DONE.id == DEAD.id, "the id decides, not the text"
    assert other == first


def test_a_text_cannot_mention_a_channel_forge_a_header_or_show_a_password(receiver: Any, smtp: SmtpServer):
    odd = an(
        "task.failed", "7\r\nBcc: x@example.org", kind="<!channel> & co", attempts=1, error="password=hunter2 \ud800"
    )
    slack(receiver).deliver(odd)
    text = json.loads(receiver.requests[0][2])["text"]
    assert "&lt;!channel&gt; &amp; co" in text
    assert "hunter2" not in text
    mail(smtp).deliver(odd)
    [found] = smtp.mails
    assert found["Bcc"] is None
    assert "hunter2" not in found.as_string()


def test_chat_and_mail_take_events_for_people_unless_their_address_names_types(receiver: Any, tmp_path: Path):
    from headway._sql import connect

    queued = an("task.queued", "7f3a", "headway.queue", kind="caption")
    address = f"slack+http://127.0.0.1:{receiver.server_port}/x"
    with connect(f"sqlite:///{tmp_path}/e.db") as database:
        sinks = [open_sink(address), open_sink(f"{address}#name=all&types=task.*"), open_sink(f"{address}#name=ops")]
        with Relay([SqlOutbox(database)], sinks) as relay:
            relay.subscribe()
            append_all(database, [queued, DEAD])
            assert relay.drain(30)
    texts = sorted(json.loads(body)["text"].splitlines()[0] for _, _, body in receiver.requests)
    assert texts == sorted([f"task.queued: {queued.job}", *[MESSAGES[1][1]] * 2])


# ---- refusals and silence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"), [(403, ServerRefused), (404, ServerRefused), (429, Unavailable), (500, Unavailable)]
)
def test_a_refused_chat_message_is_an_error_that_hides_the_path(receiver: Any, answer: int, kind: type[Exception]):
    receiver.answers = [answer]
    sink = slack(receiver)
    with pytest.raises(kind, match=f"HTTP {answer}") as caught:
        sink.deliver(DONE)
    assert "hunter2" not in str(caught.value) + sink.name


def test_a_chat_server_that_does_not_answer_means_later(receiver: Any, gate: Any):
    receiver.answers = [lambda _: gate.wait(30)]
    with pytest.raises(Unavailable, match=r"within 0\.3 s"):
        slack(receiver, 0.3).deliver(DONE)


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ({"RCPT": "550 no such user"}, ServerRefused, "refused every recipient: 550 no such user"),
        ({"RCPT": "451 later"}, Unavailable, "451 later"),
        ({"MAIL": "553 not you"}, ServerRefused, "553 not you"),
        ({"message": "554 spam password=hunter2"}, ServerRefused, "554 spam"),
        ({"message": "452 full"}, Unavailable, "452 full"),
        ({"connect": "421 busy"}, Unavailable, "421 busy"),
        ({"connect": "nonsense"}, Unavailable, "mail server"),
    ],
)
def test_mail_server_refusals_are_permanent_or_temporary_by_code(
    answers: dict[str, str], kind: type[Exception], message: str, smtp: SmtpServer
):
    smtp.answers = answers
    with pytest.raises(kind, match=message) as caught:
        mail(smtp).deliver(DONE)
    assert type(caught.value) is kind
    assert "hunter2" not in str(caught.value)


def test_a_mail_that_was_taken_is_delivered_though_the_farewell_fails(smtp: SmtpServer):
    smtp.answers = {"QUIT": "500 what"}
    mail(smtp).deliver(DONE)
    assert len(smtp.mails) == 1


def test_a_mail_server_that_is_silent_or_away_means_later(smtp: SmtpServer):
    smtp.answers = {"connect": "silence"}
    with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
        mail(smtp, timeout=0.3).deliver(DONE)
    away = MailServer("127.0.0.1", "headway@example.org", 1, "none")
    with pytest.raises(Unavailable, match="refused"):
        MailSink("mailto:ops@example.org", away).deliver(DONE)


def test_a_server_without_the_encryption_of_the_settings_gets_no_password(smtp: SmtpServer):
    server = MailServer("127.0.0.1", "headway@example.org", smtp.port, "starttls", "anna", "hunter2")
    with pytest.raises(Unavailable, match="does not support") as caught:
        MailSink("mailto:ops@example.org", server).deliver(DONE)
    assert "smtp_tls" in caught.value.hint
    assert smtp.logins == []
    assert "hunter2" not in repr(server)


def test_a_wrong_password_means_later_and_names_the_settings(smtp: SmtpServer):
    smtp.answers = {"AUTH": "535 wrong"}
    server = MailServer("127.0.0.1", "headway@example.org", smtp.port, "none", "anna", "hunter2")
    with pytest.raises(Unavailable, match="refused the login: 535 wrong") as caught:
        MailSink("mailto:ops@example.org", server).deliver(DONE)
    assert "smtp_password" in caught.value.hint


# ---- addresses and settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "slack://", "slack://hooks.slack.com", "slack://hooks.slack.com/", "slack://ho st/x", "slack:x", "slack+ftp://h/x",
        "mailto:", "mailto:ops", "mailto:ops@", "mailto:ops@example.org,", "mailto:a b@example.org", "mailto:<a@b.org>",
    ],
)  # fmt: skip
def test_a_bad_address_is_one_clear_error(address: str):
    with pytest.raises(InvalidInput) as caught:
        open_sink(address)
    assert caught.value.hint


def test_addresses_with_several_recipients_stand_beside_others(tmp_path: Path):
    settings = {
        "HEADWAY_SMTP_HOST": "mail.example.org", "HEADWAY_SMTP_FROM": "h@example.org",
        "HEADWAY_SINKS": "mailto:a@example.org,b@example.org, slack://hooks.slack.com/s/x log:",
    }  # fmt: skip
    found = configured_sinks(Config(environment=settings, directory=tmp_path))
    assert [sink.name.rpartition(" ")[0] or sink.name for sink in found] == ["mailto", "slack hooks.slack.com", "log"]
    assert found[0].name == "mailto a@example.org,b@example.org"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "smtp_host is not set"),
        ({"HOST": "m.example.org"}, "smtp_from"),
        ({"HOST": "m.example.org", "FROM": "not an address"}, "smtp_from"),
        ({"HOST": "m.example.org", "FROM": "h@example.org", "USER": "anna"}, "together"),
        (
            {"HOST": "m.example.org", "FROM": "h@example.org", "USER": "anna", "PASSWORD": "hunter2", "TLS": "none"},
            "unencrypted",
        ),
    ],
)
def test_incomplete_mail_settings_are_one_clear_error(settings: dict[str, str], message: str, tmp_path: Path):
    environment = {f"HEADWAY_SMTP_{name}": value for name, value in settings.items()}
    config = Config(environment={**environment, "HEADWAY_SINKS": "mailto:ops@example.org"}, directory=tmp_path)
    with pytest.raises(InvalidInput, match=message) as caught:
        configured_sinks(config)
    assert "hunter2" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"), [("SMTP_PORT", "0"), ("SMTP_TLS", "ssl"), ("WEB_URL", "headway.example.org")]
)
def test_a_bad_value_of_a_setting_is_refused(name: str, value: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=name.lower()):
        Config(environment={f"HEADWAY_{name}": value}, directory=tmp_path)


# ---- headway notify test --------------------------------------------------------------------------------------------


@pytest.fixture
def notify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`notify(sink, SINKS="log:")`: the verb in this process; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **settings: str) -> tuple[int, str, str]:
        for name, value in settings.items():
            monkeypatch.setenv(f"HEADWAY_{name}", value)
        code = headway.cli.invoke(["notify", "test", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_test_message_reaches_every_configured_sink(notify: Any, receiver: Any, smtp: SmtpServer):
    code, out, _ = notify(
        SINKS=f"slack+http://127.0.0.1:{receiver.server_port}/hunter2 mailto:ops@example.org {receiver.url}",
        SMTP_HOST="127.0.0.1", SMTP_PORT=str(smtp.port), SMTP_TLS="none", SMTP_FROM="h@example.org",
        SMTP_USER="anna", SMTP_PASSWORD="s3cret", WEB_URL="https://headway.example.org",
    )  # fmt: skip
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["slack", "mailto", "webhook"]
    assert out.count("delivered in") == 3
    assert "hunter2" not in out
    assert smtp.logins == [["anna", "s3cret"]]
    assert smtp.mails[0]["Subject"].startswith("This is a test message from Headway.")
    assert Event.from_json(receiver.requests[1][2]).type == "notify.test"


def test_the_test_reports_each_failure_and_ends_with_6(notify: Any, receiver: Any):
    receiver.answers = [403]
    bad = f"slack+http://127.0.0.1:{receiver.server_port}/hunter2"
    code, out, err = notify(SINKS=f"{bad} log:")
    assert code == 6
    assert out.startswith("log: delivered")
    assert "HTTP 403" in err
    assert "hunter2" not in err


def test_one_sink_is_tested_by_its_name_or_by_an_address_that_is_not_configured(notify: Any, receiver: Any):
    address = f"slack+http://127.0.0.1:{receiver.server_port}/x"
    assert notify("log", SINKS=f"log: {receiver.url}")[0] == 0
    assert receiver.requests == []
    assert notify(address)[0] == 0
    assert len(receiver.requests) == 1


def test_the_test_without_a_sink_or_with_an_unknown_one_is_an_error(notify: Any):
    assert notify(SINKS="")[0] == 2
    code, _, err = notify("pager", SINKS="log:")
    assert code == 2
    assert "Use one of: log" in err
    assert notify("smtp://host")[0] == 2

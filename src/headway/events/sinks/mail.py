"""The sink ``mailto:ops@example.org``: an e-mail by the SMTP server of the settings."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headway.errors import HeadwayError, InvalidInput, ServerRefused, Unavailable
from headway.events.deadline import Watchdog
from headway.events.envelope import Event
from headway.events.sinks.messages import NOTIFIED, message_of
from headway.events.sinks.sink import digest
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from smtplib import SMTP

log = Log("events")

#: Seconds that sending one mail may take, from connecting to the server's answer.
MAIL_DEADLINE = 15.0

#: Value of ``smtp_tls`` -> default port.
PORTS = {"starttls": 587, "tls": 465, "none": 25}

_ADDRESS = re.compile(r"[^\s@<>,;:\"()\[\]\\]{1,64}@[A-Za-z0-9.-]{1,255}")


class Settings(Protocol):
    """The settings by name (`headway.config.Config`)."""

    def __getitem__(self, name: str, /) -> object: ...


@dataclass(frozen=True, slots=True)
class MailServer:
    """How to reach the SMTP server. ``tls`` is starttls, tls or none."""

    host: str
    sender: str
    port: int | None = None
    tls: str = "starttls"
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, config: Settings) -> MailServer:
        """Read the ``smtp_...`` settings. Raises `InvalidInput` if they are incomplete or unsafe."""
        host, user, password, sender, port = (
            _text_of(config[f"smtp_{name}"]) for name in ("host", "user", "password", "from", "port")
        )
        if not host:
            raise InvalidInput(
                "A mailto: sink needs an SMTP server, and smtp_host is not set.",
                hint="Set smtp_host and smtp_from in headway.toml, or HEADWAY_SMTP_HOST and HEADWAY_SMTP_FROM.",
            )
        sender = sender or user
        if not _ADDRESS.fullmatch(sender):
            raise InvalidInput(
                f"smtp_from must be an e-mail address (got {sender[:80]!r}).",
                hint="Set smtp_from = headway@example.org",
            )
        if bool(user) != bool(password):
            raise InvalidInput("smtp_user and smtp_password must be set together.", hint="Set both, or neither.")
        if password and config["smtp_tls"] == "none" and not _is_local(host):
            raise InvalidInput(
                f"smtp_tls is none, so smtp_password would reach {host} unencrypted.",
                hint="Set smtp_tls to starttls or tls.",
            )
        return cls(host, sender, int(port) if port else None, str(config["smtp_tls"]), user, password)


def _is_local(host: str) -> bool:
    import ipaddress

    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _text_of(value: object) -> str:
    return "" if value is None else str(value)


class MailSink:
    """Sends one mail per event. Takes the types in `NOTIFIED` unless the address names others."""

    job: str | None = None

    def __init__(
        self, address: str, server: MailServer | None, timeout: float = MAIL_DEADLINE, *, web_url: str | None = None
    ) -> None:
        """``address`` is ``mailto:`` and one or more recipients, separated by commas."""
        self._recipients = address.removeprefix("mailto:").split(",")
        for recipient in self._recipients:
            if not _ADDRESS.fullmatch(recipient):
                raise InvalidInput(
                    f"{recipient[:80]!r} is not an e-mail address.",
                    hint="Use mailto:ops@example.org,second@example.org",
                )
        self._server = server
        self._timeout = timeout
        self._web_url = web_url
        self._watchdog = Watchdog()
        self.types: Sequence[str] | None = NOTIFIED
        self.name = f"mailto {','.join(self._recipients)}"

    def deliver(self, event: Event) -> None:
        """Send the mail.

        Raises `ServerRefused` when the server refuses sender, content or every recipient for good, and `Unavailable` for
        all other failures. A single refused recipient is logged: the others have the mail.
        """
        import smtplib
        import ssl

        if self._server is None:
            raise InvalidInput("The SMTP settings of this sink are missing.", hint="Open it with configured_sinks().")
        where = f"The mail server {self._server.host}"
        smtp = _client(self._server, self._timeout)

        def end() -> None:
            if smtp.sock is not None:
                with suppress(OSError):  # not connected
                    smtp.sock.shutdown(socket.SHUT_RDWR)

        with self._watchdog.over(end, self._timeout) as late:
            try:
                refused = self._send(smtp, self._server, event)
            except smtplib.SMTPException as error:
                if late():
                    raise Unavailable(f"{where} did not answer within {self._timeout:g} s.") from None
                raise _translate(where, error) from None
            except (
                OSError,
                ssl.SSLError,
                ValueError,
                AttributeError,
            ) as error:  # AttributeError: its socket was closed
                why = f"did not answer within {self._timeout:g} s" if late() or isinstance(error, TimeoutError) else ""
                raise Unavailable(f"{where} {why or f'cannot be used: {redact(str(error))}'}.") from None
            finally:
                smtp.close()
        for recipient, answer in refused.items():
            log.warning("a recipient was refused", sink=self.name, address=recipient, reason=redact(str(answer)))

    def _send(self, smtp: SMTP, server: MailServer, event: Event) -> Mapping[str, object]:
        import smtplib
        import ssl

        code, greeting = smtp.connect(server.host, server.port or PORTS[server.tls])
        if code != 220:  # only the constructor of smtplib checks this
            raise smtplib.SMTPConnectError(code, greeting)
        if server.tls == "starttls":
            smtp.starttls(context=ssl.create_default_context())
        if server.user and server.password:
            smtp.login(server.user, server.password)
        refused: Mapping[str, object] = smtp.send_message(self._message(server, event), server.sender, self._recipients)
        with suppress(Exception):
            smtp.quit()  # the mail is accepted: a lost farewell must not send it again
        return refused

    def _message(self, server: MailServer, event: Event) -> Any:
        from email.message import EmailMessage
        from email.policy import SMTP
        from email.utils import format_datetime

        text = message_of(event, self._web_url)
        # Python folds a long subject right after its colon, and some readers then show it with a leading space.
        mail = EmailMessage(SMTP.clone(max_line_length=900))
        mail["Subject"] = text.sentence[:200]
        mail["From"] = server.sender
        mail["To"] = ", ".join(self._recipients)
        mail["Date"] = format_datetime(event.at)
        mail["Message-ID"] = f"<{digest(event.id)}.{digest(self.name)}@headway>"  # the same when it is delivered again
        mail["Auto-Submitted"] = "auto-generated"  # no automatic answers, please (RFC 3834)
        mail.set_content(
            "\n".join([text.sentence, "", *text.actions, "", f"Event {event.type} of {event.at:%Y-%m-%d %H:%M:%S %Z}"])
        )
        return mail

    def close(self) -> None:
        """Abort a running delivery."""
        self._watchdog.abort()


def _client(server: MailServer, timeout: float) -> SMTP:
    import smtplib
    import ssl

    name = server.sender.partition("@")[2]  # for EHLO; the default asks DNS, which may take long
    if server.tls == "tls":
        client: SMTP = smtplib.SMTP_SSL(local_hostname=name, timeout=timeout, context=ssl.create_default_context())
    else:
        client = smtplib.SMTP(local_hostname=name, timeout=timeout)
    # Its constructor would connect before the watchdog knows the socket. TLS checks the certificate against this name.
    client._host = server.host  # type: ignore[attr-defined]  # noqa: SLF001  # connect() leaves it empty
    return client


def _translate(where: str, error: Exception) -> HeadwayError:
    """Return the exception for an error of smtplib. Codes from 500 mean *never*, those from 400 *not now*."""
    import smtplib

    if isinstance(error, smtplib.SMTPAuthenticationError):
        return Unavailable(f"{where} refused the login: {_answer(error)}.", hint="Check smtp_user and smtp_password.")
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return Unavailable(
            f"{where} does not support what the settings need: {error}", hint="Check smtp_tls and smtp_port."
        )
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        answers = list(error.recipients.values())
        never = all(code >= 500 for code, _ in answers)
        message = f"{where} refused every recipient: {answers[0][0]} {_text(answers[0][1])}."
        return ServerRefused(message) if never else Unavailable(message)
    message = f"{where} did not take the mail: {_answer(error)}."
    never = isinstance(error, smtplib.SMTPSenderRefused | smtplib.SMTPDataError) and error.smtp_code >= 500
    return ServerRefused(message) if never else Unavailable(message)


def _answer(error: Exception) -> str:
    code = getattr(error, "smtp_code", None)
    return f"{code} {_text(error.smtp_error)}" if code is not None else redact(str(error))  # type: ignore[attr-defined]  # smtp_error comes with smtp_code


def _text(answer: str | bytes) -> str:
    return redact(answer if isinstance(answer, str) else answer.decode("utf-8", "replace"))[:200]

"""An SMTP server of the test: keeps the mails it gets, and answers as its script says."""

from __future__ import annotations

import base64
import email
import email.policy
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage


class _Session(socketserver.StreamRequestHandler):
    server: SmtpServer

    def _say(self, line: str) -> None:
        self.wfile.write(line.encode() + b"\r\n")

    def handle(self) -> None:
        answers = self.server.answers
        if answers.get("connect") == "silence":
            self.server.released.wait(60)
            return
        self._say(answers.get("connect", "220 test"))
        while line := self.rfile.readline().decode().strip():
            verb = line.partition(" ")[0].upper()
            self.server.lines.append(line)
            if verb in answers:
                self._say(answers[verb])
            elif verb == "EHLO":
                self._say("250-test")
                self._say("250 AUTH PLAIN")
            elif verb == "AUTH":
                self.server.logins.append(base64.b64decode(line.split()[2]).decode().split("\0")[1:])
                self._say("235 ok")
            elif verb == "DATA":
                self._say("354 go on")
                self._say(self._data())
            else:
                self._say("221 bye" if verb == "QUIT" else "250 ok")
            if verb == "QUIT":
                return

    def _data(self) -> str:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b"."))
        found = email.message_from_bytes(b"".join(lines), policy=email.policy.default)
        assert isinstance(found, EmailMessage)
        self.server.mails.append(found)
        return self.server.answers.get("message", "250 taken")


class SmtpServer(socketserver.ThreadingTCPServer):
    """`mails` received, `logins` as [user, password], `lines` of all commands. `answers`: verb -> answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: list[EmailMessage] = []
        self.logins: list[list[str]] = []
        self.lines: list[str] = []
        self.answers: dict[str, str] = {}
        self.released = threading.Event()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])


@contextmanager
def smtp_server() -> Iterator[SmtpServer]:
    """Run a server while the block runs."""
    with SmtpServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()

"""nginx: the machine's own. Run as a module, this installs Debian's nginx-light if it is missing and we are root."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.services.server import Server

INSTALL = (
    ("apt-get", "update", "-q"),
    ("apt-get", "install", "-q", "-y", "--no-install-recommends", "nginx-light"),
)

#: The headers that docs/howto/deploy.md asks a proxy to send, and WebSocket upgrades.
FORWARDING = """
proxy_set_header Host $http_host;
proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
proxy_set_header X-Forwarded-Proto $scheme;
proxy_set_header Upgrade $http_upgrade;
proxy_set_header Connection $connection_upgrade;
"""

_CONFIGURATION = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    server {{
        listen 127.0.0.1:{port};
        location {location} {{
            proxy_pass {upstream};
            proxy_http_version 1.1;
            {directives}
        }}
    }}
}}
"""


def find() -> str | None:
    """Return the path of nginx, which may be outside a user's PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def obtain() -> str | None:
    """Return the path of nginx, after installing it if necessary and possible."""
    if find() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in INSTALL:
            subprocess.run(
                command, check=False, timeout=600, stdout=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            )  # fmt: skip
    return find()


class NginxServer(Server):
    """A reverse proxy in front of ``upstream`` (http://host:port, or with a path that replaces ``location``).

    Without ``directives`` nginx is configured as tersely as people do it: ``proxy_pass`` and HTTP/1.1, the default since
    nginx 1.29.7. It then sends the upstream's own address as ``Host`` and adds no header that names the client.
    """

    def __init__(
        self, directory: Path, program: str, upstream: str, *, location: str = "/", directives: str = ""
    ) -> None:
        super().__init__(directory)
        self._program, self._upstream, self._location, self._directives = program, upstream, location, directives

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        text = _CONFIGURATION.format(
            port=self.port, location=self._location, upstream=self._upstream, directives=self._directives
        )
        (self.directory / "nginx.conf").write_text(text)
        return [self._program, "-p", str(self.directory), "-c", "nginx.conf", "-e", "stderr"]

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False


if __name__ == "__main__":
    if obtain() is None:
        sys.exit("nginx is missing; its tests will say so. Install it: apt-get install nginx-light")

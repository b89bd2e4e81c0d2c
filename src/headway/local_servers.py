"""Servers of this user on this machine, and their access tokens.

`headway serve` creates a random token at startup and writes it to a file that only its user can read. The token is valid
only while that process runs, so the leftover file of a killed server grants no access. The command line and
`headway.client` read the file when they connect to an address of this machine.

The token also signs one-time links for a browser (`LocalServer.link`). Any process that can read the file can create one.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from headway.config import is_loopback

#: Seconds for which a one-time link is valid.
LINK_SECONDS: Final = 12 * 3600
#: Prefix of the ticket in a link.
LINK_PREFIX: Final = "hwl_"

_TOKEN = re.compile(r"hw_local_[A-Za-z0-9_-]{43}")
_LINK = re.compile(r"hwl_([0-9a-f]{16})([0-9a-f]{8})([0-9a-f]{32})")
#: Maximum bytes of a token file.
_SIZE: Final = 4096
#: Wildcard address -> loopback address that reaches it.
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only compared, not bound


class LocalServer(NamedTuple):
    """A server that listens on ``host`` and ``port`` of this machine."""

    host: str
    port: int
    token: str

    @property
    def connect_host(self) -> str:
        """The address to connect to: loopback if the server listens on all addresses."""
        return _WILDCARDS.get(self.host, self.host)

    @property
    def address(self) -> str:
        """The URL of the server."""
        host = self.connect_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def link(self, path: str = "/") -> str:
        """Return a one-time link that signs a browser in and opens ``path``."""
        return f"{self.address}/enter?next={quote(path, safe='/')}&ticket={_new_link(self.token)}"


def new_server(listener: socket.socket) -> LocalServer:
    """Return the server of a listening socket, with a new token."""
    host, port = listener.getsockname()[:2]
    return LocalServer(host, port, f"hw_local_{secrets.token_urlsafe(32)}")


# ---- links ----------------------------------------------------------------------------------------------------------


def _new_link(token: str) -> str:
    body = f"{secrets.token_hex(8)}{int(time.time()) + LINK_SECONDS:08x}"
    return f"{LINK_PREFIX}{body}{_signature(token, body)}"


def link_id(token: str, text: str) -> str | None:
    """Return the id of a link if ``token`` signed it and it has not expired, else None."""
    parts = _LINK.fullmatch(text)
    if parts is None or not hmac.compare_digest(_signature(token, parts[1] + parts[2]), parts[3]):
        return None
    return parts[1] if time.time() < int(parts[2], 16) else None


def _signature(token: str, body: str) -> str:
    return hmac.new(token.encode(), f"link:{body}".encode(), "sha256").hexdigest()[:32]


# ---- files ----------------------------------------------------------------------------------------------------------


@contextmanager
def published(server: LocalServer) -> Iterator[OSError | None]:
    """Keep the server's token file while the block runs. Yield the error if it cannot be written."""
    path, problem = _directories()[0] / _file_name(server.host, server.port), None
    try:
        _write(path, server)
    except OSError as error:
        problem = error
    try:
        yield problem
    finally:
        with suppress(OSError):
            if _read(path) == server:  # another server may have taken the port and written its own file
                path.unlink()


def find(host: str, port: int) -> LocalServer | None:
    """Return this user's server at ``host`` and ``port``, if its token file exists.

    ``localhost`` may resolve to several addresses, and other users may listen on some of them. So connect to the
    `connect_host` of the result, not to the name.
    """
    if host == "localhost":
        listening = ["127.0.0.1", "::1", *_WILDCARDS]
    elif is_loopback(host):
        listening = [host, *_WILDCARDS]
    else:
        return None
    names = [_file_name(one, port) for one in listening]
    found = (_read(directory / name) for name in names for directory in _directories())
    return next((server for server in found if server is not None), None)


def servers() -> list[LocalServer]:
    """Return this user's servers that have a token file. Some may have been killed."""
    paths = (path for directory in _directories() for path in sorted(directory.glob(_file_name("*", "*"))))
    return [server for path in paths if (server := _read(path)) is not None]


def _directories() -> list[Path]:
    """Return the directories of token files, the preferred one first."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "headway"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(runtime) / "headway", state] if runtime and os.access(runtime, os.W_OK) else [state]


def _file_name(host: str, port: int | str) -> str:
    """Return the file name. It contains the host name, because machines may share a home directory."""
    machine = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    return f"server-{machine}-{host.replace(':', '_').replace('%', '_')}-{port}.json"


def _write(path: Path, server: LocalServer) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(server._asdict(), file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _read(path: Path) -> LocalServer | None:
    """Read a token file. Return None if another user owns it or could access it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            return None
        try:
            known = json.loads(file.read(_SIZE))
            host, port, token = str(known["host"]), int(known["port"]), str(known["token"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
    return LocalServer(host, port, token) if _TOKEN.fullmatch(token) else None

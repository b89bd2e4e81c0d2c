"""The Lua scripts: one operation per file in ``lua/OWNER/``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from headway._redis.connections import Accountable, Argument, borrow, packed

if TYPE_CHECKING:
    from redis import Redis

Reply = Any  # the sender of a command knows the type of its reply


class Script:
    """One script of ``lua/``. It is loaded again when the server has lost it (restart, SCRIPT FLUSH)."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: str) -> None:
        import hashlib

        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()  # the server's name for it

    def __call__(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Run the script once on a connection of the client's pool. Raises redis-py's exceptions (see `translate`)."""
        connection = borrow(client)
        try:
            if not isinstance(connection, Accountable):  # a client that `connect` did not create
                return self._by(client, keys, arguments)
            return self.on(connection, keys, arguments)
        finally:
            client.connection_pool.release(connection)

    def _by(self, client: Redis, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        try:
            return client.evalsha(self.sha, len(keys), *keys, *arguments)
        except _no_script():
            return client.eval(self.text, len(keys), *keys, *arguments)

    def on(self, connection: Any, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Run the script once on this connection.

        It bypasses the command layer of the client, which takes as long as the round trip. The connection counts the reply
        as owed from before the request is sent until the reply is read.
        """
        try:
            return _ask(connection, "EVALSHA", self.sha, len(keys), *keys, *arguments)
        except _no_script():  # the script did not run
            return _ask(connection, "EVAL", self.text, len(keys), *keys, *arguments)


def _ask(connection: Any, *words: Argument) -> Reply:
    request = packed(*words)
    if not connection.complete:
        connection.connect()
    connection.owed += 1
    connection.send_packed_command([request])
    return connection.read_response()


@lru_cache(maxsize=1)
def _no_script() -> type[Exception]:
    from redis.exceptions import NoScriptError

    return NoScriptError


@lru_cache(maxsize=64)
def script(name: str) -> Script:
    """Load ``lua/OWNER/NAME.lua``, preceded by the files it includes (``-- include: other``)."""
    return Script(name, _source(name))


def _source(name: str) -> str:
    file = resources.files("headway._redis").joinpath("lua", *f"{name}.lua".split("/"))
    text = file.read_text(encoding="utf-8")
    included = re.findall(r"^-- include: (\S+)$", text, re.MULTILINE)
    return "".join(_source(other) for other in included) + text

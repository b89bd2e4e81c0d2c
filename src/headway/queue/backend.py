"""The database, Redis and codec of a queue, as its configuration says; each is opened on first use.

A queue that was made from the settings follows changes of headway.toml: Redis, keys and tasks per user.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from headway._sql import Database, connect
from headway.config import Config
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.queue import settings
from headway.queue.payload import Codec, FernetCodec, PlainCodec, result_id
from headway.queue.store.administration import declare_per_user
from headway.queue.task import Task
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from headway.queue.rq.hints import RqHints
    from headway.queue.rq.user_keys import UserKeys

log = Log("queue")

#: rq: workers learn of tasks from RQ, and poll the rows for tasks without a hint. hybrid: the same. database: no Redis.
#: auto: rq if a Redis URL is given, else database.
Mode = Literal["auto", "rq", "database", "hybrid"]
DEFAULT_RQ = settings.RqOptions()
#: Attributes that `Backend.moved` saves and restores.
_MOVABLE = ("_opened", "url", "_hints", "_user_keys", "redis_url", "_config", "_is_moved", "_is_declared")


class Backend:
    """What a queue stores its tasks in; see the module. Nothing is connected before the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._config: Config | None = None  # followed if it is set
        self._opened: Database | None = None
        self.url: str | None = None  # None if the queue was given an open database
        self.redis_url: str | None = None
        self.rq = DEFAULT_RQ
        self.per_user: int | None = 1  # maximum active tasks per user; None for no limit
        self._hints: RqHints | None = None
        self._user_keys: UserKeys | None = None
        self._codec: Codec = PlainCodec()
        self._own_codec: Codec | None = None
        self._is_moved = False
        self._is_declared = False

    # ---- configuration -----------------------------------------------------------------------------------------------

    def configure(self, database: str | Database, redis: str | None, mode: Mode, **values: Any) -> None:
        """Set the database, Redis and the other ``values`` (see `_adopt`). A queue in use cannot be moved."""
        in_use = self._hints is not None or (self._opened is not None and self.url is not None)
        # An application factory that is called again passes the same values again.
        if in_use and (database, None if mode == "database" else redis) != (self.url, self.redis_url):
            raise InvalidInput(
                "The queue is in use already and cannot be moved.", hint="Configure it before its first use."
            )
        if not isinstance(database, str | Database):
            raise InvalidInput(
                f"`database` must be a URL or a Database, not {type(database).__name__}.",
                hint="Use sqlite:///file.db or postgresql://user@host/name",
            )
        self._adopt(redis=redis, mode=mode, **values)
        if self._is_moved:  # a test created the application inside `moved`: keep the test's database
            self.redis_url = None
        elif not in_use:
            self.url = database if isinstance(database, str) else None
            self._opened = database if isinstance(database, Database) else None

    def follow(self, config: Config) -> None:
        """Configure the queue from the settings, and follow their changes."""
        own = config.with_cli({})  # another reader of `config` must not consume the notice of a change
        self.configure(**settings.connection_settings(own), codec=self._own_codec)
        self._config = None if self._is_moved else own

    def _adopt(
        self, *, redis: str | None, mode: Mode, per_user: int | None, keys: Sequence[str | bytes],
        codec: Codec | None, rq: settings.RqOptions,
    ) -> None:  # fmt: skip
        """Apply all of these settings, or raise and apply none."""
        if per_user is not None and (type(per_user) is not int or not 1 <= per_user <= 10_000):
            raise InvalidInput(f"per_user must be an integer from 1 to 10,000, or None (got {per_user!r}).")
        if mode not in ("auto", "rq", "database", "hybrid"):
            raise InvalidInput(f"mode must be auto, rq, database or hybrid (got {mode!r}).")
        if mode in ("rq", "hybrid") and redis is None:
            raise InvalidInput(
                f"The mode {mode} needs a Redis.", hint="Give its URL: TaskQueue(redis='redis://localhost:6379/0')"
            )
        self._codec = codec or (FernetCodec(keys) if keys else PlainCodec())
        self._own_codec = codec
        self.redis_url = None if mode == "database" else redis
        self.rq, self.per_user, self._is_declared = rq, per_user, False

    @property
    def is_configured(self) -> bool:
        """Whether the queue knows its database. A Flask extension knows it after `init_app`."""
        return self._opened is not None or self.url is not None

    def worker_config(self, cli: Mapping[str, Any]) -> Config:
        """Return the settings for this queue's workers. ``cli`` overrides the application's settings."""
        return Config(cli=cli) if self._config is None else self._config.with_cli(cli)

    def refresh(self) -> None:
        """Adopt a changed headway.toml, if this queue was made from the settings.

        An unchanged file costs one `stat`. An invalid file is logged and ignored.
        """
        if self._config is None or not self._config.is_outdated:
            return
        with self._lock:
            if not settings.reload_file(self._config):
                return
            try:
                new = settings.connection_settings(self._config)
                if new.pop("database") != self.url:
                    log.warning("headway.toml names another database; it is used after a restart")
                if isinstance(self._codec, FernetCodec) and self._own_codec is None and not new["keys"]:
                    # The file may be in the middle of a rewrite. Adopting it would store payloads unencrypted.
                    log.warning("headway.toml no longer has queue_keys; the previous settings stay until a restart")
                    return
                before = self.redis_url, self.rq
                self._adopt(**new, codec=self._own_codec)
            except HeadwayError as error:
                log.warning("headway.toml is invalid; the previous settings stay in force", error=str(error))
                return
            if self.redis_url != before[0]:
                log.warning(
                    "the Redis URL changed; the new one is used from now on", new=redact(self.redis_url or "none")
                )
            if (self.redis_url, self.rq) != before:
                self._close_redis()

    @contextmanager
    def moved(self, url: str) -> Iterator[None]:
        """For tests: use another database without Redis; restore the previous one on exit."""
        before = {name: getattr(self, name) for name in _MOVABLE}
        self._opened, self.url, self._hints, self._user_keys, self.redis_url = connect(url), None, None, None, None
        self._config, self._is_moved = None, True
        try:
            yield
        finally:
            self._opened.close()
            for name, value in before.items():
                setattr(self, name, value)

    @property
    def is_moved(self) -> bool:
        """Whether a test uses the queue with another database."""
        return self._is_moved

    # ---- connections -------------------------------------------------------------------------------------------------

    @property
    def database(self) -> Database:
        """The open database; connects on first use."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    if self.url is None:
                        raise InvalidInput(
                            "The queue has no database yet.",
                            hint="Call init_app(app), or configure(database=...), first.",
                        )
                    self._opened = connect(self.url)
        return self._opened

    @property
    def hints(self) -> RqHints | None:
        """The sender of RQ hints; None in database mode. Nothing is sent yet."""
        self.refresh()
        if self._hints is None and self.redis_url is not None:
            with self._lock:
                self._open_redis()
        return self._hints

    def _open_redis(self) -> None:
        """Create the Redis clients, unless another thread created them or removed the URL."""
        url = self.redis_url
        if self._hints is None and url is not None:
            from headway.queue.rq.hints import SUBMIT_TIMEOUT, RqHints
            from headway.queue.rq.user_keys import UserKeys

            hints = RqHints(url, options=self.rq)
            self._user_keys = UserKeys(url, timeout=SUBMIT_TIMEOUT)
            self._hints = hints

    @property
    def user_keys(self) -> UserKeys | None:
        """The users' keys in Redis, if they are in use: with a Redis and one task per user."""
        return self._user_keys if self.per_user == 1 else None

    def delete_user_keys(self, users: Iterable[str | None]) -> None:
        """Delete the Redis keys of users whose task ended."""
        if self.user_keys is not None:
            self.user_keys.delete(user for user in users if user is not None)

    def note_ended(self, tasks: Iterable[Task]) -> None:
        """Delete the Redis keys of the users of ended tasks."""
        self.delete_user_keys(task.user_id for task in tasks if task.is_final)

    def reaches_redis(self) -> bool | None:
        """Return whether Redis answers; None if no Redis is configured."""
        return None if self.hints is None or self._user_keys is None else self._user_keys.answers()

    def declare_per_user(self) -> None:
        """Store ``per_user`` once per process, for tools that manage the queue without the application."""
        if not self._is_declared:
            self.database.run(lambda tx: declare_per_user(tx, self.per_user), operation="queue.declare")
            self._is_declared = True

    def _close_redis(self) -> None:
        """Close the Redis clients. A thread that is using them sees Redis as unreachable, and the sweeper sends its hint."""
        hints, user_keys, self._hints, self._user_keys = self._hints, self._user_keys, None, None
        if hints is not None:
            hints.close()
        if user_keys is not None:
            user_keys.close()

    def close(self) -> None:
        """Close the connections that this queue opened."""
        self._close_redis()
        if self._opened is not None and self.url is not None:
            self._opened.close()
            self._opened = None

    # ---- payloads ----------------------------------------------------------------------------------------------------

    @property
    def codec(self) -> Codec:
        """The codec of the current settings."""
        self.refresh()
        return self._codec

    def decode(self, id: str, stored: str) -> str:
        """Decode a stored payload to JSON text. Raises `StorageError` if it was altered or belongs to another task."""
        try:
            return self.codec.decode(id, stored)
        except StorageError:
            raise
        except Exception as error:  # the application's own codec may raise anything; only this task is affected
            raise StorageError(f"The payload of task {id} cannot be decoded: {type(error).__name__}.") from error

    def encode(self, id: str, text: str) -> str:
        """Encode JSON text for storage. With keys it is encrypted and bound to ``id``."""
        return self.codec.encode(id, text)

    def encode_result(self, id: str, text: str) -> str:
        """Encode a handler's result for storage."""
        return self.codec.encode(result_id(id), text)

    def decode_result(self, id: str, stored: str) -> str:
        """Decode a stored result to JSON text. Raises `StorageError` as `decode` does."""
        try:
            return self.decode(result_id(id), stored)
        except StorageError as error:
            raise StorageError(
                f"The result of task {id} cannot be decoded: it was altered, or encrypted with other keys.",
                hint="Check HEADWAY_QUEUE_KEYS, and who writes to the database.",
            ) from error

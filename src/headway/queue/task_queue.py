"""The task queue API: register handlers, submit, inspect and cancel tasks, pause queues.

queue = TaskQueue(database="postgresql://headway@db/headway", redis="redis://localhost:6379/0")

@queue.handler("caption", timeout=300)
def caption(task, payload):
    task.progress(50, "half way")
    ...

task = queue.submit("caption", {"image": 7}, user_id="anna")
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from headway._sql import Database, Tx, connect, is_two_phase, join
from headway.config import Config
from headway.core.connection_pools import discard_inherited
from headway.core.ids import UserId, check_id, user_text
from headway.core.retry import TASK
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.queue import settings
from headway.queue.handlers import Context, F, Handler, Isolation, registering
from headway.queue.payload import PAYLOAD_LIMIT, Codec, FernetCodec, PlainCodec
from headway.queue.store import bulk_insert as intake
from headway.queue.store import hints as hinting
from headway.queue.store import insert as admission
from headway.queue.store import limits, workers
from headway.queue.store import tasks as records
from headway.queue.submission import ROLES, Options, Role, Submissions
from headway.queue.task import (
    NewTask,
    Priority,
    QueueInfo,
    Status,
    Task,
    UserBusy,
    asked_user,
    check_asked,
    check_text,
    member_of,
)
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from headway.queue.rq import RqHints
    from headway.queue.store.user_quota import Places

log = Log("queue")

#: rq and hybrid: workers learn of tasks from RQ, and poll the rows for tasks without a hint. database: no Redis. auto: rq if a
#: Redis URL is given, else database.
Mode = Literal["auto", "rq", "database", "hybrid"]
_RQ = settings.RqOptions()


class TaskQueue:
    """A task queue; see the module. It connects on first use, so it may be created before a fork."""

    def __init__(
        self,
        database: str | Database = "sqlite:///headway.db",
        redis: str | None = None,
        mode: Mode = "auto",
        per_user: int | None = 1,
        *,
        keys: Sequence[str | bytes] = (),
        codec: Codec | None = None,
        new_id: Callable[[], str] | None = None,
        roles: Mapping[str, Role] = ROLES,
        payload_limit: int = PAYLOAD_LIMIT,
        context: Context | None = None,
        rq: settings.RqOptions = _RQ,
    ) -> None:
        """``context`` returns a context manager that is entered around every handler, in the process that runs it. Examples
        are an application context and a database session. ``per_user``: most active tasks per user; None for no limit."""
        self._opening = threading.Lock()
        self._opened: Database | None = None
        self._url: str | None = None
        self._on_submit: Callable[[Sequence[Task]], object] | None = None
        self._moved = False
        self.redis_url: str | None = None
        self._hints: RqHints | None = None
        self._places: Places | None = None
        self._config: Config | None = None
        self._declared = False
        self.handlers: dict[str, Handler] = {}
        self._after_fork: list[Callable[[], object]] = []
        self._submissions = Submissions(roles=roles, new_id=new_id, payload_limit=payload_limit)
        self.context = context
        self.configure(database=database, redis=redis, mode=mode, per_user=per_user, keys=keys, codec=codec, rq=rq)

    @classmethod
    def from_settings(cls, config: Config | None = None, **options: Any) -> Self:
        """Create a queue from the HEADWAY_* variables and headway.toml. ``options``: further arguments of `TaskQueue`.

        The queue follows changes to the file while it is in use: Redis, keys and tasks per user.
        """
        if twice := sorted(options.keys() & _SETTINGS):
            raise InvalidInput(
                f"{twice[0]} comes from the settings.", hint="Say it there, or use TaskQueue(...) without them."
            )
        made = cls(**options)
        made.configure_from(config or Config())
        return made

    def configure_from(self, config: Config) -> None:
        """Configure the queue from the settings, and follow their changes."""
        own = config.with_cli({})  # another reader of `config` must not consume the notice of a change
        self.configure(**settings.connection_settings(own), codec=self._own_codec)
        self._config = None if self._moved else own

    def configure(
        self,
        *,
        database: str | Database,
        redis: str | None = None,
        mode: Mode = "auto",
        per_user: int | None = 1,
        keys: Sequence[str | bytes] = (),
        codec: Codec | None = None,
        rq: settings.RqOptions = _RQ,
    ) -> None:
        """Set the database and Redis of a queue that was created without them, as in an application factory."""
        in_use = self._hints is not None or (self._opened is not None and self._url is not None)
        # An application factory that is called again passes the same values again.
        if in_use and (database, None if mode == "database" else redis) != (self._url, self.redis_url):
            raise InvalidInput(
                "The queue is in use already and cannot be moved.", hint="Configure it before its first use."
            )
        if not isinstance(database, str | Database):
            raise InvalidInput(f"A {type(database).__name__} is no database.", hint="Give its address, or an open one.")
        self._adopt(redis=redis, mode=mode, per_user=per_user, keys=keys, codec=codec, rq=rq)
        if self._moved:  # a test created the application inside `moved`: keep the test's database
            self.redis_url = None
            return
        if in_use:
            return
        self._url = database if isinstance(database, str) else None
        self._opened = database if isinstance(database, Database) else None

    def _adopt(
        self,
        *,
        redis: str | None,
        mode: Mode,
        per_user: int | None,
        keys: Sequence[str | bytes],
        codec: Codec | None = None,
        rq: settings.RqOptions = _RQ,
    ) -> None:
        """Apply all of these settings, or raise and apply none."""
        if per_user is not None and (type(per_user) is not int or not 1 <= per_user <= 10_000):
            raise InvalidInput(f"per_user={per_user!r} is no number of tasks.", hint="Use 1 to 10,000, or None.")
        if mode not in ("auto", "rq", "database", "hybrid"):
            raise InvalidInput(f"mode={mode!r} is not known.", hint="Use auto, rq, database or hybrid.")
        if mode in ("rq", "hybrid") and redis is None:
            raise InvalidInput(
                f"The mode {mode} needs a Redis.", hint="Give one: TaskQueue(redis='redis://localhost:6379/0')"
            )
        self._current_codec: Codec = codec or (FernetCodec(keys) if keys else PlainCodec())
        self._own_codec = codec
        self.redis_url = None if mode == "database" else redis
        self.rq = rq
        self._per_user = per_user
        self._declared = False

    def worker_config(self, cli: Mapping[str, Any]) -> Config:
        """Return the settings for this queue's workers. ``cli`` overrides the application's settings."""
        return Config(cli=cli) if self._config is None else self._config.with_cli(cli)

    def refresh(self) -> None:
        """Adopt a changed headway.toml, if this queue was made from the settings.

        An unchanged file costs one `stat`. An invalid file is logged and ignored.
        """
        if self._config is None or not self._config.is_outdated:
            return
        with self._opening:
            if not settings.reload_file(self._config):
                return
            try:
                said = settings.connection_settings(self._config)
            except HeadwayError as error:
                log.warning("headway.toml is refused; the settings before it stay in force", error=str(error))
                return
            if said.pop("database") != self._url:
                log.warning(
                    "headway.toml names another database: it is used after a restart, the tasks are in this one"
                )
            if isinstance(self._current_codec, FernetCodec) and self._own_codec is None and not said["keys"]:
                # The file may be in the middle of a rewrite. Adopting it would store payloads unencrypted.
                log.warning("headway.toml no longer has queue_keys: the settings before it stay until a restart")
                return
            before, options = self.redis_url, self.rq
            try:
                self._adopt(**said, codec=self._own_codec)
            except HeadwayError as error:
                log.warning("headway.toml is refused; the settings before it stay in force", error=str(error))
                return
            if self.redis_url != before:
                log.warning("another Redis is named: it is used from now on", new=redact(self.redis_url or "none"))
            if (self.redis_url, self.rq) != (before, options):
                self._let_redis_go()

    @property
    def _codec(self) -> Codec:
        """The codec of the current settings. Always use this property to encode or decode."""
        self.refresh()
        return self._current_codec

    @contextmanager
    def moved(self, *, database: str, on_submit: Callable[[Sequence[Task]], object] | None = None) -> Iterator[None]:
        """For tests: use another database without Redis and call ``on_submit`` after each submission; restore on exit."""
        before = {name: getattr(self, name) for name in _PLACE}
        self._opened, self._url, self._hints, self._places, self.redis_url = connect(database), None, None, None, None
        self._config, self._on_submit, self._moved = None, on_submit, True
        try:
            yield
        finally:
            self._opened.close()
            for name, value in before.items():
                setattr(self, name, value)

    # ---- handlers ----------------------------------------------------------------------------------------------------

    def handler(
        self,
        kind: str,
        *,
        timeout: float | None = 180.0,
        retries: int = TASK.retries,
        retry_delay: float = TASK.base,
        isolation: Isolation = "fork",
    ) -> Callable[[F], F]:
        """Register a function for tasks of ``kind``; it is called as ``function(task, payload)``.

        ``timeout`` (per run) and ``retry_delay`` are in seconds.
        """
        return registering(
            self.handlers, kind, timeout=timeout, retries=retries, retry_delay=retry_delay, isolation=isolation
        )

    def after_fork(self, function: _Hook) -> _Hook:
        """Register a function that every forked task process calls before ``context`` and the handler.

        Use it to reconnect what was opened at import. An error in it fails the run. SQLAlchemy engines and Django
        connections are renewed without it.
        """
        self._after_fork.append(function)
        return function

    def in_child(self, context: Context | None) -> Context:
        """Wrap ``context`` for a forked task process: discard inherited connections, call the hooks, then enter it."""

        @contextmanager
        def entered() -> Iterator[None]:
            discard_inherited()
            for function in self._after_fork:
                function()
            with nullcontext() if context is None else context():
                yield

        return entered

    # ---- submitting --------------------------------------------------------------------------------------------------

    def submit(self, kind: str, payload: Any = None, *, connection: object = None, **options: Unpack[Options]) -> Task:
        """Accept a task. When this returns, the task is committed and cannot be lost.

        If ``id`` exists, the existing task is returned if user, kind and payload are equal; otherwise `TaskConflict` is
        raised. Raises `UserBusy` if the user already has an active task.

        With ``connection`` (see `headway._sql.joined`) the task is part of the caller's open transaction there. It exists
        if and only if the caller commits, and workers learn of it then.
        """
        [task] = self._submit(
            [self._submissions.new(self.handlers, self._codec, kind, payload, **options)],
            connection,
            quick=options.get("id") is None,
        )
        return task

    def submit_many(self, tasks: Iterable[Mapping[str, Any]], *, connection: object = None) -> Sequence[Task]:
        """Submit many tasks, all or none. Each is a mapping of the arguments of `submit`."""
        asked: object = tasks  # untyped callers may pass anything
        given: list[Any] = list(asked) if isinstance(asked, Iterable) else [asked]
        if not all(isinstance(task, Mapping) and "kind" in task for task in given):
            raise InvalidInput(
                "submit_many takes mappings, each with a kind.", hint='For example [{"kind": "caption", "payload": 7}]'
            )
        return self._submit([self._submissions.new(self.handlers, self._codec, **task) for task in given], connection)

    def _submit(self, tasks: Sequence[NewTask], connection: object, *, quick: bool = False) -> Sequence[Task]:
        if not tasks:
            return []
        try:
            return self._accept(tasks, connection, quick=quick)
        except StorageError as error:
            what = f"Task {tasks[0].id} was not accepted" if len(tasks) == 1 else "The tasks were not accepted"
            if refused := admission.legacy_refusal(error, what, self._per_user):
                raise refused from None
            raise

    def _accept(self, tasks: Sequence[NewTask], connection: object, *, quick: bool) -> Sequence[Task]:
        if connection is not None and not self._moved:
            return self._submit_joined(tasks, connection)
        hints = self.hints
        places = self._places if self._per_user == 1 and tasks[0].user_id is not None else None
        if places is not None and quick:
            places.check(self.database, str(tasks[0].user_id))
        try:
            self._declare()
            accepted = intake.submit(self.database, tasks, per_user=self._per_user, hinting=hints is not None)
        except UserBusy as refused:
            if places is not None and quick:
                places.refused(str(tasks[0].user_id), refused.task_id)
            raise
        if hints is not None:
            # The task is committed: if the hint fails, the task is still not lost.
            new = [
                (task.id, task.priority) for task in accepted if task.version == 1 and task.run_at <= task.created_at
            ]
            hinted = set(
                hints.push(new, places=self._places.keys_of(accepted) if self._places and self._per_user == 1 else ())
            )
            missed = [task_id for task_id, _ in new if task_id not in hinted]
            if missed:
                try:
                    self._run(lambda tx: hinting.unhint(tx, missed), "unhint")
                except HeadwayError as error:  # the sweeper notices the missing hint later
                    log.warning("RQ was not told of a task, and that could not be noted", error=str(error))
        if self._on_submit is not None:
            self._on_submit(accepted)
        return accepted

    @property
    def per_user(self) -> int | None:
        """Most active tasks per user; None for no limit."""
        return self._per_user

    def new_task(self, kind: str, payload: Any = None, **options: Unpack[Options]) -> NewTask:
        """Check and encode a task without submitting it."""
        return self._submissions.new(self.handlers, self._codec, kind, payload, **options)

    def _declare(self) -> None:
        """Store ``per_user`` once per process, for tools that manage the queue without the application."""
        if not self._declared:
            self._run(lambda tx: settings.declare_per_user(tx, self._per_user), "declare")
            self._declared = True

    def _submit_joined(self, tasks: Sequence[NewTask], connection: object) -> list[Task]:
        """Submit inside the caller's transaction.

        No RQ hint is sent, because only the caller knows when it commits. The sweeper sends it later, and idle workers poll
        for such rows. In database mode the commit itself notifies workers.
        """
        with join(self.database, connection) as tx:
            # A counter share for this connection alone, because its transaction may last long.
            row = tx.one("SELECT pg_backend_pid()") if tx.engine == "postgresql" else None
            return admission.submit(
                tx, tasks, per_user=self._per_user, share=16 + (int(row[0]) if row else 0),
                waking=not is_two_phase(connection),
            )  # fmt: skip

    # ---- reading -----------------------------------------------------------------------------------------------------

    def get(self, id: str, *, user_id: UserId | None = None) -> Task:
        """Return one task, or raise `NotFound`. With ``user_id``, another user's task is not found either."""
        user = asked_user(user_id)
        with self.database.read() as tx:
            return records.get(tx, check_id(id, "a task id"), user_id=user)

    def result(self, id: str, *, user_id: UserId | None = None) -> Any:
        """Return the handler's result of a COMPLETED task. ``user_id`` works as in `get`."""
        user = asked_user(user_id)
        with self.database.read() as tx:
            task, stored = records.get_with(tx, check_id(id, "a task id"), "result", user_id=user)
        if task.status is not Status.COMPLETED:
            raise InvalidInput(
                f"Task {id} is {task.status.value}: it has no result.", hint="See why: headway task show"
            )
        try:
            return None if stored is None else json.loads(self._decoded(_result_of(id), stored))
        except StorageError as error:
            raise StorageError(
                f"The result of task {id} cannot be read: it was altered, or kept without the keys that are set.",
                hint="Check HEADWAY_QUEUE_KEYS, and who writes to the store.",
            ) from error

    def list(
        self,
        *,
        status: Status | str | None = None,
        queue: Priority | str | None = None,
        kind: str | None = None,
        user_id: UserId | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[Task]:
        """List matching tasks, newest first. For the next page pass the last task's id as ``before``."""
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit={limit!r} is no size of a page.", hint="Use 1 to 1,000.")
        check_asked(kind=kind, before=before)
        user = asked_user(user_id)
        with self.database.read() as tx:
            return records.listing(
                tx,
                status=None if status is None else member_of(Status, status, "a status"),
                queue=None if queue is None else member_of(Priority, queue, "a queue"),
                kind=kind,
                user_id=user,
                before=before,
                limit=limit,
            )

    def stats(self) -> Sequence[QueueInfo]:
        """Return the four queues in order of service."""
        with self.database.read() as tx:
            unserved: dict[str, list[str]] = {}
            for each in workers.unserved(tx):
                unserved.setdefault(each.queue, []).append(each.kind)
            return records.queue_infos(tx, unserved=unserved)

    # ---- changing ----------------------------------------------------------------------------------------------------

    def cancel(self, id: str, *, by: str = "", user_id: UserId | None = None) -> Task:
        """Cancel a waiting task at once. A running task is asked to stop, and its worker ends it if it does not."""
        check_id(id, "a task id")
        user = asked_user(user_id)
        task = self._run(lambda tx: records.cancel(tx, id, by=by or user or "headway", user_id=user), "cancel")
        if task.is_final:
            if self.hints is not None:
                self.hints.withdraw([(task.id, task.priority)])
            self.settled([task])
        return task

    def settled(self, tasks: Iterable[Task]) -> None:
        """Delete the Redis user keys of the tasks that ended."""
        self.leave_places(task.user_id for task in tasks if task.is_final)

    def leave_places(self, users: Iterable[str | None]) -> None:
        """Delete the Redis user keys of users whose task ended."""
        if self._places is not None and self._per_user == 1:
            self._places.leave(user for user in users if user is not None)

    def retry(self, id: str) -> Task:
        """Queue a failed or cancelled task again, with its attempts reset."""
        check_id(id, "a task id")
        self.refresh()
        while True:
            try:
                return self._run(lambda tx: admission.retry(tx, id, per_user=self._per_user), "retry")
            except StorageError as error:
                if refused := admission.legacy_refusal(error, f"Task {id} was not tried again", self._per_user):
                    raise refused from None
                # Another task took the user's slot at the same moment. Nothing changed; the next attempt sees that task.
                if type(error.__cause__).__name__ != "UniqueViolation":
                    raise

    def pause(self, queue: Priority | str, *, reason: str, by: str, until: datetime | None = None) -> None:
        """Stop claims from a queue, effective from the next claim. Running tasks and new submissions are not affected."""
        chosen = member_of(Priority, queue, "a queue")
        self._run(lambda tx: records.pause(tx, chosen, reason=reason, by=by, until=until), "pause")

    def resume(self, queue: Priority | str, *, by: str = "headway") -> bool:
        """Resume a queue; return whether it was paused."""
        chosen = member_of(Priority, queue, "a queue")
        return self._run(lambda tx: records.resume(tx, chosen, by=by), "resume")

    def limit(
        self,
        scope: str,
        key: UserId = "*",
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        by: str = "headway",
    ) -> None:
        """Limit how many tasks run at once or start per second. With neither, remove the limit.

        `headway.queue.store.limits` explains the scopes.
        """
        limited = check_text(user_text(key), "whom a limit is for")

        def work(tx: Tx) -> None:
            limits.set_limit(tx, scope, limited, concurrency=concurrency, rate=rate)
            records.audit(
                tx, by, "queue.limit", {"scope": scope, "key": limited, "concurrency": concurrency, "rate": rate}
            )

        self._run(work, "limit")

    def set(self, name: str, value: object, *, by: str = "headway") -> None:
        """Set one of `headway.queue.settings.LIVE` for all workers and supervisors, within seconds and without a restart."""
        self._run(lambda tx: settings.put(tx, name, value, by=by), "set")

    def unset(self, name: str, *, by: str = "headway") -> bool:
        """Return to each host's own setting; return whether a value was set."""
        return self._run(lambda tx: settings.remove(tx, name, by=by), "set")

    def drain(self, worker: str, *, by: str) -> str:
        """Ask a worker to exit after its current tasks; return the request in force.

        Its supervisor starts a replacement, because the number of workers is a setting. Raises `NotFound` if there is no
        such worker, and `InvalidInput` if it has ended.
        """
        return self._run(lambda tx: workers.end_worker(tx, worker, "drain", by=by), "drain")

    def stop(self, worker: str, *, by: str) -> str:
        """Ask a worker to exit at once. Its tasks return to their queues with no attempt counted; otherwise like `drain`."""
        return self._run(lambda tx: workers.end_worker(tx, worker, "stop", by=by), "stop")

    def remove_worker(self, worker: str, *, by: str) -> None:
        """Remove a lost or ended worker from the list, where it would stay for a day.

        Raises `NotFound` if there is no such worker, and `InvalidInput` if it has not ended.
        """
        self._run(lambda tx: workers.remove_worker(tx, worker, by=by), "remove")

    # ---- connections -------------------------------------------------------------------------------------------------

    @property
    def hints(self) -> RqHints | None:
        """The sender of RQ hints; None in database mode."""
        self.refresh()
        if self._hints is None and self.redis_url is not None:
            with self._opening:
                self._use_redis()
        return self._hints

    def _use_redis(self) -> None:
        """Create the Redis clients, unless another thread created them or removed the URL. Nothing is sent yet."""
        url = self.redis_url
        if self._hints is not None or url is None:
            return
        from headway.queue.rq import SUBMIT_TIMEOUT, RqHints
        from headway.queue.store.user_quota import Places

        hints = RqHints(url, options=self.rq)
        self._places = Places(url, timeout=SUBMIT_TIMEOUT)
        self._hints = hints

    def reaches_redis(self) -> bool | None:
        """Return whether Redis answers; None if no Redis is configured."""
        return self._places.answers() if self.hints is not None and self._places is not None else None

    @property
    def database(self) -> Database:
        """The open database; connects on first use."""
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    if self._url is None:
                        raise InvalidInput(
                            "The queue has no database yet.",
                            hint="Call init_app(app), or configure(database=...), first.",
                        )
                    self._opened = connect(self._url)
        return self._opened

    @property
    def is_configured(self) -> bool:
        """Whether the queue knows its database. A Flask extension knows it after `init_app`."""
        return self._opened is not None or self._url is not None

    def payload(self, id: str, stored: str) -> str:
        """Decode a stored payload to JSON text. Raises `StorageError` if it was altered or belongs to another task."""
        return self._decoded(id, stored)

    def _decoded(self, id: str, stored: str) -> str:
        try:
            return self._codec.decode(id, stored)
        except StorageError:
            raise
        except Exception as error:  # the application's own codec may raise anything; only this task is affected
            raise StorageError(f"What is stored of task {id} cannot be read: {type(error).__name__}.") from error

    def sealed(self, id: str, text: str) -> str:
        """Encode JSON text for storage. With keys it is encrypted and bound to ``id``."""
        return self._codec.encode(id, text)

    def sealed_result(self, id: str, text: str) -> str:
        """Encode a handler's result for storage."""
        return self._codec.encode(_result_of(id), text)

    @property
    def database_url(self) -> str | None:
        """The URL of the database; None if the queue was given an open database."""
        return self._url

    def _let_redis_go(self) -> None:
        """Close the Redis clients. A thread that is using them sees Redis as unreachable, and the sweeper sends its hint."""
        hints, places, self._hints, self._places = self._hints, self._places, None, None
        if hints is not None:
            hints.close()
        if places is not None:
            places.close()

    def close(self) -> None:
        """Close the connections that this queue opened."""
        self._let_redis_go()
        if self._opened is not None and self._url is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Callable[[Tx], _T], operation: str) -> _T:
        return self.database.run(work, operation=f"queue.{operation}")


_SETTINGS = {"database", "redis", "mode", "per_user", "keys", "rq"}
#: Attributes that `moved` saves and restores.
_PLACE = ("_opened", "_url", "_hints", "_places", "redis_url", "_config", "_on_submit", "_moved", "_declared")
_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[[], object])


def _result_of(id: str) -> str:
    """Return the id that an encrypted result is bound to. Task ids have no space, so a result cannot pass as a payload."""
    return f"{id} result"

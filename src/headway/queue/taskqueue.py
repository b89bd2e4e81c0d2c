"""The queue as a program sees it: handlers are registered, tasks are submitted, looked at, cancelled; queues are paused.

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
from headway.connection_pools import discard_inherited
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.ids import UserId, check_id, user_text
from headway.queue import admission, hinting, intake, limits, records, settings, workers
from headway.queue.codec import PAYLOAD_LIMIT, Codec, FernetCodec, PlainCodec
from headway.queue.handlers import Context, F, Handler, Isolation, registering
from headway.queue.submission import ROLES, Options, Role, Submissions
from headway.queue.values import (
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
from headway.retry import TASK
from headway.telemetry import Log, redact

if TYPE_CHECKING:
    from headway.queue.places import Places
    from headway.queue.rq import RqHints

log = Log("queue")

#: rq and hybrid: workers hear of tasks through RQ, and from the rows where RQ does not know them. database: no Redis at
#: all. auto: rq where a Redis is named.
Mode = Literal["auto", "rq", "database", "hybrid"]
_RQ = settings.RqOptions()


class TaskQueue:
    """See the module. It connects when it is first used, so it may be made before a fork."""

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
        """``context`` makes a context manager that is entered around every handler, in the process that runs it: an
        application context, a database session."""
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
        """A queue where HEADWAY_* and headway.toml say it is; ``options`` as of `TaskQueue`, for what they cannot say.

        It follows the file while it is used: another Redis, other keys, another number of tasks per user.
        """
        if twice := sorted(options.keys() & _SETTINGS):
            raise InvalidInput(
                f"{twice[0]} comes from the settings.", hint="Say it there, or use TaskQueue(...) without them."
            )
        made = cls(**options)
        made.configure_from(config or Config())
        return made

    def configure_from(self, config: Config) -> None:
        """`configure` by the settings, and by what they say later."""
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
        """Say where the queue lives, for one that was made before that was known (an application factory)."""
        in_use = self._hints is not None or (self._opened is not None and self._url is not None)
        # An application factory that is called again says the same again.
        if in_use and (database, None if mode == "database" else redis) != (self._url, self.redis_url):
            raise InvalidInput(
                "The queue is in use already and cannot be moved.", hint="Configure it before its first use."
            )
        if not isinstance(database, str | Database):
            raise InvalidInput(f"A {type(database).__name__} is no database.", hint="Give its address, or an open one.")
        self._adopt(redis=redis, mode=mode, per_user=per_user, keys=keys, codec=codec, rq=rq)
        if self._moved:  # a test made the application inside `moved`: it stays there
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
        """All of it, or an error and none of it."""
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
        """The settings of this queue's workers: the application's, under what the command line says."""
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
                # Also the state of a file that is being rewritten in place. Adopting it would store payloads in the clear.
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
        """The codec of the settings as they are now: the only way to encode or decode."""
        self.refresh()
        return self._current_codec

    @contextmanager
    def moved(self, *, database: str, on_submit: Callable[[Sequence[Task]], object] | None = None) -> Iterator[None]:
        """For tests: on another database, without Redis, calling ``on_submit`` after each submission; then as before."""
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
        """Register a function for tasks of ``kind``; it is called as ``function(task, payload)``."""
        return registering(
            self.handlers, kind, timeout=timeout, retries=retries, retry_delay=retry_delay, isolation=isolation
        )

    def after_fork(self, function: _Hook) -> _Hook:
        """Register a function that every forked task process calls before ``context`` and the handler.

        It is the place to reconnect what was opened at import. An error in it fails the run. SQLAlchemy engines and
        Django connections are renewed without it.
        """
        self._after_fork.append(function)
        return function

    def in_child(self, context: Context | None) -> Context:
        """Return ``context`` as a forked task process enters it: after the connections it inherited are discarded."""

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
        """Accept a task. When this returns, the task is committed and is not lost whatever happens next.

        An ``id`` that exists gives the existing task if user, kind and payload are the same, else raises `TaskConflict`.
        Raises `UserBusy` when the user has an active task already.

        With ``connection``, the caller's own (see `headway._sql.joined`), it is part of the transaction that the caller
        has begun there: the task exists exactly if the caller commits, and workers hear of it then.
        """
        [task] = self._submit(
            [self._submissions.new(self.handlers, self._codec, kind, payload, **options)],
            connection,
            quick=options.get("id") is None,
        )
        return task

    def submit_many(self, tasks: Iterable[Mapping[str, Any]], *, connection: object = None) -> Sequence[Task]:
        """`submit` for many, each a mapping of its arguments: all of them are accepted, or none."""
        asked: object = tasks  # whoever calls may give anything
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
            # It is accepted: whatever happens to the hint, the task is not lost.
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
                except HeadwayError as error:  # the sweeper finds out, somewhat later
                    log.warning("RQ was not told of a task, and that could not be noted", error=str(error))
        if self._on_submit is not None:
            self._on_submit(accepted)
        return accepted

    @property
    def per_user(self) -> int | None:
        """How many active tasks a user may have; None: any number."""
        return self._per_user

    def new_task(self, kind: str, payload: Any = None, **options: Unpack[Options]) -> NewTask:
        """Check and encode a task without submitting it."""
        return self._submissions.new(self.handlers, self._codec, kind, payload, **options)

    def _declare(self) -> None:
        """Once per process: those who steer the queue without the application need to know its rule."""
        if not self._declared:
            self._run(lambda tx: settings.declare_per_user(tx, self._per_user), "declare")
            self._declared = True

    def _submit_joined(self, tasks: Sequence[NewTask], connection: object) -> list[Task]:
        """RQ is not told: nobody but the caller knows when it commits. The sweeper tells it, and a worker that is idle
        looks for such rows; workers of the database are notified by the commit itself."""
        with join(self.database, connection) as tx:
            # A share of the counts that is this connection's alone: its transaction may last.
            row = tx.one("SELECT pg_backend_pid()") if tx.engine == "postgresql" else None
            return admission.submit(
                tx, tasks, per_user=self._per_user, share=16 + (int(row[0]) if row else 0),
                waking=not is_two_phase(connection),
            )  # fmt: skip

    # ---- looking -----------------------------------------------------------------------------------------------------

    def get(self, id: str, *, user_id: UserId | None = None) -> Task:
        """One task, or `NotFound`; with ``user_id`` another user's task is as missing as one that never was."""
        user = asked_user(user_id)
        with self.database.read() as tx:
            return records.get(tx, check_id(id, "a task id"), user_id=user)

    def result(self, id: str, *, user_id: UserId | None = None) -> Any:
        """What the handler of a COMPLETED task returned; another user's task is as missing as for `get`."""
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
        """The newest tasks that match; the next page with ``before`` set to the id of the last one."""
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
        """The four queues, in the order of service."""
        with self.database.read() as tx:
            unserved: dict[str, list[str]] = {}
            for each in workers.unserved(tx):
                unserved.setdefault(each.queue, []).append(each.kind)
            return records.queue_infos(tx, unserved=unserved)

    # ---- changing ----------------------------------------------------------------------------------------------------

    def cancel(self, id: str, *, by: str = "", user_id: UserId | None = None) -> Task:
        """Cancel a waiting task at once; a running one is told, and ended by its worker if it does not end itself."""
        check_id(id, "a task id")
        user = asked_user(user_id)
        task = self._run(lambda tx: records.cancel(tx, id, by=by or user or "headway", user_id=user), "cancel")
        if task.is_final:
            if self.hints is not None:
                self.hints.withdraw([(task.id, task.priority)])
            self.settled([task])
        return task

    def settled(self, tasks: Iterable[Task]) -> None:
        """These tasks ended, or wait again: the quick check of users' places forgets those that ended."""
        self.leave_places(task.user_id for task in tasks if task.is_final)

    def leave_places(self, users: Iterable[str | None]) -> None:
        """A task of each of them ended: the quick check of users' places forgets it."""
        if self._places is not None and self._per_user == 1:
            self._places.leave(user for user in users if user is not None)

    def retry(self, id: str) -> Task:
        """Give a failed or cancelled task another life."""
        check_id(id, "a task id")
        self.refresh()
        while True:
            try:
                return self._run(lambda tx: admission.retry(tx, id, per_user=self._per_user), "retry")
            except StorageError as error:
                if refused := admission.legacy_refusal(error, f"Task {id} was not tried again", self._per_user):
                    raise refused from None
                # Somebody took the user's place at this very moment. Nothing was changed, and the next look sees who has it.
                if type(error.__cause__).__name__ != "UniqueViolation":
                    raise

    def pause(self, queue: Priority | str, *, reason: str, by: str, until: datetime | None = None) -> None:
        """Hand out nothing more of a queue, from the next claim on. What runs goes on; submitting goes on."""
        chosen = member_of(Priority, queue, "a queue")
        self._run(lambda tx: records.pause(tx, chosen, reason=reason, by=by, until=until), "pause")

    def resume(self, queue: Priority | str, *, by: str = "headway") -> bool:
        """Whether it had been paused."""
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
        """Bound how many run at once, or start per second; see `headway.queue.limits`. With neither: no bound."""
        limited = check_text(user_text(key), "whom a limit is for")

        def work(tx: Tx) -> None:
            limits.set_limit(tx, scope, limited, concurrency=concurrency, rate=rate)
            records.audit(
                tx, by, "queue.limit", {"scope": scope, "key": limited, "concurrency": concurrency, "rate": rate}
            )

        self._run(work, "limit")

    def set(self, name: str, value: object, *, by: str = "headway") -> None:
        """Set one of `headway.queue.settings.LIVE` for every worker and supervisor, within seconds and without a restart."""
        self._run(lambda tx: settings.put(tx, name, value, by=by), "set")

    def unset(self, name: str, *, by: str = "headway") -> bool:
        """Back to what each host's own settings say; whether it was set."""
        return self._run(lambda tx: settings.remove(tx, name, by=by), "set")

    def drain(self, worker: str, *, by: str) -> str:
        """Ask a worker to finish what it runs and end; what it is asked now. Its supervisor starts another in its place:
        how many there are is a setting. Raises `NotFound`, and `InvalidInput` for one that has ended."""
        return self._run(lambda tx: workers.end_worker(tx, worker, "drain", by=by), "drain")

    def stop(self, worker: str, *, by: str) -> str:
        """As `drain`, but at once: what it runs goes back into its queue, with no attempt counted."""
        return self._run(lambda tx: workers.end_worker(tx, worker, "stop", by=by), "stop")

    def remove_worker(self, worker: str, *, by: str) -> None:
        """Take a worker that was lost or has ended off the list; else it stays there for a day. Raises `NotFound`, and
        `InvalidInput` for one that has not ended."""
        self._run(lambda tx: workers.remove_worker(tx, worker, by=by), "remove")

    # ---- the database ------------------------------------------------------------------------------------------------

    @property
    def hints(self) -> RqHints | None:
        """Who tells RQ of tasks; None in database mode."""
        self.refresh()
        if self._hints is None and self.redis_url is not None:
            with self._opening:
                self._use_redis()
        return self._hints

    def _use_redis(self) -> None:
        """Unless another thread was quicker, or has let it go. Nothing is sent yet."""
        url = self.redis_url
        if self._hints is not None or url is None:
            return
        from headway.queue.places import Places
        from headway.queue.rq import SUBMIT_TIMEOUT, RqHints

        hints = RqHints(url, options=self.rq)
        self._places = Places(url, timeout=SUBMIT_TIMEOUT)
        self._hints = hints

    def reaches_redis(self) -> bool | None:
        """Whether Redis answers; None where none is named."""
        return self._places.answers() if self.hints is not None and self._places is not None else None

    @property
    def database(self) -> Database:
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
        """Whether the queue knows its database. A Flask extension does after `init_app`."""
        return self._opened is not None or self._url is not None

    def payload(self, id: str, stored: str) -> str:
        """A stored payload as JSON text, or an error if it was altered or is another task's."""
        return self._decoded(id, stored)

    def _decoded(self, id: str, stored: str) -> str:
        try:
            return self._codec.decode(id, stored)
        except StorageError:
            raise
        except Exception as error:  # the application's own codec may raise anything: it costs this task alone
            raise StorageError(f"What is stored of task {id} cannot be read: {type(error).__name__}.") from error

    def sealed(self, id: str, text: str) -> str:
        """JSON text as it is stored: with keys it is encrypted and bound to ``id``."""
        return self._codec.encode(id, text)

    def sealed_result(self, id: str, text: str) -> str:
        """What a handler returned, as it is stored."""
        return self._codec.encode(_result_of(id), text)

    @property
    def database_url(self) -> str | None:
        """The address of the database, if the queue was given one and not an open database."""
        return self._url

    def _let_redis_go(self) -> None:
        """Whoever is using it in another thread is told that it is away, and its task waits for the sweeper."""
        hints, places, self._hints, self._places = self._hints, self._places, None, None
        if hints is not None:
            hints.close()
        if places is not None:
            places.close()

    def close(self) -> None:
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
#: Where a queue lives, and whom it tells.
_PLACE = ("_opened", "_url", "_hints", "_places", "redis_url", "_config", "_on_submit", "_moved", "_declared")
_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[[], object])


def _result_of(id: str) -> str:
    """What a result is bound to when it is encrypted. No id holds a space: nobody can put it in the place of a payload."""
    return f"{id} result"

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from headway._sql import Database, Tx
from headway.config import Config
from headway.core.ids import UserId, check_id, user_text
from headway.core.retry import TASK
from headway.errors import InvalidInput, StorageError
from headway.queue import settings
from headway.queue.backend import DEFAULT_RQ, Backend, Mode
from headway.queue.handlers import Context, F, Handler, Isolation, registering
from headway.queue.payload import PAYLOAD_LIMIT, Codec
from headway.queue.store import administration, insert, limits, tasks, workers
from headway.queue.submission import ROLES, Options, Role, Submitter
from headway.queue.task import (
    Priority,
    QueueInfo,
    Status,
    Task,
    check_asked,
    check_text,
    member_of,
    user_filter,
)

if TYPE_CHECKING:
    from headway.queue.rq.hints import RqHints

_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[[], object])
#: Arguments that `TaskQueue.from_settings` takes from the settings.
_FROM_SETTINGS = {"database", "redis", "mode", "per_user", "keys", "rq"}


# More than 25 methods: 23 of them are the documented API, which users call on this one object. Each delegates to `Backend`,
# `Submitter` or the store (docs/decisions/0043-the-task-queue-is-a-facade.md).
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
        rq: settings.RqOptions = DEFAULT_RQ,
    ) -> None:
        """``context`` returns a context manager that is entered around every handler, in the process that runs it. Examples
        are an application context and a database session. ``per_user``: most active tasks per user; None for no limit."""
        self.handlers: dict[str, Handler] = {}
        self.context = context
        self.fork_hooks: list[Callable[[], object]] = []
        self.backend = Backend()
        self.submitter = Submitter(
            self.backend, lambda: self.handlers, roles=roles, new_id=new_id, payload_limit=payload_limit
        )
        self.configure(database=database, redis=redis, mode=mode, per_user=per_user, keys=keys, codec=codec, rq=rq)

    @classmethod
    def from_settings(cls, config: Config | None = None, **options: Any) -> Self:
        """Create a queue from the HEADWAY_* variables and headway.toml. ``options``: further arguments of `TaskQueue`.

        The queue follows changes to the file while it is in use: Redis, keys and tasks per user.
        """
        if both := sorted(options.keys() & _FROM_SETTINGS):
            raise InvalidInput(
                f"{both[0]} comes from the settings.", hint="Set it there, or use TaskQueue(...) without from_settings."
            )
        made = cls(**options)
        made.configure_from(config or Config())
        return made

    def configure_from(self, config: Config) -> None:
        """Configure the queue from the settings, and follow their changes."""
        self.backend.follow(config)

    def configure(
        self,
        *,
        database: str | Database,
        redis: str | None = None,
        mode: Mode = "auto",
        per_user: int | None = 1,
        keys: Sequence[str | bytes] = (),
        codec: Codec | None = None,
        rq: settings.RqOptions = DEFAULT_RQ,
    ) -> None:
        """Set the database and Redis of a queue that was created without them, as in an application factory."""
        self.backend.configure(database, redis, mode, per_user=per_user, keys=keys, codec=codec, rq=rq)

    @contextmanager
    def moved(self, *, database: str, on_submit: Callable[[Sequence[Task]], object] | None = None) -> Iterator[None]:
        """For tests: use another database without Redis and call ``on_submit`` after each submission; restore on exit."""
        before, self.submitter.on_submit = self.submitter.on_submit, on_submit
        try:
            with self.backend.moved(database):
                yield
        finally:
            self.submitter.on_submit = before

    # ---- handlers ----------------------------------------------------------------------------------------------------

    def handler(
        self,
        kind: str,
        *,
        timeout: float | None = 180.0,
        retries: int = TASK.retries,
        retry_delay: float = TASK.base,
        isolation: Isolation | None = None,
        concurrency: int | None = None,
        setup: Callable[[], object] | None = None,
    ) -> Callable[[F], F]:
        """Register a function for tasks of ``kind``; it is called as ``function(task, payload)``.

        ``timeout`` (per run) and ``retry_delay`` are in seconds. A plain function runs in a process of its own
        (``isolation="fork"``, the default) or in the worker's process (``"none"``). An async function runs on the worker's
        event loop, up to ``concurrency`` tasks of the kind at once (default 100).

        ``setup`` returns a context manager, or is a function with one yield. Each worker process enters it once, before the
        kind's first task, and passes what it yields as a third argument. Before a fork it is entered in the worker.
        """
        return registering(
            self.handlers, kind, timeout=timeout, retries=retries, retry_delay=retry_delay, isolation=isolation,
            concurrency=concurrency, setup=setup,
        )  # fmt: skip

    def after_fork(self, function: _Hook) -> _Hook:
        """Register a function that every forked task process calls before ``context`` and the handler.

        Use it to reconnect what was opened at import. An error in it fails the run. SQLAlchemy engines and Django
        connections are renewed without it.
        """
        self.fork_hooks.append(function)
        return function

    # ---- submitting --------------------------------------------------------------------------------------------------

    def submit(self, kind: str, payload: Any = None, *, connection: object = None, **options: Unpack[Options]) -> Task:
        """Accept a task. When this returns, the task is committed and cannot be lost.

        If ``id`` exists, the existing task is returned if user, kind and payload are equal; otherwise `TaskConflict` is
        raised. Raises `UserBusy` if the user already has an active task.

        With ``connection`` (see `headway._sql.joined`) the task is part of the caller's open transaction there. It exists
        if and only if the caller commits, and workers learn of it then.
        """
        new = self.submitter.new_task(kind, payload, **options)
        [task] = self.submitter.submit([new], connection, check_user=options.get("id") is None)
        return task

    def submit_many(self, tasks: Iterable[Mapping[str, Any]], *, connection: object = None) -> Sequence[Task]:
        """Submit many tasks, all or none. Each is a mapping of the arguments of `submit`."""
        untyped: object = tasks  # untyped callers may pass anything
        given: list[Any] = list(untyped) if isinstance(untyped, Iterable) else [untyped]
        if not all(isinstance(task, Mapping) and "kind" in task for task in given):
            raise InvalidInput(
                "submit_many takes mappings, each with a kind.", hint='For example [{"kind": "caption", "payload": 7}]'
            )
        return self.submitter.submit([self.submitter.new_task(**task) for task in given], connection)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def get(self, id: str, *, user_id: UserId | None = None) -> Task:
        """Return one task, or raise `NotFound`. With ``user_id``, another user's task is not found either."""
        user = user_filter(user_id)
        with self.database.read() as tx:
            return tasks.get(tx, check_id(id, "a task id"), user_id=user)

    def result(self, id: str, *, user_id: UserId | None = None) -> Any:
        """Return the handler's result of a COMPLETED task. ``user_id`` works as in `get`."""
        user = user_filter(user_id)
        with self.database.read() as tx:
            task, stored = tasks.get_with(tx, check_id(id, "a task id"), "result", user_id=user)
        if task.status is not Status.COMPLETED:
            raise InvalidInput(
                f"Task {id} is {task.status.value}: it has no result.", hint="See why: headway task show"
            )
        return None if stored is None else json.loads(self.backend.decode_result(id, stored))

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
            raise InvalidInput(f"limit must be an integer from 1 to 1,000 (got {limit!r}).")
        check_asked(kind=kind, before=before)
        user = user_filter(user_id)
        with self.database.read() as tx:
            return tasks.listing(
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
            online, unserved = workers.online_workers(tx), dict[str, list[str]]()
            for each in workers.unserved_by(online, workers.waiting_kinds(tx)):
                unserved.setdefault(each.queue, []).append(each.kind)
            infos = tasks.queue_infos(tx, unserved=unserved)
        return [replace(one, workers=sum(one.priority.value in each.queues for each in online)) for one in infos]

    # ---- changing tasks ----------------------------------------------------------------------------------------------

    def cancel(self, id: str, *, by: str = "", user_id: UserId | None = None) -> Task:
        """Cancel a waiting task at once. A running task is asked to stop, and its worker ends it if it does not."""
        check_id(id, "a task id")
        user = user_filter(user_id)
        task = self._run(lambda tx: tasks.cancel(tx, id, by=by or user or "headway", user_id=user), "cancel")
        if task.is_final:
            if self.hints is not None:
                self.hints.withdraw([(task.id, task.priority)])
            self.backend.note_ended([task])
        return task

    def retry(self, id: str) -> Task:
        """Queue a failed or cancelled task again, with its attempts reset."""
        check_id(id, "a task id")
        self.backend.refresh()
        per_user = self.backend.per_user
        while True:
            try:
                return self._run(lambda tx: insert.retry(tx, id, per_user=per_user), "retry")
            except StorageError as error:
                if refused := insert.legacy_refusal(error, f"Task {id} was not retried", per_user):
                    raise refused from None
                # Another task took the user's slot at the same moment. Nothing changed; the next attempt sees that task.
                if not insert.is_duplicate(error):
                    raise

    # ---- operating ---------------------------------------------------------------------------------------------------

    def pause(self, queue: Priority | str, *, reason: str, by: str, until: datetime | None = None) -> None:
        """Stop claims from a queue, effective from the next claim. Running tasks and new submissions are not affected."""
        chosen = member_of(Priority, queue, "a queue")
        self._run(lambda tx: administration.pause(tx, chosen, reason=reason, by=by, until=until), "pause")

    def resume(self, queue: Priority | str, *, by: str = "headway") -> bool:
        """Resume a queue; return whether it was paused."""
        chosen = member_of(Priority, queue, "a queue")
        return self._run(lambda tx: administration.resume(tx, chosen, by=by), "resume")

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
        limited = check_text(user_text(key), "the key of a limit")
        self._run(lambda tx: limits.set_limit(tx, scope, limited, concurrency=concurrency, rate=rate, by=by), "limit")

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
    def database(self) -> Database:
        """The open database; connects on first use."""
        return self.backend.database

    @property
    def hints(self) -> RqHints | None:
        """The sender of RQ hints; None in database mode."""
        return self.backend.hints

    def close(self) -> None:
        """Close the connections that this queue opened."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Callable[[Tx], _T], operation: str) -> _T:
        return self.database.run(work, operation=f"queue.{operation}")

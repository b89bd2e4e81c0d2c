"""The queue as a program sees it: handlers are registered, tasks are submitted, looked at, cancelled; queues are paused.

queue = TaskQueue(database="postgresql://headway@db/headway", redis="redis://localhost:6379/0")

@queue.handler("caption", timeout=300)
def caption(task, payload):
    task.progress(50, "half way")
    ...

task = queue.submit("caption", {"image": 7}, user_id="anna")
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from headway._sql import Database, Tx, connect
from headway.errors import InvalidInput
from headway.ids import check_id
from headway.queue import claims, intake, limits, records
from headway.queue.codec import PAYLOAD_LIMIT, Codec, FernetCodec, PlainCodec, fingerprint, write_payload
from headway.queue.values import NewTask, Priority, QueueInfo, Status, Task
from headway.retry import TASK
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.queue.rq import RqHints

log = Log("queue")

Isolation = Literal["fork", "none"]
#: rq and hybrid: workers hear of tasks through RQ, and from the rows where RQ does not know them. database: no Redis at
#: all. auto: rq where a Redis is named.
Mode = Literal["auto", "rq", "database", "hybrid"]
Context = Callable[[], AbstractContextManager[Any]]
HandlerFunction = Callable[[Any, Any], Any]  # (the running task, its payload) -> a result that is JSON
F = TypeVar("F", bound=HandlerFunction)


@dataclass(frozen=True, slots=True)
class Handler:
    """How tasks of one kind are run."""

    kind: str
    function: HandlerFunction
    timeout: float | None
    retries: int
    retry_delay: float
    isolation: Isolation


@dataclass(frozen=True, slots=True)
class Role:
    """What a submitter's role means for priority: what it gets by default, and the best it may ask for."""

    default: Priority
    best: Priority


#: 002's rules: administrators get high unless they say otherwise, users normal; only administrators may go before them.
ROLES: Mapping[str, Role] = {
    "admin": Role(Priority.HIGH, Priority.URGENT),
    "user": Role(Priority.NORMAL, Priority.NORMAL),
}


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
    ) -> None:
        """``context`` makes a context manager that is entered around every handler, in the process that runs it: an
        application context, a database session."""
        self._opening = threading.Lock()
        self._opened: Database | None = None
        self._url: str | None = None
        self._on_submit: Callable[[], object] | None = None
        self._hints: RqHints | None = None
        self.handlers: dict[str, Handler] = {}
        self._roles = roles
        self._new_id = new_id or _secure_id
        self._payload_limit = payload_limit
        self.context = context
        self.configure(database=database, redis=redis, mode=mode, per_user=per_user, keys=keys, codec=codec)

    def configure(
        self,
        *,
        database: str | Database,
        redis: str | None = None,
        mode: Mode = "auto",
        per_user: int | None = 1,
        keys: Sequence[str | bytes] = (),
        codec: Codec | None = None,
    ) -> None:
        """Say where the queue lives, for one that was made before that was known (an application factory)."""
        if self._hints is not None or (self._opened is not None and self._url is not None):
            raise InvalidInput(
                "The queue is in use already and cannot be moved.", hint="Configure it before its first use."
            )
        if per_user is not None and (type(per_user) is not int or not 1 <= per_user <= 10_000):
            raise InvalidInput(f"per_user={per_user!r} is no number of tasks.", hint="Use 1 to 10,000, or None.")
        if mode not in ("auto", "rq", "database", "hybrid"):
            raise InvalidInput(f"mode={mode!r} is not known.", hint="Use auto, rq, database or hybrid.")
        if mode in ("rq", "hybrid") and redis is None:
            raise InvalidInput(
                f"The mode {mode} needs a Redis.", hint="Give one: TaskQueue(redis='redis://localhost:6379/0')"
            )
        self.redis_url = None if mode == "database" else redis
        self._url = database if isinstance(database, str) else None
        self._opened = database if isinstance(database, Database) else None
        self._per_user = per_user
        self._codec = codec or (FernetCodec(keys) if keys else PlainCodec())

    @contextmanager
    def moved(self, *, database: str, on_submit: Callable[[], object] | None = None) -> Iterator[None]:
        """For tests: on another database, without Redis, calling ``on_submit`` after each submission; then as before."""
        before = (self._opened, self._url, self._hints, self.redis_url, self._on_submit)
        self._opened, self._url, self._hints, self.redis_url = connect(database), None, None, None
        self._on_submit = on_submit
        try:
            yield
        finally:
            self._opened.close()
            self._opened, self._url, self._hints, self.redis_url, self._on_submit = before

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
        check_id(kind, "a kind of task")
        if timeout is not None and not 0 < timeout <= 10**7:
            raise InvalidInput(f"timeout={timeout!r} is no number of seconds.", hint="Use seconds above 0, or None.")
        if type(retries) is not int or not 0 <= retries <= 1000:
            raise InvalidInput(f"retries={retries!r} is no number of retries.", hint="Use a whole number from 0.")
        if not 0 < retry_delay <= 10**6:
            raise InvalidInput(f"retry_delay={retry_delay!r} is no number of seconds.", hint="Use seconds above 0.")
        if isolation not in ("fork", "none"):
            raise InvalidInput(f"isolation={isolation!r} is not known.", hint="Use 'fork' or 'none'.")

        def register(function: F) -> F:
            if kind in self.handlers and self.handlers[kind].function is not function:
                raise InvalidInput(
                    f"There are two handlers for tasks of kind {kind!r}.", hint="Give each its own kind."
                )
            self.handlers[kind] = Handler(kind, function, timeout, retries, retry_delay, isolation)
            return function

        return register

    # ---- submitting --------------------------------------------------------------------------------------------------

    def submit(
        self,
        kind: str,
        payload: Any = None,
        *,
        user_id: str | None = None,
        role: str = "user",
        priority: Priority | str | None = None,
        maintenance: bool = False,
        id: str | None = None,
        partition: str | None = None,
        delay: float = 0.0,
    ) -> Task:
        """Accept a task. When this returns, the task is committed and is not lost whatever happens next.

        An ``id`` that exists gives the existing task if kind and payload are the same. Raises `UserBusy` when the user
        has an active task already.
        """
        new = self._new(
            kind, payload, user_id=user_id, role=role, priority=priority, maintenance=maintenance, id=id,
            partition=partition, delay=delay,
        )  # fmt: skip
        [task] = self._submit([new])
        return task

    def submit_many(self, tasks: Iterable[Mapping[str, Any]]) -> Sequence[Task]:
        """`submit` for many, each a mapping of its arguments: all of them are accepted, or none."""
        return self._submit([self._new(**task) for task in tasks])

    def _submit(self, tasks: Sequence[NewTask]) -> Sequence[Task]:
        if not tasks:
            return []
        hints = self.hints
        accepted = intake.submit(self.database, tasks, per_user=self._per_user, hinting=hints is not None)
        if hints is not None:
            # It is accepted: whatever happens to the hint, the task is not lost.
            new = [(task.id, task.priority) for task in accepted if task.version == 1]
            hinted = set(hints.push(new))
            missed = [task_id for task_id, _ in new if task_id not in hinted]
            if missed:
                self._run(lambda tx: claims.unhint(tx, missed), "unhint")
        if self._on_submit is not None:
            self._on_submit()
        return accepted

    def _new(
        self,
        kind: str,
        payload: Any = None,
        *,
        user_id: str | None = None,
        role: str = "user",
        priority: Priority | str | None = None,
        maintenance: bool = False,
        id: str | None = None,
        partition: str | None = None,
        delay: float = 0.0,
    ) -> NewTask:
        handler = self.handlers.get(kind)
        if handler is None:
            known = ", ".join(sorted(self.handlers)) or "none"
            raise InvalidInput(f"There is no handler for tasks of kind {kind!r} (there are: {known}).")
        if not 0 <= delay <= 10**9:
            raise InvalidInput(f"delay={delay!r} is no number of seconds.", hint="Use seconds from 0.")
        task_id = check_id(self._new_id() if id is None else id, "a task id")
        text = write_payload(payload, limit=self._payload_limit)
        return NewTask(
            id=task_id,
            kind=kind,
            priority=self._priority(priority, role, maintenance=maintenance),
            payload=self._codec.encode(task_id, text),
            fingerprint=fingerprint(kind, text),
            user_id=None if user_id is None else check_id(user_id, "a user id"),
            role=role,
            partition=None if partition is None else check_id(partition, "a partition key"),
            retries=handler.retries,
            retry_delay=handler.retry_delay,
            timeout=handler.timeout,
            delay=delay,
        )

    def _priority(self, asked: Priority | str | None, role: str, *, maintenance: bool) -> Priority:
        rule = self._roles.get(role)
        if rule is None:
            raise InvalidInput(f"There is no role {role!r}.", hint=f"Use one of {', '.join(sorted(self._roles))}.")
        if maintenance:
            asked = Priority.URGENT
        elif asked is None:
            return rule.default
        try:
            wanted = Priority(asked)
        except ValueError:
            log.warning("an unknown priority is taken as normal", reason=str(asked)[:40])
            wanted = Priority.NORMAL
        if wanted.place < rule.best.place:
            log.warning("a priority was lowered to what the role may have", reason=f"{role}: {wanted}", new=rule.best)
            return rule.best
        return wanted

    # ---- looking -----------------------------------------------------------------------------------------------------

    def get(self, id: str, *, user_id: str | None = None) -> Task:
        """One task, or `NotFound`; with ``user_id`` another user's task is as missing as one that never was."""
        with self.database.read() as tx:
            return records.get(tx, check_id(id, "a task id"), user_id=user_id)

    def list(
        self,
        *,
        status: Status | str | None = None,
        queue: Priority | str | None = None,
        kind: str | None = None,
        user_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[Task]:
        """The newest tasks that match; the next page with ``before`` set to the id of the last one."""
        if type(limit) is not int or not 1 <= limit <= 1000:
            raise InvalidInput(f"limit={limit!r} is no size of a page.", hint="Use 1 to 1,000.")
        with self.database.read() as tx:
            return records.listing(
                tx,
                status=None if status is None else _member(Status, status, "a status"),
                queue=None if queue is None else _member(Priority, queue, "a queue"),
                kind=kind,
                user_id=user_id,
                before=before,
                limit=limit,
            )

    def stats(self) -> Sequence[QueueInfo]:
        """The four queues, in the order of service."""
        with self.database.read() as tx:
            return records.queue_infos(tx)

    # ---- changing ----------------------------------------------------------------------------------------------------

    def cancel(self, id: str, *, by: str = "", user_id: str | None = None) -> Task:
        """Cancel a waiting task at once; a running one is told, and ended by its worker if it does not end itself."""
        check_id(id, "a task id")
        task = self._run(lambda tx: records.cancel(tx, id, by=by or user_id or "headway", user_id=user_id), "cancel")
        if task.is_final and self.hints is not None:
            self.hints.withdraw([(task.id, task.priority)])
        return task

    def retry(self, id: str) -> Task:
        """Give a failed or cancelled task another life."""
        check_id(id, "a task id")
        return self._run(lambda tx: records.retry(tx, id, per_user=self._per_user), "retry")

    def pause(self, queue: Priority | str, *, reason: str, by: str, until: datetime | None = None) -> None:
        """Hand out nothing more of a queue, from the next claim on. What runs goes on; submitting goes on."""
        chosen = _member(Priority, queue, "a queue")
        self._run(lambda tx: records.pause(tx, chosen, reason=reason, by=by, until=until), "pause")

    def resume(self, queue: Priority | str) -> bool:
        """Whether it had been paused."""
        chosen = _member(Priority, queue, "a queue")
        return self._run(lambda tx: records.resume(tx, chosen), "resume")

    def limit(self, scope: str, key: str = "*", *, concurrency: int | None = None, rate: float | None = None) -> None:
        """Bound how many run at once, or start per second; see `headway.queue.limits`. With neither: no bound."""
        self._run(lambda tx: limits.set_limit(tx, scope, key, concurrency=concurrency, rate=rate), "limit")

    # ---- the database ------------------------------------------------------------------------------------------------

    @property
    def hints(self) -> RqHints | None:
        """Who tells RQ of tasks; None in database mode."""
        if self._hints is None and self.redis_url is not None:
            from headway.queue.rq import RqHints

            with self._opening:
                if self._hints is None:
                    self._hints = RqHints(self.redis_url)
        return self._hints

    @property
    def database(self) -> Database:
        if self._opened is None:
            with self._opening:
                if self._opened is None:
                    assert self._url is not None
                    self._opened = connect(self._url)
        return self._opened

    def payload(self, id: str, stored: str) -> str:
        """A stored payload as JSON text, or an error if it was altered or is another task's."""
        return self._codec.decode(id, stored)

    def close(self) -> None:
        if self._hints is not None:
            self._hints.close()
            self._hints = None
        if self._opened is not None and self._url is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Callable[[Tx], _T], operation: str) -> _T:
        return self.database.run(work, operation=f"queue.{operation}")


_T = TypeVar("_T")
_E = TypeVar("_E", Status, Priority)


def _member(kind: type[_E], value: _E | str, what: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise InvalidInput(f"{str(value)[:40]!r} is not {what}.", hint=f"Use one of {known}.") from None


def _secure_id() -> str:
    return secrets.token_hex(16)

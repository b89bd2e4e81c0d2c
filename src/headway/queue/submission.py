"""Validate submitted tasks, insert their rows and send their RQ hints."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from headway._sql import is_two_phase, join
from headway.core.ids import UserId, check_id, check_user_id
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.queue.backend import Backend
from headway.queue.handlers import Handler
from headway.queue.payload import PAYLOAD_LIMIT, write_payload
from headway.queue.store import hints as hint_marks
from headway.queue.store import insert, task_store
from headway.queue.task import NewTask, Priority, Task, UserBusy, is_number, is_text
from headway.telemetry import Log

log = Log("queue")


@dataclass(frozen=True, slots=True)
class Role:
    """The priorities of a role: the one it gets by default, and the highest it may request."""

    default: Priority
    best: Priority


#: Administrators get high by default and may use urgent; users get normal at most.
ROLES: Mapping[str, Role] = {
    "admin": Role(Priority.HIGH, Priority.URGENT),
    "user": Role(Priority.NORMAL, Priority.NORMAL),
}


class Options(TypedDict, total=False):
    """The arguments of a submission besides kind and payload."""

    user_id: UserId | None  # None: the task counts towards no user's limit
    role: str  # "user" by default; decides which priorities may be requested
    priority: Priority | str | None
    maintenance: bool  # urgent; a role that is given must allow it
    id: str | None  # an existing id returns the existing task, if user, kind and payload are equal
    partition: UserId | None  # what takes turns and what limits count; the user by default
    delay: float  # seconds before it may run; until then it counts as an active task of its user


class Submitter:
    """Accepts tasks for one queue."""

    def __init__(
        self,
        backend: Backend,
        handlers: Callable[[], Mapping[str, Handler]],
        *,
        roles: Mapping[str, Role] = ROLES,
        new_id: Callable[[], str] | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        self._backend, self._handlers = backend, handlers
        self._roles, self._new_id, self._payload_limit = roles, new_id or _secure_id, payload_limit
        self.on_submit: Callable[[Sequence[Task]], object] | None = None  # called after each submission; for tests

    def new_task(self, kind: str, payload: Any = None, **options: Unpack[Options]) -> NewTask:
        """Check and encode a task without submitting it. Raises `InvalidInput`."""
        if unknown := sorted(options.keys() - Options.__annotations__.keys()):
            raise InvalidInput(
                f"A task has no {unknown[0]!r}.", hint=f"Use kind, payload, {', '.join(Options.__annotations__)}."
            )
        handlers = self._handlers()
        handler = handlers.get(kind) if is_text(kind) else None
        if handler is None:
            known = ", ".join(sorted(handlers)) or "none"
            raise InvalidInput(f"There is no handler for tasks of kind {kind!r} (registered: {known}).")
        id, user_id, partition = options.get("id"), options.get("user_id"), options.get("partition")
        role, delay = options.get("role", "user"), options.get("delay", 0.0)
        if not is_number(delay) or not 0 <= delay <= 10**9:
            raise InvalidInput(f"delay must be seconds from 0 to 1,000,000,000 (got {delay!r}).")
        task_id = check_id(self._new_id() if id is None else id, "a task id")
        text = write_payload(payload, limit=self._payload_limit)
        codec = self._backend.codec
        return NewTask(
            id=task_id, kind=kind, priority=self._priority(options), payload=codec.encode(task_id, text),
            fingerprints=codec.fingerprints(task_id, kind, text),
            user_id=None if user_id is None else check_user_id(user_id), role=role,
            partition=None if partition is None else check_user_id(partition, "a partition key"),
            retries=handler.retries, retry_delay=handler.retry_delay, timeout=handler.timeout, delay=delay,
        )  # fmt: skip

    def _priority(self, options: Options) -> Priority:
        """Return the requested priority, lowered to what the role allows."""
        requested, maintenance = options.get("priority"), options.get("maintenance", False)
        if maintenance and "role" not in options:
            return Priority.URGENT  # the application itself submits, so no role applies
        role = options.get("role", "user")
        allowed = self._roles.get(role) if is_text(role) else None
        if allowed is None:
            raise InvalidInput(f"role must be one of {', '.join(sorted(self._roles))} (got {role!r}).")
        if maintenance:
            requested = Priority.URGENT
        elif requested is None:
            return allowed.default
        try:
            priority = Priority(requested)
        except ValueError:
            log.warning("a task has an unknown priority; it gets normal", reason=str(requested)[:40])
            priority = Priority.NORMAL
        if priority.place < allowed.best.place:
            log.warning("a priority is lowered to what the role allows", reason=f"{role}: {priority}", new=allowed.best)
            return allowed.best
        return priority

    def submit(self, tasks: Sequence[NewTask], connection: object, *, check_user: bool = False) -> Sequence[Task]:
        """Accept tasks, all or none; see `TaskQueue.submit`.

        ``check_user``: first check in Redis whether the user already has an active task.
        """
        if not tasks:
            return []
        try:
            if connection is not None and not self._backend.is_moved:
                return self._insert_joined(tasks, connection)
            accepted = self._insert(tasks, check_user=check_user)
        except StorageError as error:
            what = f"Task {tasks[0].id} was not accepted" if len(tasks) == 1 else "The tasks were not accepted"
            if refused := insert.legacy_refusal(error, what, self._backend.per_user):
                raise refused from None
            raise
        if self.on_submit is not None:
            self.on_submit(accepted)
        return accepted

    def _insert(self, tasks: Sequence[NewTask], *, check_user: bool) -> Sequence[Task]:
        backend = self._backend
        hints = backend.hints
        user_id = tasks[0].user_id if check_user else None
        user_keys = backend.user_keys if user_id is not None else None
        if user_keys is not None and user_id is not None:
            user_keys.check(backend.database, user_id)
        try:
            backend.declare_per_user()
            accepted = insert.submit_alone(backend.database, tasks, per_user=backend.per_user, hinted=hints is not None)
        except UserBusy as refused:
            if user_keys is not None and user_id is not None:
                user_keys.remember(user_id, refused.task_id)
            raise
        if hints is not None:
            self._send_hints(accepted)
        return accepted

    def _send_hints(self, accepted: Sequence[Task]) -> None:
        """Tell RQ of new tasks. They are committed: if this fails, the sweeper sends the hints later."""
        hints, user_keys = self._backend.hints, self._backend.user_keys
        new = [(task.id, task.priority) for task in accepted if task.version == 1 and task.run_at <= task.created_at]
        sent = set[str]()
        if hints is not None:
            sent.update(hints.push(new, user_keys=user_keys.keys_of(accepted) if user_keys is not None else ()))
        missed = [task_id for task_id, _ in new if task_id not in sent]
        if missed:
            try:
                self._backend.database.run(lambda tx: hint_marks.unhint(tx, missed), operation="queue.unhint")
            except HeadwayError as error:
                log.warning("a missing hint could not be noted; the sweeper finds it later", error=str(error))

    def _insert_joined(self, tasks: Sequence[NewTask], connection: object) -> list[Task]:
        """Insert tasks in the caller's transaction.

        No RQ hint is sent, because only the caller knows when it commits. The sweeper sends it later, and idle workers poll
        for such rows. In database mode the commit itself notifies workers.
        """
        with join(self._backend.database, connection) as tx:
            # A counter share for this connection alone, because its transaction may last long.
            return insert.submit(
                tx, tasks, per_user=self._backend.per_user, share=task_store(tx).counter_share(tx),
                notify=not is_two_phase(connection),
            )  # fmt: skip


def _secure_id() -> str:
    return secrets.token_hex(16)

"""What a submission may say: who asks, in which role, for which priority; checked before anything is written."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from headway.core.ids import UserId, check_id, check_user_id
from headway.errors import InvalidInput
from headway.queue.handlers import Handler
from headway.queue.payload import PAYLOAD_LIMIT, Codec, write_payload
from headway.queue.task import NewTask, Priority, is_number, is_text
from headway.telemetry import Log

log = Log("queue")


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


class Options(TypedDict, total=False):
    """What a submission may say besides kind and payload."""

    user_id: UserId | None  # who asks; none: no user's limit counts the task
    role: str  # "user" by default; decides which priorities may be asked for
    priority: Priority | str | None
    maintenance: bool  # urgent; a role that is given must allow it
    id: str | None  # one that exists gives the existing task, if user, kind and payload are the same
    partition: UserId | None  # who takes turns with whom, and what limits count; the user unless said otherwise
    delay: float  # seconds before it may run; until then it counts as an active task of its user


class Submissions:
    """Makes tasks of what is submitted to one queue: the rules by which they are checked."""

    def __init__(
        self,
        *,
        roles: Mapping[str, Role] = ROLES,
        new_id: Callable[[], str] | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        self._roles, self._new_id, self._payload_limit = roles, new_id or _secure_id, payload_limit

    def new(
        self, handlers: Mapping[str, Handler], codec: Codec, kind: str, payload: Any = None, **options: Unpack[Options]
    ) -> NewTask:
        """A task to submit, its payload as ``codec`` writes it; `InvalidInput` for what cannot be one."""
        if unknown := sorted(options.keys() - Options.__annotations__.keys()):
            raise InvalidInput(
                f"A task has no {unknown[0]!r}.", hint=f"There are kind, payload, {', '.join(Options.__annotations__)}."
            )
        handler = handlers.get(kind) if is_text(kind) else None
        if handler is None:
            known = ", ".join(sorted(handlers)) or "none"
            raise InvalidInput(f"There is no handler for tasks of kind {kind!r} (there are: {known}).")
        id, user_id, partition = options.get("id"), options.get("user_id"), options.get("partition")
        role, delay = options.get("role", "user"), options.get("delay", 0.0)
        # Without a role it is the application itself that asks, and no user's rule applies.
        own_maintenance = "role" not in options and options.get("maintenance", False)
        if not is_number(delay) or not 0 <= delay <= 10**9:
            raise InvalidInput(f"delay={delay!r} is no number of seconds.", hint="Use seconds from 0.")
        task_id = check_id(self._new_id() if id is None else id, "a task id")
        text = write_payload(payload, limit=self._payload_limit)
        return NewTask(
            id=task_id,
            kind=kind,
            priority=Priority.URGENT
            if own_maintenance
            else self._priority(options.get("priority"), role, maintenance=options.get("maintenance", False)),
            payload=codec.encode(task_id, text),
            fingerprints=codec.fingerprints(task_id, kind, text),
            user_id=None if user_id is None else check_user_id(user_id),
            role=role,
            partition=None if partition is None else check_user_id(partition, "a partition key"),
            retries=handler.retries,
            retry_delay=handler.retry_delay,
            timeout=handler.timeout,
            delay=delay,
        )

    def _priority(self, asked: Priority | str | None, role: str, *, maintenance: bool) -> Priority:
        rule = self._roles.get(role) if is_text(role) else None
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


def _secure_id() -> str:
    return secrets.token_hex(16)

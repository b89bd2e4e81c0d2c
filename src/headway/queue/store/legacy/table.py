"""The mapping of an application's own task table: which columns hold a task, and which words its status column uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.errors import InvalidInput
from headway.queue.task import FINAL, Priority, Status

_WORDS = {
    Status.QUEUED: "RUNNING",
    Status.RUNNING: "RUNNING",
    Status.COMPLETED: "COMPLETED",
    Status.FAILED: "FAILED",
    Status.CANCELLED: "CANCELLED",
}


@dataclass(frozen=True, slots=True)
class LegacyTable:
    """Which columns of an existing table hold a task, and which words its status column uses.

    Every name is a column, except ``table``, ``kind`` and ``queued``. ``table`` may have a schema: ``public.captions``.
    """

    table: str
    id: str
    status: str
    user_id: str | None = None
    payload: str | tuple[str, ...] | None = None  # one column with JSON, or several that become an object
    kind: str | None = None  # the kind of every row; or else:
    kind_column: str | None = None
    priority: str | None = None
    role: str | None = None
    error: str | None = None  # receives the error of the last run
    percent: str | None = None  # receives the progress
    #: The word of a row that old workers may claim.
    queued: str = "QUEUED"
    #: The word for each status of a task. QUEUED is an adopted row that waits: old workers must not claim it.
    words: Mapping[Status | str, str] = field(default_factory=dict)
    #: Priority words of the table that are not urgent, high, normal or low.
    priorities: Mapping[str, Priority | str] = field(default_factory=dict)

    def word(self, status: Status) -> str:
        """Return the table's word for a status."""
        return self.words.get(status, _WORDS[status])

    @property
    def payload_columns(self) -> tuple[str, ...]:
        """The columns that the payload is made of."""
        return (self.payload,) if isinstance(self.payload, str) else self.payload or ()

    @property
    def columns(self) -> dict[str, str]:
        """The mapped columns, by what each of them holds."""
        named = ("id", "status", "user_id", "kind_column", "priority", "role", "error", "percent")
        found = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return found | {f"payload {column}": column for column in self.payload_columns}

    @property
    def trigger(self) -> str:
        """The name of the triggers in the database."""
        return f"headway_legacy_{hashlib.blake2b(self.table.encode(), digest_size=6).hexdigest()}"

    def check(self) -> None:
        """Raise `InvalidInput` for a mapping that cannot work."""
        if (self.kind is None) == (self.kind_column is None):
            raise InvalidInput("A LegacyTable needs kind= (for all rows) or kind_column=, not both.")
        unknown = [name for name in self.words if name not in list(Status)]
        if unknown:
            raise InvalidInput(f"words has no status {unknown[0]!r}.", hint=f"Use {', '.join(Status)}.")
        for status in Status:
            if self.word(status) == self.queued:
                raise InvalidInput(
                    f"The word for {status.value} is {self.queued!r}: old workers would claim a row that Headway runs.",
                    hint=f"Give it another word: words={{'{status.value}': ...}}",
                )
        for priority in self.priorities.values():
            if priority not in list(Priority):
                raise InvalidInput(f"{priority!r} is not a priority.", hint=f"Use {', '.join(Priority)}.")


# ---------------------------------------------------------------------------------------------------------------------
# Tables of the application


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the database knows it: its name for SQL, and the type of each column."""

    sql: str
    types: Mapping[str, str]

    def column(self, name: str) -> str:
        """Return the quoted name of a column. Raises `InvalidInput` if there is none."""
        if name not in self.types:
            raise InvalidInput(f"The table {self.sql} has no column {name!r}.", hint=f"It has {', '.join(self.types)}.")
        return quoted(name)


def quoted(name: str) -> str:
    """Quote an identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Quote a text for DDL, which takes no parameters."""
    if "\0" in text or "\\" in text:
        raise InvalidInput(f"A word of the status column must not contain a backslash or U+0000 (got {text!r}).")
    return "'" + text.replace("'", "''") + "'"


def word_of(legacy: LegacyTable, status: str) -> str:
    """Return the legacy word for a status, as an SQL expression.

    It is in parentheses, because plpgsql ends a condition at THEN.
    """
    cases = " ".join(f"WHEN '{one.value}' THEN {literal(legacy.word(one))}" for one in Status)
    return f"(CASE {status} {cases} END)"


def active_words(legacy: LegacyTable, *more: str) -> str:
    """Return the words of active tasks, and ``more``, as an SQL list."""
    words = {legacy.word(Status.RUNNING), legacy.word(Status.QUEUED), *more}
    return ", ".join(map(literal, sorted(words)))


def changes_of(legacy: LegacyTable, table: Table, status: str) -> str:
    """Return the SET list that copies a task (``NEW``) to its row; ``status`` is an expression."""
    copied = [
        f"{table.column(column)} = NEW.{name}" for name in ("error", "percent") if (column := getattr(legacy, name))
    ]
    return ", ".join([f"{table.column(legacy.status)} = {status}", *copied])


def active_counts(
    legacy: LegacyTable, table: Table, *, schema: str, user: str, value: str, own_row: str
) -> tuple[str, str]:
    """Return two counts of a user's active work as SQL: rows that have no task yet, and tasks.

    A waiting row counts too, unless the submitted task is itself a row (``own_row``): the user's other rows wait to be
    adopted one after the other.
    """
    assert legacy.user_id is not None
    status = f"CAST(l.{table.column(legacy.status)} AS TEXT)"
    rows = (
        f"(SELECT count(*) FROM {table.sql} l WHERE l.{table.column(legacy.user_id)} = {value} "
        f"AND ({status} IN ({active_words(legacy)}) "
        f"OR ({status} = {literal(legacy.queued)} AND NOT ({own_row}))) AND NOT EXISTS (SELECT 1 FROM {schema}tasks t "
        f"WHERE t.id = CAST(l.{table.column(legacy.id)} AS TEXT) AND t.status IN ('QUEUED', 'RUNNING')))"
    )
    tasks = (
        f"(SELECT count(*) FROM {schema}tasks t WHERE t.user_id = {user} AND t.slot IS NOT NULL "
        "AND t.status IN ('QUEUED', 'RUNNING'))"
    )
    return rows, tasks


def allowed_tasks(schema: str) -> str:
    """Return the limit that the application declared, as an SQL expression. A task without a slot has no limit."""
    return (
        f"coalesce((SELECT CAST(value AS INTEGER) FROM {schema}task_settings WHERE name = 'app.per_user' "
        "AND value <> 'none'), 1)"
    )


#: The final statuses as an SQL list.
FINAL_STATUSES = ", ".join(f"'{status.value}'" for status in FINAL)

"""An application's own task table whose rows follow their tasks.

The table is in the queue's own database. Triggers on ``tasks`` update the row inside the transaction that changes the task,
so that the two cannot disagree, whichever process or statement made the change. The same triggers count both kinds of task
for the user's limit. `headway.queue.migration` moves tasks between the two tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway._sql import Database, Tx
from headway.errors import InvalidInput
from headway.queue import settings
from headway.queue.store.insert import LEGACY_BUSY, LEGACY_TAKEN
from headway.queue.task import FINAL, Priority, Status
from headway.queue.task_queue import TaskQueue

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
    #: The word of a row that old workers may take.
    queued: str = "QUEUED"
    #: The word for each status of a task. QUEUED is a row that was adopted and waits: old workers must not take this word.
    words: Mapping[Status | str, str] = field(default_factory=dict)
    #: Priority words of the table that are not urgent, high, normal or low.
    priorities: Mapping[str, Priority | str] = field(default_factory=dict)

    def word(self, status: Status) -> str:
        return self.words.get(status, _WORDS[status])

    @property
    def payload_columns(self) -> tuple[str, ...]:
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
                    f"The word for {status.value} is {self.queued!r}: old workers would take a row that Headway runs.",
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
        """The quoted name of a column; `InvalidInput` if there is none."""
        if name not in self.types:
            raise InvalidInput(f"The table {self.sql} has no column {name!r}.", hint=f"It has {', '.join(self.types)}.")
        return quoted(name)


def find_table(database: Database, name: str) -> Table:
    """Look a table up; ``name`` may have a schema."""
    parts = str(name).split(".")
    if not 1 <= len(parts) <= 2 or not all(part.isidentifier() for part in parts):
        raise InvalidInput(f"{name!r} is not the name of a table.", hint="Use table or schema.table.")
    if database.engine == "sqlite":
        schema = parts[0] if len(parts) == 2 else "main"
        rows = database.all("SELECT name, type FROM pragma_table_info(?, ?)", (parts[-1], schema))
        found = Table(quoted(parts[-1]) if schema == "main" else f"{schema}.{quoted(parts[-1])}", dict(rows))
    else:
        rows = database.all(
            "SELECT attname, format_type(atttypid, -1), "
            "(SELECT format('%I.%I', nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE c.oid = attrelid) FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 "
            "AND NOT attisdropped ORDER BY attnum",
            (name,),
        )
        found = Table(str(rows[0][2]) if rows else name, {column: kind for column, kind, _ in rows})
    if not found.types:
        raise InvalidInput(f"There is no table {name!r} in {database.name}.")
    return found


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    """A text inside DDL, which takes no parameters."""
    if "\0" in text or "\\" in text:
        raise InvalidInput(f"{text!r} cannot be a word of the status column.")
    return "'" + text.replace("'", "''") + "'"


# ---------------------------------------------------------------------------------------------------------------------
# Following


def follow(queue: TaskQueue, legacy: LegacyTable) -> None:
    """Install the triggers. Calling it again replaces them, for example after the mapping changed.

    The database role needs the right to create triggers on both tables; workers need UPDATE on the legacy table.
    """
    table = check_table(queue.database, legacy)
    make = _sqlite_triggers if queue.database.engine == "sqlite" else _postgresql_triggers
    statements = make(legacy, table)

    def work(tx: Tx) -> None:
        settings.declare_per_user(tx, queue.per_user)
        for statement in (*_drop(tx.engine, legacy, table), *statements):
            tx.execute(statement)

    queue.database.run(work, operation="queue.follow")


def unfollow(queue: TaskQueue, legacy: LegacyTable) -> None:
    """Remove the triggers; refused while a row of the table has an active task."""
    table = check_table(queue.database, legacy)

    def work(tx: Tx) -> None:
        row = tx.one(
            f"SELECT t.id FROM tasks t JOIN {table.sql} l ON CAST(l.{table.column(legacy.id)} AS TEXT) = t.id "
            "WHERE t.status IN ('QUEUED', 'RUNNING') LIMIT 1"
        )
        if row is not None:
            raise InvalidInput(
                f"Task {row[0]} of {legacy.table} is still active: its row would no longer follow it.",
                hint="Wait until it has ended, or return it: release(queue, legacy).",
            )
        for statement in _drop(tx.engine, legacy, table):
            tx.execute(statement)

    queue.database.run(work, operation="queue.follow")


def is_followed(database: Database, legacy: LegacyTable) -> bool:
    """Return whether the triggers of this table are installed."""
    names = (
        "sqlite_master WHERE type = 'trigger' AND name" if database.engine == "sqlite" else "pg_trigger WHERE tgname"
    )
    return database.one(f"SELECT 1 FROM {names} = ?", (f"{legacy.trigger}_insert",)) is not None


def check_table(database: Database, legacy: LegacyTable) -> Table:
    """Look up the table of a mapping; `InvalidInput` for a mapping that does not fit it."""
    legacy.check()
    table = find_table(database, legacy.table)
    if database.engine == "sqlite" and "." in table.sql:
        raise InvalidInput(f"{legacy.table} is not in the main database.", hint="Name a table of the queue's own file.")
    for column in legacy.columns.values():
        table.column(column)
    return table


def _drop(engine: str, legacy: LegacyTable, table: Table) -> list[str]:
    name = legacy.trigger
    if engine == "sqlite":
        return [f"DROP TRIGGER IF EXISTS {name}_{part}" for part in ("insert", "update", "legacy")]
    return [
        f"DROP TRIGGER IF EXISTS {name}_insert ON headway.tasks",
        f"DROP TRIGGER IF EXISTS {name}_update ON headway.tasks",
        f"DROP TRIGGER IF EXISTS {name}_legacy ON {table.sql}",
        f"DROP FUNCTION IF EXISTS headway.{name}()",
        f"DROP FUNCTION IF EXISTS headway.{name}_legacy()",
    ]


def _word_of(legacy: LegacyTable, status: str) -> str:
    """The legacy word for a status, as an SQL expression; in parentheses, because plpgsql ends a condition at THEN."""
    cases = " ".join(f"WHEN '{one.value}' THEN {_literal(legacy.word(one))}" for one in Status)
    return f"(CASE {status} {cases} END)"


def _active_words(legacy: LegacyTable) -> list[str]:
    return [*{legacy.word(Status.RUNNING), legacy.word(Status.QUEUED)}]


_OVER = ", ".join(f"'{status.value}'" for status in FINAL)
#: The limit that the application declared; a task without a slot has none.
_ALLOWED = (
    "coalesce((SELECT CAST(value AS INTEGER) FROM {schema}task_settings WHERE name = 'app.per_user' "
    "AND value <> 'none'), 1)"
)


def _counts(legacy: LegacyTable, table: Table, *, schema: str, user: str, value: str, own_row: str) -> tuple[str, str]:
    """Two counts of a user's active work as SQL: rows that are no task yet, and tasks.

    A row that waits counts too, unless the task that is submitted is itself a row (``own_row``): its sisters wait to be
    adopted one after the other.
    """
    assert legacy.user_id is not None
    running = ", ".join(map(_literal, sorted(_active_words(legacy))))
    status = f"CAST(l.{table.column(legacy.status)} AS TEXT)"
    rows = (
        f"(SELECT count(*) FROM {table.sql} l WHERE l.{table.column(legacy.user_id)} = {value} AND ({status} IN ({running}) "
        f"OR ({status} = {_literal(legacy.queued)} AND NOT ({own_row}))) AND NOT EXISTS (SELECT 1 FROM {schema}tasks t "
        f"WHERE t.id = CAST(l.{table.column(legacy.id)} AS TEXT) AND t.status IN ('QUEUED', 'RUNNING')))"
    )
    tasks = (
        f"(SELECT count(*) FROM {schema}tasks t WHERE t.user_id = {user} AND t.slot IS NOT NULL "
        "AND t.status IN ('QUEUED', 'RUNNING'))"
    )
    return rows, tasks


def _sqlite_triggers(legacy: LegacyTable, table: Table) -> list[str]:
    id, status = table.column(legacy.id), table.column(legacy.status)
    sets = [f"{status} = {_word_of(legacy, 'NEW.status')}"]
    sets += [
        f"{table.column(column)} = NEW.{name}" for name in ("error", "percent") if (column := getattr(legacy, name))
    ]
    update = f"UPDATE {table.sql} SET {', '.join(sets)} WHERE {id} = NEW.id;"
    begins = {"insert": "1", "update": f"OLD.status IN ({_OVER}) AND NEW.status = 'QUEUED'"}
    before = {
        "insert": _literal(legacy.queued),
        "update": f"{_literal(legacy.queued)}, {_word_of(legacy, 'OLD.status')}",
    }
    made = []
    for event, begin in begins.items():
        refuse = (
            f"SELECT RAISE(ABORT, {_literal(f'{LEGACY_TAKEN}: {legacy.table}')}) WHERE {begin} AND EXISTS "
            f"(SELECT 1 FROM {table.sql} l WHERE l.{id} = NEW.id AND CAST(l.{status} AS TEXT) NOT IN ({before[event]}));"
        )
        if legacy.user_id is not None:
            own_row = f"EXISTS (SELECT 1 FROM {table.sql} o WHERE o.{id} = NEW.id)"
            rows, tasks = _counts(legacy, table, schema="", user="NEW.user_id", value="NEW.user_id", own_row=own_row)
            refuse += (
                f"SELECT RAISE(ABORT, {_literal(f'{LEGACY_BUSY}: {legacy.table}')}) WHERE {begin} AND NEW.slot IS NOT NULL "
                f"AND {rows} > 0 AND {rows} + {tasks} > {_ALLOWED.format(schema='')};"
            )
        when = (
            "INSERT ON tasks BEGIN"
            if event == "insert"
            else "UPDATE OF status, percent ON tasks WHEN NEW.status <> OLD.status OR NEW.percent <> OLD.percent BEGIN"
        )
        made.append(f"CREATE TRIGGER {legacy.trigger}_{event} AFTER {when} {refuse} {update} END")
    if legacy.user_id is not None:
        user = f"NEW.{table.column(legacy.user_id)}"
        rows, tasks = _counts(legacy, table, schema="", user=f"CAST({user} AS TEXT)", value=user, own_row="0")
        active = ", ".join(map(_literal, sorted({*_active_words(legacy), legacy.queued})))
        made.append(
            f"CREATE TRIGGER {legacy.trigger}_legacy AFTER INSERT ON {table.sql} WHEN CAST(NEW.{status} AS TEXT) IN ({active}) "
            f"BEGIN SELECT RAISE(ABORT, {_literal(f'{LEGACY_BUSY}: the user has a task in Headway')}) WHERE {tasks} > 0 "
            f"AND {rows} + {tasks} > {_ALLOWED.format(schema='')}; END"
        )
    return made


def _postgresql_triggers(legacy: LegacyTable, table: Table) -> list[str]:
    id, status = table.column(legacy.id), table.column(legacy.status)
    sets = [f"{status} = CAST({_word_of(legacy, 'NEW.status')} AS {table.types[legacy.status]})"]
    sets += [
        f"{table.column(column)} = NEW.{name}" for name in ("error", "percent") if (column := getattr(legacy, name))
    ]
    user_type = "text" if legacy.user_id is None else table.types[legacy.user_id]
    busy = ""
    if legacy.user_id is not None:
        rows, tasks = _counts(
            legacy, table, schema="headway.", user="NEW.user_id", value="member", own_row="word IS NOT NULL"
        )
        busy = f"""
        IF NEW.slot IS NOT NULL THEN
            BEGIN member := CAST(NEW.user_id AS {user_type}); EXCEPTION WHEN data_exception THEN member := NULL; END;
            PERFORM pg_advisory_xact_lock(hashtext('headway legacy'), hashtext(NEW.user_id));
            others := {rows};
            IF others > 0 AND others + {tasks} > {_ALLOWED.format(schema="headway.")} THEN
                RAISE EXCEPTION USING ERRCODE = '23000', MESSAGE = {_literal(f"{LEGACY_BUSY}: {legacy.table}")};
            END IF;
        END IF;"""
    made = [
        f"""
CREATE FUNCTION headway.{legacy.trigger}() RETURNS trigger LANGUAGE plpgsql AS $headway$
DECLARE key {table.types[legacy.id]}; member {user_type}; word text; others bigint; begins boolean;
BEGIN
    BEGIN key := CAST(NEW.id AS {table.types[legacy.id]}); EXCEPTION WHEN data_exception THEN key := NULL; END;
    begins := TG_OP = 'INSERT';
    IF NOT begins THEN begins := OLD.status IN ({_OVER}) AND NEW.status = 'QUEUED'; END IF;
    IF begins THEN
        SELECT CAST(l.{status} AS text) INTO word FROM {table.sql} l WHERE l.{id} = key FOR UPDATE;
        IF word <> {_literal(legacy.queued)} THEN
            IF TG_OP = 'INSERT' OR word <> {_word_of(legacy, "OLD.status")} THEN
                RAISE EXCEPTION USING ERRCODE = '23000', MESSAGE = {_literal(f"{LEGACY_TAKEN}: {legacy.table}")};
            END IF;
        END IF;{busy}
    END IF;
    UPDATE {table.sql} SET {", ".join(sets)} WHERE {id} = key;
    RETURN NULL;
END $headway$""",
        f"""
CREATE TRIGGER {legacy.trigger}_insert AFTER INSERT ON headway.tasks
FOR EACH ROW EXECUTE FUNCTION headway.{legacy.trigger}()""",
        f"""
CREATE TRIGGER {legacy.trigger}_update AFTER UPDATE OF status, percent ON headway.tasks
FOR EACH ROW WHEN (NEW.status <> OLD.status OR NEW.percent <> OLD.percent)
EXECUTE FUNCTION headway.{legacy.trigger}()""",
    ]
    if legacy.user_id is not None:
        user = f"NEW.{table.column(legacy.user_id)}"
        rows, tasks = _counts(
            legacy, table, schema="headway.", user=f"CAST({user} AS text)", value=user, own_row="false"
        )
        active = ", ".join(map(_literal, sorted({*_active_words(legacy), legacy.queued})))
        made += [
            f"""
CREATE FUNCTION headway.{legacy.trigger}_legacy() RETURNS trigger LANGUAGE plpgsql AS $headway$
DECLARE others bigint;
BEGIN
    IF CAST(NEW.{status} AS text) IN ({active}) AND {user} IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('headway legacy'), hashtext(CAST({user} AS text)));
        others := {tasks};
        IF others > 0 AND others + {rows} > {_ALLOWED.format(schema="headway.")} THEN
            RAISE EXCEPTION USING ERRCODE = '23000',
                MESSAGE = {_literal(f"{LEGACY_BUSY}: the user has a task in Headway")};
        END IF;
    END IF;
    RETURN NULL;
END $headway$""",
            f"""
CREATE TRIGGER {legacy.trigger}_legacy AFTER INSERT ON {table.sql}
FOR EACH ROW EXECUTE FUNCTION headway.{legacy.trigger}_legacy()""",
        ]
    return made

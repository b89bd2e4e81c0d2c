"""Triggers of a legacy table on PostgreSQL."""

from __future__ import annotations

from headway._sql import Database
from headway.queue.store.insert import LEGACY_BUSY, LEGACY_TAKEN
from headway.queue.store.legacy.table import (
    FINAL_STATUSES,
    LegacyTable,
    Table,
    active_counts,
    active_words,
    allowed_tasks,
    changes_of,
    literal,
    word_of,
)

IS_INSTALLED = "SELECT 1 FROM pg_trigger WHERE tgname = ?"

_TABLE = """
SELECT attname, format_type(atttypid, -1),
    (SELECT format('%I.%I', nspname, relname) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
     WHERE c.oid = attrelid)
FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""


def find_table(database: Database, schema: str | None, name: str) -> Table:
    """Look up a table; it has no columns if it does not exist."""
    rows = database.all(_TABLE, (name if schema is None else f"{schema}.{name}",))
    return Table(str(rows[0][2]) if rows else name, {column: kind for column, kind, _ in rows})


def check_table(_legacy: LegacyTable, _table: Table) -> None:
    """Accept a table of any schema."""


def drop_statements(legacy: LegacyTable, table: Table) -> list[str]:
    """Return the statements that remove the triggers and their functions."""
    name = legacy.trigger
    return [
        f"DROP TRIGGER IF EXISTS {name}_insert ON headway.tasks",
        f"DROP TRIGGER IF EXISTS {name}_update ON headway.tasks",
        f"DROP TRIGGER IF EXISTS {name}_legacy ON {table.sql}",
        f"DROP FUNCTION IF EXISTS headway.{name}()",
        f"DROP FUNCTION IF EXISTS headway.{name}_legacy()",
    ]


def create_statements(legacy: LegacyTable, table: Table) -> list[str]:
    """Return the statements that create the triggers and their functions."""
    name = legacy.trigger
    statements = [
        _follow_function(legacy, table),
        f"""
CREATE TRIGGER {name}_insert AFTER INSERT ON headway.tasks
FOR EACH ROW EXECUTE FUNCTION headway.{name}()""",
        f"""
CREATE TRIGGER {name}_update AFTER UPDATE OF status, percent ON headway.tasks
FOR EACH ROW WHEN (NEW.status <> OLD.status OR NEW.percent <> OLD.percent)
EXECUTE FUNCTION headway.{name}()""",
    ]
    if legacy.user_id is not None:
        statements += [
            _refuse_rows_function(legacy, table),
            f"""
CREATE TRIGGER {name}_legacy AFTER INSERT ON {table.sql}
FOR EACH ROW EXECUTE FUNCTION headway.{name}_legacy()""",
        ]
    return statements


def _follow_function(legacy: LegacyTable, table: Table) -> str:
    """Return the function that checks and updates the row of a task."""
    id, status = table.column(legacy.id), table.column(legacy.status)
    user_type = "text" if legacy.user_id is None else table.types[legacy.user_id]
    changes = changes_of(legacy, table, f"CAST({word_of(legacy, 'NEW.status')} AS {table.types[legacy.status]})")
    return f"""
CREATE FUNCTION headway.{legacy.trigger}() RETURNS trigger LANGUAGE plpgsql AS $headway$
DECLARE key {table.types[legacy.id]}; member {user_type}; word text; others bigint; begins boolean;
BEGIN
    BEGIN key := CAST(NEW.id AS {table.types[legacy.id]}); EXCEPTION WHEN data_exception THEN key := NULL; END;
    begins := TG_OP = 'INSERT';
    IF NOT begins THEN begins := OLD.status IN ({FINAL_STATUSES}) AND NEW.status = 'QUEUED'; END IF;
    IF begins THEN
        SELECT CAST(l.{status} AS text) INTO word FROM {table.sql} l WHERE l.{id} = key FOR UPDATE;
        IF word <> {literal(legacy.queued)} THEN
            IF TG_OP = 'INSERT' OR word <> {word_of(legacy, "OLD.status")} THEN
                RAISE EXCEPTION USING ERRCODE = '23000', MESSAGE = {literal(f"{LEGACY_TAKEN}: {legacy.table}")};
            END IF;
        END IF;{_refuse_task(legacy, table, user_type)}
    END IF;
    UPDATE {table.sql} SET {changes} WHERE {id} = key;
    RETURN NULL;
END $headway$"""


def _refuse_task(legacy: LegacyTable, table: Table, user_type: str) -> str:
    """Return the part of the function that refuses a task of a user with too many active rows."""
    if legacy.user_id is None:
        return ""
    rows, tasks = active_counts(
        legacy, table, schema="headway.", user="NEW.user_id", value="member", own_row="word IS NOT NULL"
    )
    return f"""
        IF NEW.slot IS NOT NULL THEN
            BEGIN member := CAST(NEW.user_id AS {user_type}); EXCEPTION WHEN data_exception THEN member := NULL; END;
            PERFORM pg_advisory_xact_lock(hashtext('headway legacy'), hashtext(NEW.user_id));
            others := {rows};
            IF others > 0 AND others + {tasks} > {allowed_tasks("headway.")} THEN
                RAISE EXCEPTION USING ERRCODE = '23000', MESSAGE = {literal(f"{LEGACY_BUSY}: {legacy.table}")};
            END IF;
        END IF;"""


def _refuse_rows_function(legacy: LegacyTable, table: Table) -> str:
    """Return the function that refuses a new row of a user with too many active tasks."""
    assert legacy.user_id is not None
    status, user = table.column(legacy.status), f"NEW.{table.column(legacy.user_id)}"
    rows, tasks = active_counts(
        legacy, table, schema="headway.", user=f"CAST({user} AS text)", value=user, own_row="false"
    )
    return f"""
CREATE FUNCTION headway.{legacy.trigger}_legacy() RETURNS trigger LANGUAGE plpgsql AS $headway$
DECLARE others bigint;
BEGIN
    IF CAST(NEW.{status} AS text) IN ({active_words(legacy, legacy.queued)}) AND {user} IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock(hashtext('headway legacy'), hashtext(CAST({user} AS text)));
        others := {tasks};
        IF others > 0 AND others + {rows} > {allowed_tasks("headway.")} THEN
            RAISE EXCEPTION USING ERRCODE = '23000', MESSAGE = {literal(f"{LEGACY_BUSY}: the user has a task in Headway")};
        END IF;
    END IF;
    RETURN NULL;
END $headway$"""

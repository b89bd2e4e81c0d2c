"""Results of items: how they are kept, and how they are written for others.

A result is JSON. Values of common libraries get a plain form (`as_plain`); for others the caller passes ``encode``
and ``decode``. Results are never pickled.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal
from uuid import UUID

from headway.core.text import plural
from headway.errors import StorageError
from headway.ledger import Job
from headway.ledger.store import finished_items

#: Maximum characters of a result, unless a file of results was requested.
RESULT_LIMIT = 1 << 20

FORMATS = ("jsonl", "csv", "json")
#: Maximum columns of a table, or four times its widest row if that is more. Results with distinct fields each (counts
#: by word, by id) would make a column per field.
COLUMNS_MOST = 1000
#: Columns that every row has.
_OWN = ("index", "key")
_ALONE = "result"


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """What a run keeps of its items."""

    #: Whether to keep results, and whether a result that cannot be kept is a failure.
    results: bool = True
    all_results: bool = False
    #: Converts a return value to JSON.
    encode: Callable[[Any], Any] | None = None
    #: For which items to keep output.
    printed: Literal["failed", "all", "none"] = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class ItemResult:
    """The result of one item. ``key`` has its original type; the ledger and files have its text."""

    index: int
    key: Any
    result: Any
    #: The item itself, if requested.
    input: Any = None


def as_plain(value: Any) -> Any:
    """Convert a value of a common library to JSON. Raises TypeError for others."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, date | time):  # includes datetime
        return value.isoformat()
    if isinstance(value, PurePath | UUID | Decimal):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    library = type(value).__module__.partition(".")[0]
    if library == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(type(value), "model_dump"):  # pydantic
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def in_order(job: Job, *, with_input: bool = False) -> Iterator[ItemResult]:
    """Yield every kept result by index."""
    after = -1
    while page := job.results_by_index(after):
        inputs = dict(finished_items.payloads(job, after, page[-1][0])) if with_input else {}
        for idx, key, text in page:
            if text is not None:
                given = inputs.get(idx)
                yield ItemResult(idx, key, json.loads(text), None if given is None else json.loads(given))
        after = page[-1][0]


def as_they_came(job: Job, after: int = 0) -> Iterator[tuple[int, ItemResult]]:
    """Yield (sequence number, result) in the order of recording. Pass the number as ``after`` to resume."""
    while page := job.results(after):
        for seq, idx, key, text in page:
            yield seq, ItemResult(idx, key, json.loads(text))
        after = page[-1][0]


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def line(found: ItemResult, *, with_input: bool = False) -> str:
    """Return a result as a line of JSON."""
    facts = {"index": found.index, "key": found.key, **({"input": found.input} if with_input else {})}
    return json.dumps(facts | {"result": found.result}, ensure_ascii=False) + "\n"


def lines(
    job: Job, format: str, tell: Callable[[str], None] = lambda _: None, *, with_input: bool = False
) -> Iterator[str]:
    """Yield all results as text in the format, piece by piece.

    ``tell`` receives notes on what the format could not hold.
    """
    if format == "jsonl":
        yield from (line(found, with_input=with_input) for found in in_order(job, with_input=with_input))
    elif format == "json":
        before = "[\n"
        for found in in_order(job, with_input=with_input):
            yield before + line(found, with_input=with_input).rstrip("\n")
            before = ",\n"
        yield "[]\n" if before == "[\n" else "\n]\n"
    else:
        yield from _csv(job, tell, with_input=with_input)


def _fields(found: ItemResult, *, with_input: bool) -> dict[str, Any]:
    """Return the cells of a row: the fields of its result, and of the item if requested."""
    fields: dict[str, Any] = {}
    if with_input:
        given = found.input
        fields = (
            {f"input.{name}": part for name, part in given.items()} if isinstance(given, dict) else {"input": given}
        )
    return fields | (found.result if isinstance(found.result, dict) else {})


def _csv(job: Job, tell: Callable[[str], None], *, with_input: bool) -> Iterator[str]:
    """Yield a CSV row per item, with the fields of results as columns.

    The results are read twice, because rows may differ in their columns. With too many columns, a result is one cell.
    """
    columns: dict[str, None] = {}
    nested: dict[str, int] = {}
    alone = wide = False
    widest = 0
    for found in in_order(job, with_input=with_input):
        fields = _fields(found, with_input=with_input)
        alone = alone or not (isinstance(found.result, dict) or found.result is None)
        columns |= dict.fromkeys(fields)
        for name, value in [*fields.items(), *([] if isinstance(found.result, dict) else [(_ALONE, found.result)])]:
            if isinstance(value, dict | list):
                nested[name] = nested.get(name, 0) + 1
        widest = max(widest, len(fields))
        if len(columns) > max(COLUMNS_MOST, 4 * widest):
            wide, columns, nested = True, {"input": None} if with_input else {}, {}
            break
    named, late = _columns(columns), 0
    alone = alone or wide or not columns
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_OWN, *named.values(), *([_ALONE] if alone else [])])
    for found in in_order(job, with_input=with_input):
        fields = (
            {"input": found.input} if wide and with_input else {} if wide else _fields(found, with_input=with_input)
        )
        if not fields.keys() <= columns.keys() or not (alone or isinstance(found.result, dict) or found.result is None):
            late += 1  # recorded after the columns were collected: part of it would be missing
            continue
        cells = [found.index, found.key, *(fields.get(name) for name in columns)]
        if alone:
            cells.append(None if isinstance(found.result, dict) and not wide else found.result)
        writer.writerow([_cell(value) for value in cells])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()
    if late:
        came = f"{plural(late, 'result')} came meanwhile"
        tell(f"{came} that {'has' if late == 1 else 'have'} no place in these columns. Ask again.")
    if wide:
        few = f"over {COLUMNS_MOST:,} different fields, few of them in common"
        tell(f"The results have {few}: the column {_ALONE!r} has each one as JSON.")
    for name, count in nested.items():
        tell(f"In {named.get(name, name)!r} {_held(count)}: the cells hold their JSON.")


def _columns(fields: Iterable[str]) -> dict[str, str]:
    """Return the column name of each field. A field named like one of our own columns gets a unique other name."""
    taken = {*_OWN, _ALONE, *fields}
    named = {}
    for field in fields:
        name = field
        if field in (*_OWN, _ALONE):
            while name in taken:
                name = f"result.{name}"
            taken.add(name)
        named[field] = name
    return named


def _held(count: int) -> str:
    return "1 value is a list or object" if count == 1 else f"{count:,} values are lists or objects"


def _cell(value: Any) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def write_whole(path: Path, pieces: Iterable[str]) -> None:
    """Write a file atomically, readable by its owner only. A symbolic link stays; its target is replaced."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(
            os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600),
            "w",
            encoding="utf-8",
            newline="",
        ) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise StorageError(
            f"The results cannot be written to {path}: {error.strerror}.",
            hint="They are safe in the ledger. Write them elsewhere:  headway results JOB --output FILE",
        ) from error

"""Sources of items: files of JSON lines, JSON, CSV or plain lines, a pipe, or any iterable of a program.

A source can be read repeatedly and yields the same items. Reading validates every item, so a bad line 90,000 is found
before anything is written.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from headway.core.lifecycle import Shutdown
from headway.errors import InputChanged, InvalidInput, Stopping
from headway.ledger import Job, NewItem, canonical, fingerprint
from headway.run.output.results import as_plain

FORMATS = ("jsonl", "json", "csv", "tsv", "lines")
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv"}

#: First bytes of a gzip file.
_GZIP = b"\x1f\x8b"
#: First bytes of files that are not text, and a hint for each.
_NOT_TEXT = {
    _GZIP: "It is a gzip file: give its path after --items, or pipe it through zcat.",
    b"PK\x03\x04": "It is a zip archive or a spreadsheet: unpack it, or save it as CSV.",
    b"\x28\xb5\x2f\xfd": "It is compressed by zstd: unpack it, or compress it by gzip.",
    b"\xfd7zXZ": "It is compressed by xz: unpack it, or compress it by gzip.",
    b"BZh": "It is compressed by bzip2: unpack it, or compress it by gzip.",
    b"PAR1": "It is a Parquet file: write it as CSV or JSON lines.",
}

#: Possible delimiters of a CSV file and their names; on a tie the comma wins.
_DIVIDERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}

#: The key name of a job whose items are the rows of a DataFrame.
INDEX = "(index)"

#: Default maximum size of a payload, bytes.
PAYLOAD_LIMIT = 262_144
#: Seconds between progress messages while items are read and registered.
REPORT_SECONDS = 3.0
#: A line of a pipe may be this many times the payload limit; escapes and spaces need less.
LINE_MOST = 16


#: Raises `InvalidInput` for an item that cannot be run.
Accept = Callable[[Any], None]


class Read(NamedTuple):
    """An item as read from its source."""

    number: int  # line in the file or position in the iterable, from 1
    key: str | None
    payload: str  # canonical JSON
    fingerprint: int


class Source(Protocol):
    """Items that can be read repeatedly."""

    @property
    def name(self) -> str:
        """The display name: the path of the file."""
        ...

    @property
    def key(self) -> str | None:
        """The field that names an item, if any."""
        ...

    def locate(self, number: int) -> str:
        """Describe where an item is: "line 17"."""
        ...

    def digest(self) -> str:
        """Return a digest of the content; faster than reading the items."""
        ...

    @property
    def digest_read(self) -> str:
        """The digest of the content that the last complete iteration read."""
        ...

    def __iter__(self) -> Iterator[Read]: ...


class FileItems:
    """A file of items, plain or compressed by gzip.

    Blank lines are ignored. In the format ``json`` the file is one array, or JSON lines.
    """

    def __init__(
        self,
        path: Path,
        *,
        format: str | None = None,
        key: str | None = None,
        limit: int = PAYLOAD_LIMIT,
        name: str | None = None,
        accept: Accept | None = None,
    ) -> None:
        """Open the source. ``accept`` raises `InvalidInput` for an item that cannot be run."""
        self.path, self.key, self._limit, self._accept = path, key, limit, accept
        self.name = name or str(path)
        self.digest_read = ""
        self._is_array = False
        try:
            if not path.is_file():
                what = "is a pipe" if path.is_fifo() else "is not a file" if path.exists() else "does not exist"
                hint = "Give it on standard input: ... | headway run --items - ..." if path.is_fifo() else None
                raise InvalidInput(f"The items file {path} {what}.", hint=hint or "Check the path after --items.")
            first = self._first()
        except OSError as error:
            raise InvalidInput(f"The items file {path} cannot be read: {error.strerror}.") from error
        # Standard input has no suffix: detect its format from the first byte, as for a pipe.
        unnamed = "jsonl" if self.name == "-" and first in (b"{", b"[") else "lines"
        named = path.with_suffix("") if path.suffix.lower() == ".gz" else path
        self.format = format or _BY_SUFFIX.get(named.suffix.lower(), unnamed)
        if key is not None and self.format == "lines":
            raise InvalidInput(
                f"--key {key} needs items with fields, but {path} is read as plain lines.",
                hint="Use JSON lines or CSV, or add --format jsonl.",
            )

    def locate(self, number: int) -> str:
        return f"element {number:,}" if self._is_array else f"line {number:,}"

    def digest(self) -> str:
        with self._content() as file:
            digest = self._new_digest()
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def _new_digest(self) -> blake2b:
        format = self.format
        if format == "json" and not self._begins_array():
            format = "jsonl"
        return blake2b(f"{format}\0{self.key}\0".encode(), digest_size=16)

    def _begins_array(self) -> bool:
        return self._first() == b"["

    @contextmanager
    def _content(self) -> Iterator[BinaryIO]:
        """Open the file and decompress gzip."""
        with self.path.open("rb") as raw:
            if raw.read(len(_GZIP)) != _GZIP:
                raw.seek(0)
                yield raw
                return
            raw.seek(0)
            import gzip
            import zlib

            try:
                with gzip.open(raw) as file:
                    yield cast("BinaryIO", file)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InvalidInput(
                    f"The items file {self.path} is a damaged gzip file: {error}.", hint="Copy or compress it again."
                ) from error

    def _first(self) -> bytes:
        """Return the first byte that is not whitespace, or b""."""
        with self._content() as file:
            return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]

    def __iter__(self) -> Iterator[Read]:
        digest = self._new_digest()
        if self.format in ("csv", "tsv"):
            yield from self._checked(self._csv(digest))
        elif self.format == "json":
            yield from self._checked(self._json(digest))
        else:
            yield from self._checked(self._lines(digest))
        self.digest_read = digest.hexdigest()

    def _raw_lines(self, digest: blake2b) -> Generator[bytes, None, None]:
        with self._content() as file:
            for line in file:
                digest.update(line)
                yield line

    def _lines(self, digest: blake2b) -> Iterator[tuple[int, Any]]:
        parse = parser(self.format)
        for number, line in enumerate(self._raw_lines(digest), 1):
            text = decode(line, number, self.name).strip("\r\n" if self.format == "lines" else None)
            if text.strip():
                yield number, parse(text, number, self.name)

    def _json(self, digest: blake2b) -> Iterator[tuple[int, Any]]:
        """Yield the elements of an array, or else the lines. An array is read into memory as a whole."""
        self._is_array = self._begins_array()
        if not self._is_array:
            yield from self._lines(digest)
            return
        with self._content() as file:
            content = file.read()
        digest.update(content)
        yield from enumerate(_array(content, self.name), 1)

    def _csv(self, digest: blake2b) -> Iterator[tuple[int, Any]]:
        # Allow fields as long as an item; the csv module's default is half of that.
        csv.field_size_limit(max(csv.field_size_limit(), self._limit))
        with closing(self._raw_lines(digest)) as raw:
            texts = (decode(line, number, self.name) for number, line in enumerate(raw, 1))
            header = next(texts, "")
            divider = "\t" if self.format == "tsv" else _divider(header)
            rows = csv.DictReader(chain([header], texts), strict=True, delimiter=divider)
            try:
                self._refuse_repeated(rows.fieldnames or ())
                for row in rows:
                    if None in row or None in row.values():
                        found = sum(
                            len(value) if isinstance(value, list) else value is not None for value in row.values()
                        )
                        raise InvalidInput(
                            f"{self.path}, line {rows.line_num:,}: {found} fields where the header has "
                            f"{len(rows.fieldnames or ())}, divided by {_DIVIDERS[divider]}.",
                            hint=f"Quote fields that contain {_DIVIDERS[divider]} or line breaks.",
                        )
                    yield rows.line_num, row
            except csv.Error as error:
                too_long = "field larger than" in str(error)
                raise InvalidInput(
                    f"{self.path}, line {rows.line_num:,}: not CSV: {error}.",
                    hint="Is a quote not closed? Else keep large content in files, or raise payload_limit."
                    if too_long
                    else f"Quote fields that contain quotes, {_DIVIDERS[divider]} or line breaks.",
                ) from error

    def _refuse_repeated(self, names: Sequence[str]) -> None:
        """Refuse repeated column names: a row would keep only the last of them."""
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise InvalidInput(
                f"{self.path}, line 1: the column {repeated[0]!r} occurs twice.",
                hint="Give every column a unique name.",
            )

    def _checked(self, values: Iterable[tuple[int, Any]]) -> Iterator[Read]:
        count = 0
        check = ItemCheck(self.key, self._limit, self._accept)
        for number, value in values:
            count += 1
            yield check(value, number, f"{self.path}, {self.locate(number)}")
        if count == 0:
            raise InvalidInput(f"The items file {self.path} has no items.", hint="Check the path after --items.")


def _divider(header: str) -> str:
    """Return the delimiter that gives the header the most columns.

    Spreadsheets write semicolons where the comma is the decimal mark.
    """
    return max(_DIVIDERS, key=lambda each: len(next(csv.reader([header], delimiter=each), ())))


def as_numbers(value: Any) -> Any:
    """Convert NumPy numbers in an item to plain numbers.

    Other objects are refused: the function would receive a different type than expected.
    """

    def number(part: Any) -> Any:
        if type(part).__module__ == "numpy" and getattr(part, "ndim", None) == 0:
            return part.item()
        raise InvalidInput(
            f"An item cannot be stored as JSON: it contains a {type(part).__name__}.", hint=_instead(part)
        )

    try:
        return json.loads(json.dumps(value, default=number, allow_nan=False))
    except InvalidInput:
        raise
    except Exception:  # noqa: BLE001 - objects may raise anything when they are read
        return value  # the later check raises a detailed error


def _instead(part: Any) -> str:
    name = type(part).__name__
    if dataclasses.is_dataclass(part):
        return f"Give dataclasses.asdict(item), and let the function rebuild it: {name}(**item)"
    if hasattr(type(part), "model_dump"):
        return f'Give item.model_dump(mode="json"), and let the function rebuild it: {name}(**item)'
    if hasattr(part, "tolist"):
        return "Give item.tolist(), and let the function rebuild it: numpy.array(item)"
    if isinstance(part, os.PathLike):
        return "Give str(item), and let the function rebuild it: Path(item)"
    return "Use dicts, lists, strings and numbers."


class GivenItems:
    """Items from a program.

    They must be JSON, because the ledger stores them to resume and to show them. Rows of a pandas or polars DataFrame
    are dicts, and the pandas index is their key.
    """

    def __init__(
        self,
        items: Iterable[object],
        *,
        key: str | None = None,
        limit: int = PAYLOAD_LIMIT,
        plain: Callable[[Any], Any] = as_numbers,
    ) -> None:
        """Collect the items. ``plain`` converts an item that is not JSON."""
        if isinstance(items, str | bytes):
            raise InvalidInput(
                f"items must be a list, not a string (got {items!r:.60}).",
                hint="For the lines of a file: open(path).read().splitlines()",
            )
        rows, self._names = frame_rows(items)
        if not isinstance(rows, Iterable):
            raise InvalidInput(f"items must be a list or another iterable (got {rows!r:.60}).")
        # An iterator can be read only once, but comparing needs a second pass.
        self.items = rows if isinstance(rows, list | tuple | range) else list(rows)
        if key is not None:
            self._names = None
        self.key = key if self._names is None else INDEX
        self._limit, self._plain = limit, plain
        self.digest_read = ""

    def typed_keys(self) -> dict[str, Any]:
        """Return keys that are not strings, by their text in the ledger: ``{"17": 17}``."""
        if self._names is not None:
            keys: Iterable[Any] = self._names
        elif self.key is not None:
            keys = (item[self.key] for item in self.items if isinstance(item, dict) and self.key in item)
        else:
            return {}
        return {str(key): key for key in keys if not isinstance(key, str)}

    @property
    def name(self) -> str:
        return ""

    def locate(self, number: int) -> str:
        return f"item {number - 1:,}"

    def digest(self) -> str:
        for _ in self:
            pass
        return self.digest_read

    def __iter__(self) -> Iterator[Read]:
        check = ItemCheck(self.key, self._limit, plain=self._plain)
        digest = blake2b(f"given\0{self.key}\0".encode(), digest_size=16)
        for number, value in enumerate(self.items, 1):
            name = None if self._names is None else str(self._names[number - 1])
            read = check(value, number, self.locate(number), name)
            digest.update(read.payload.encode() + b"\n")
            yield read
        self.digest_read = digest.hexdigest()


class WatchedItems:
    """A source that shows progress and can be interrupted.

    Reading and registering 500,000 items takes longer than a person waits after Ctrl-C.
    """

    def __init__(self, source: Source, shutdown: Shutdown, report: Callable[[str], object]) -> None:
        """Wrap a source. ``report`` receives a progress message every few seconds."""
        self._source, self._shutdown, self._report = source, shutdown, report
        self.name, self.key, self.locate = source.name, source.key, source.locate

    @property
    def digest_read(self) -> str:
        return self._source.digest_read

    def digest(self) -> str:
        if not isinstance(self._source, GivenItems):
            return self._source.digest()
        for _ in self:
            pass
        return self.digest_read

    def __iter__(self) -> Iterator[Read]:
        report_at = time.monotonic() + REPORT_SECONDS
        for count, read in enumerate(self._source):  # ``count`` items were read before this one
            if self._shutdown.stop.is_set():
                error = Stopping(
                    f"Interrupted after {count:,} items were read; none was started.",
                    hint="The same command continues.",
                )
                error.exit_code = self._shutdown.exit_code
                raise error
            if count and not count % 1000 and time.monotonic() >= report_at:
                report_at = time.monotonic() + REPORT_SECONDS
                self._report(f"Reading items: {count:,} so far ...")
            yield read


class PipedItems:
    """Items that arrive on a pipe during the run (`headway.run.pool.runner.Feed`).

    They are compared with the job's items as they arrive, so the same pipe resumes a job.
    """

    def __init__(
        self,
        job: Job,
        descriptor: int,
        *,
        format: str | None,
        key: str | None,
        limit: int = PAYLOAD_LIMIT,
        accept: Accept | None = None,
    ) -> None:
        self._job, self._descriptor, self._limit = job, descriptor, limit
        self._check = ItemCheck(key, limit, accept)
        if format in ("json", "csv", "tsv"):
            raise InvalidInput(f"A pipe cannot be read as {format}.", hint="Use a file, or pipe JSON lines.")
        self._format = format
        self._rest = b""
        self._line = 0
        self._idx = 0
        self._known = job.fingerprints()
        self.ended = False

    def fileno(self) -> int:
        return self._descriptor

    def register_arrived(self) -> int:
        data = os.read(self._descriptor, 1 << 20)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop() if data else b""
        if len(self._rest) > LINE_MOST * self._limit:
            raise InvalidInput(
                f"Standard input, line {self._line + len(lines) + 1:,}: {len(self._rest):,} bytes without a line break; "
                f"an item may have {self._limit:,}.",
                hint="Pipe one item per line. Keep large content in files and put their paths into the items.",
            )
        new = []
        for line in lines:
            self._line += 1
            text = decode(line, self._line, "standard input").strip("\r")
            if text.strip():
                new += self._compare(self._parse(text))
        count = self._job.register(new) if new else 0
        if not data:
            self.ended = True
            if self._idx == 0:
                raise InvalidInput("There were no items on standard input.", hint="Pipe some in: ... | headway run ...")
            if next(self._known, None) is not None:
                raise InputChanged(
                    f"Standard input ended after {self._idx:,} items, but job {self._job.id} has "
                    f"{self._job.info().total:,}: the rest did not arrive.",
                    hint="Did the command before the pipe fail? Pipe the same items again, or start over with --fresh.",
                )
            self._job.seal(settle=False)
        return count

    def _parse(self, text: str) -> Read:
        if self._format is None:
            self._format = "jsonl" if text.lstrip()[0] in "{[" else "lines"
        where = f"standard input, line {self._line:,}"
        value = parser(self._format)(text, self._line, "standard input")
        return self._check(value, self._line, where)

    def _compare(self, read: Read) -> list[NewItem]:
        idx, self._idx = self._idx, self._idx + 1
        known = next(self._known, None)
        if known is None:
            return [NewItem(idx, read.payload, read.key, read.fingerprint)]
        if known != (idx, read.key, read.fingerprint):
            raise InputChanged(
                f"Line {self._line:,} of standard input differs from the line when job {self._job.id} was started.",
                hint="Pipe the same items in the same order, or start over with --fresh.",
            )
        return []


def decode(line: bytes, number: int, name: str) -> str:
    """Decode a line of UTF-8; raise `InvalidInput` if it is not."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{name}, line {number:,}", error) from error


def _not_utf8(where: str, error: UnicodeDecodeError) -> InvalidInput:
    return InvalidInput(
        f"{where}: not UTF-8 (byte {error.object[error.start]:#04x}).",
        hint=next((hint for head, hint in _NOT_TEXT.items() if error.object.startswith(head)), None)
        or "Convert the file, for example: iconv -f latin1 -t utf-8 FILE > NEW",
    )


def parser(format: str) -> Callable[[str, int, str], Any]:
    """Return the function that parses a line of this format."""
    return _parse_line if format == "lines" else _parse_json


def _array(content: bytes, name: str) -> list[Any]:
    """Parse content that is one JSON array."""
    try:
        text = content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{name}, line {line:,}", error) from error
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, json.JSONDecodeError):
            raise InvalidInput(f"{name}: not JSON: {error}.") from error
        raise InvalidInput(
            f"{name}, line {error.lineno:,}: not JSON (column {error.colno}): {error.msg}.",
            hint="The file begins with [ and is read as one array. If each line is a JSON value: --format jsonl",
        ) from error
    if end != len(text):
        line = text[: len(text) - len(text[end:].lstrip())].count("\n") + 1
        raise InvalidInput(
            f"{name}, line {line:,}: there is text after the end of the array.",
            hint="A .json file is one array. If each line is a JSON value: --format jsonl",
        )
    elements: list[Any] = value
    return elements


def _parse_line(text: str, number: int, name: str) -> str:  # noqa: ARG001 - same signature as _parse_json
    return text


def _parse_json(text: str, number: int, name: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        where = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput(
            f"{name}, line {number:,}: not JSON{where}: {error.msg if isinstance(error, json.JSONDecodeError) else error}.",
            hint="Correct that line; every line must be one JSON value (an array over several lines: name the file "
            ".json, or add --format json). For plain text add --format lines.",
        ) from error


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def frame_rows(items: Iterable[object]) -> tuple[Iterable[object], Sequence[Any] | None]:
    """Return the rows and index of a DataFrame. Any other iterable is returned unchanged, with None."""
    library = type(items).__module__.partition(".")[0]
    frame: Any = items
    if library == "pandas" and hasattr(frame, "itertuples"):
        columns = [str(name) for name in frame.columns]
        if len(set(columns)) < len(columns):
            raise InvalidInput(
                "The DataFrame has two columns with the same name.", hint="Give every column a unique name."
            )
        rows = frame.itertuples(index=False, name=None)
        return [_row(columns, row) for row in rows], list(frame.index)
    if library == "polars" and hasattr(frame, "iter_rows"):
        return [_row(frame.columns, row) for row in frame.iter_rows()], None
    if library == "polars" and hasattr(frame, "collect"):
        raise InvalidInput("A LazyFrame must be collected first.", hint="Give frame.collect().")
    return items, None


def _row(columns: Sequence[str], values: Iterable[Any]) -> dict[str, Any]:
    return dict(zip(columns, map(_value, values), strict=True))


def _value(value: Any) -> Any:
    """Return a DataFrame cell as JSON; missing values become None."""
    if type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and isnan(value)):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list):
        return [_value(each) for each in value]
    if isinstance(value, dict):
        return {name: _value(each) for name, each in value.items()}
    try:
        return as_plain(value)
    except TypeError:
        return value  # checking the item raises a detailed error


class ItemCheck:
    """Validates the items of a source: JSON, within the size limit, with distinct keys."""

    def __init__(
        self,
        key: str | None,
        limit: int,
        accept: Accept | None = None,
        plain: Callable[[Any], Any] | None = None,
    ) -> None:
        """Prepare to check. ``plain`` converts an item that is not JSON, and ``accept`` refuses unusable ones."""
        self._key, self._limit, self._accept, self._plain = key, limit, accept, plain
        self._seen: set[int] = set()

    def __call__(self, value: Any, number: int, where: str, name: str | None = None) -> Read:
        """Return the item as read. ``name`` is its key if that is not a field."""
        try:
            value, payload = self._payload(value)
            if self._accept is not None:
                self._accept(value)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}", hint=error.hint) from None  # one error, not a chain of four
        if len(payload) > self._limit // 4 and len(payload.encode()) > self._limit:
            raise InvalidInput(
                f"{where}: the item has {len(payload.encode()):,} bytes; at most {self._limit:,} are allowed.",
                hint="Keep large content in files and put their paths into the items, or raise payload_limit.",
            )
        if self._key is not None:
            found = value.get(self._key) if name is None and isinstance(value, dict) else name
            name = self._checked_key(found, where)
        return Read(number, name, payload, fingerprint(payload))

    def _payload(self, value: Any) -> tuple[Any, str]:
        try:
            return value, canonical(value, "An item")
        except InvalidInput:
            if self._plain is None:
                raise
            value = self._plain(value)
            return value, canonical(value, "An item")

    def _checked_key(self, name: object, where: str) -> str:
        if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip() or len(str(name)) > 512:
            raise InvalidInput(
                f"{where}: the item has no usable key: {self._key!r} is {name!r:.60}.",
                hint="Every item needs this field, with a unique text or whole number.",
            )
        mark = fingerprint(str(name))
        if mark in self._seen:
            raise InvalidInput(f"{where}: the key {str(name)!r} occurs twice.", hint="Every item needs a unique key.")
        self._seen.add(mark)
        return str(name)

"""`ProgressManager`: one job in one SQLite file, with the API of the original requirements document.

    progress = ProgressManager("ads.db")
    for idx, product in enumerate(products):
        if not progress.is_done(idx):
            try:
                progress.mark_done(idx, {"ad": make_ad(product)})
            except Exception as error:
                progress.mark_failed(idx, {"error": str(error)})
    print(progress.stats())

When a call returns, its change is on disk. The manager never sleeps and never runs items. Waiting between retries and
retrying dead letters is left to the pipeline (`headway.map`, `headway run`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from headway.config import Config
from headway.core.failure import Failure, bounded_error, describe, shortened
from headway.core.retry import RetryPolicy
from headway.errors import InputChanged, InvalidInput, StaleClaim
from headway.ledger.content import bounded_meta, canonical, fingerprint
from headway.ledger.job import Job
from headway.ledger.ledger import Ledger
from headway.ledger.store.recorder import META_ERROR_KEPT
from headway.ledger.values import DeadLetter, Done, Failed, Item, NewItem, Outcome, check_index
from headway.telemetry import Log, metrics, names_a_secret, redact

log = Log("progress")

#: The job's id inside the file.
JOB = "progress"

#: No wait between retries: that is left to the pipeline. The job stores the number of retries.
_AT_ONCE = RetryPolicy(retries=0, base=0.0, cap=0.0)

Meta = Mapping[str, Any]  # free-form JSON of the caller


class ProgressManager:
    """Tracks which items are done, which failed and how often, and which are dead."""

    def __init__(self, db_path: Path | str | None = None, max_retries: int = 2, *, resume: bool = True) -> None:
        """Open the progress database.

        ``db_path`` defaults to the configured database. ``resume=False`` archives earlier progress (kept in the file
        under another id) and starts with an empty job.
        """
        url = Config().text("database") if db_path is None else f"sqlite:///{quote(os.fspath(db_path))}"
        self._ledger = Ledger.open(url)
        try:
            if not resume:
                aside = self._ledger.archive(JOB)
                if aside is not None:
                    log.info("starting over; the earlier progress was archived", job=JOB, new=aside)
            self._job: Job = self._ledger.create(JOB, max_retries=max_retries, policy=_AT_ONCE)
            info = self._job.info()
            if info.max_retries != max_retries:
                self._ledger.describe(
                    self._job, function="", source="", command="", keyed_by=None, max_retries=max_retries
                )
            if info.total:
                log.info(
                    "resuming: done items are skipped",
                    job=JOB, total=info.total, done=info.done, failed=info.failed, dead=info.dead,
                )  # fmt: skip
        except BaseException:
            self._ledger.close()
            raise
        self.db_path = None if db_path is None else Path(db_path)
        self.max_retries = max_retries

    # ---- methods of the requirements document ----------------------------------------------------------------------

    def is_done(self, idx: int) -> bool:
        """Return whether this item was processed successfully."""
        return self._job.is_done(check_index(idx))

    def mark_done(self, idx: int, meta: Meta | None = None, *, token: int | None = None) -> None:
        """Record success. Done is final: a repeated call or a late failure changes nothing."""
        self._record([Done(check_index(idx), _checked(meta), token=token)])

    def mark_failed(self, idx: int, meta: Meta | None = None, *, token: int | None = None) -> None:
        """Record a failure. The item is retried, or becomes dead once its attempts exceed ``max_retries``.

        ``meta["error"]`` gives the reason: an exception or a text. The default is "Unknown error".
        """
        self._record([_failure(check_index(idx), meta, token)])

    def stats(self) -> str:
        """Return a summary to print."""
        info = self._job.info()
        runs = info.done + info.failures
        tried = info.done + info.failed + info.dead
        share = 100 * info.failures / runs if runs else 0.0
        lines = [
            f"{info.done:,} of {info.total:,} done ({info.percent:.1f}%)",
            f"{info.remaining - info.failed:,} pending, {info.failed:,} failed and to be retried, {info.dead:,} dead",
            f"{runs:,} runs, {info.failures:,} failed ({share:.1f}%)",
            f"{info.failures / tried if tried else 0.0:.2f} retries per item tried on average",
        ]
        minutes = self._job.minutes(0)
        busy = sum(row[1] + row[2] for row in minutes)
        if minutes:
            lines.append(f"rate {busy / len(minutes):,.0f} runs a minute over {len(minutes)} active minutes")
        writes = metrics.histogram("headway_sql_seconds", operation="record")
        if writes.count:
            lines.append(f"{writes.count:,} updates by this process, {1000 * writes.total / writes.count:.2f} ms each")
        lines.append(f"database {self._ledger.database.size() / 2**20:.1f} MB")
        for cause in self._job.causes()[:5]:
            lines.append(f"  {cause.dead:,} dead, {cause.count:,} failures: {cause.type} {cause.message}".rstrip())
        return "\n".join(lines)

    # ---- methods for a pipeline ------------------------------------------------------------------------------------

    def register(self, items: Iterable[object]) -> int:
        """Register the items and return how many are new. From then on the job can finish.

        Items are either indices (ints) or payloads (any other JSON value, indexed in order from 0).

        Raises `InputChanged` if a payload differs from the one registered under its index. Nothing is registered then,
        because the outcome of the old payload must not count for the new one.
        """
        given = list(items)
        indices = sum(isinstance(item, int) and not isinstance(item, bool) for item in given)
        if 0 < indices < len(given):
            raise InvalidInput(
                "Some items are indices and some are payloads.", hint="Register only indices or only payloads."
            )
        if indices:
            new = [NewItem(check_index(item)) for item in given]
        else:
            texts = [canonical(item) for item in given]
            new = [NewItem(position, text, None, fingerprint(text)) for position, text in enumerate(texts)]
            self._refuse_changed(new)
        count = self._job.register(new)
        self._job.seal()
        return count

    def _refuse_changed(self, items: Sequence[NewItem]) -> None:
        for idx, _, mark in self._job.fingerprints():
            if idx < len(items) and mark is not None and mark != items[idx].fingerprint:
                raise InputChanged(
                    f"Item {idx} was registered with another payload than {items[idx].payload:.80}. Nothing was changed.",
                    hint="Register the items in their first order, or start over with resume=False.",
                )

    def claim(self, worker: str | None = None, *, limit: int = 1, lease: float = 30.0) -> list[Item]:
        """Claim up to ``limit`` items for ``lease`` seconds.

        Pass each item's ``token`` to `mark_done` or `mark_failed`. They raise `StaleClaim` once the lease has expired
        and another worker has claimed the item.
        """
        return self._job.claim(worker or f"{socket.gethostname()}:{os.getpid()}", limit=limit, lease=lease)

    def mark_many(self, done: Sequence[tuple[int, Meta | None]]) -> int:
        """Record many successes in one transaction. Return how many items were not done before."""
        return self._record([Done(check_index(idx), _checked(meta)) for idx, meta in done]) if done else 0

    def pending(self) -> Iterator[int]:
        """Yield the indices still to process: never tried, or failed and not dead."""
        yield from self._job.not_done()

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Yield the dead letters, each with its last error."""
        after = -1
        while page := self._job.dead_letters(after=after):
            yield from page
            after = page[-1].idx

    def retry_dead(self, idx: int | None = None, *, cause: int | None = None) -> int:
        """Make dead letters (all, one, or those of a cause) pending again. Return how many.

        Their attempts are reset, and the change is audited.
        """
        return self._job.retry_dead(cause=cause, indices=None if idx is None else [check_index(idx)])

    @property
    def job(self) -> Job:
        """The job in the ledger, for all other queries and changes."""
        return self._job

    def close(self) -> None:
        """Close the database."""
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, outcomes: Sequence[Outcome]) -> int:
        recorded = self._job.record(outcomes, policy=_AT_ONCE, register=True)
        if recorded.stale:
            raise StaleClaim(
                f"The claim on item {recorded.stale[0]} expired and another worker has it; nothing was recorded.",
                hint="Claim with a longer lease, or renew it while the work goes on.",
            )
        return recorded.done


def _checked(meta: Meta | None) -> str | None:
    return bounded_meta(_dict(meta)) if meta is not None else None


def _dict(meta: Meta | None) -> Meta:
    if meta is not None and not isinstance(meta, Mapping):
        raise InvalidInput(f"Meta must be a dict, not {type(meta).__name__}.")
    return {} if meta is None else meta


def _failure(idx: int, meta: Meta | None, token: int | None) -> Failed:
    given = {**_dict(meta)}
    error = given.pop("error", None)
    if issubclass(type(error), BaseException):  # isinstance would read __class__, which the exception may override
        failure = describe(error)
    else:
        message = _exact(error, "An error")
        failure = Failure("", bounded_error(str(message)) if message else "Unknown error")
    kept = _clean({**_exact(given, "Meta"), "error": shortened(failure.text, META_ERROR_KEPT)})
    return Failed(idx, failure, meta=bounded_meta(kept), token=token)


def _exact(value: object, what: str) -> Any:
    """Convert the value to plain JSON types. Methods of custom classes might raise or return something else."""
    return json.loads(canonical(value, what))


def _clean(value: Any) -> Any:
    """Redact secrets in free-form JSON, because many people see a failure's meta."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: "***" if names_a_secret(str(key)) else _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value

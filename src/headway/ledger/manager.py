"""`ProgressManager`: one job in one SQLite file, in the words of its source document.

    progress = ProgressManager("ads.db")
    for idx, product in enumerate(products):
        if not progress.is_done(idx):
            try:
                progress.mark_done(idx, {"ad": make_ad(product)})
            except Exception as error:
                progress.mark_failed(idx, {"error": str(error)})
    print(progress.stats())

When a call returns, what it says is on disk. It never sleeps and never runs anything: waiting between tries and
working off dead letters are the pipeline's (`headway.map`, `headway run`).
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
from headway.errors import InputChanged, InvalidInput, StaleClaim
from headway.failure import Failure, bounded_error, describe, shortened
from headway.ledger.content import bounded_meta, canonical, fingerprint
from headway.ledger.job import Job
from headway.ledger.ledger import Ledger
from headway.ledger.recorder import META_ERROR_KEPT
from headway.ledger.stretches import stretches
from headway.ledger.values import DeadLetter, Done, Failed, Item, NewItem, Outcome, check_index
from headway.retry import RetryPolicy
from headway.telemetry import Log, metrics, names_a_secret, redact

log = Log("progress")

#: The job's id inside the file.
JOB = "progress"

#: How often is the job's policy; the wait between tries is the pipeline's, so here there is none.
_AT_ONCE = RetryPolicy(retries=0, base=0.0, cap=0.0)

Meta = Mapping[str, Any]  # free-form JSON of the caller


class ProgressManager:
    """Which products are done, which failed and how often, which are given up."""

    def __init__(self, db_path: Path | str | None = None, max_retries: int = 2, *, resume: bool = True) -> None:
        """``db_path`` defaults to the configured database. ``resume=False`` puts earlier progress aside (it is kept
        in the file under another id) and starts anew."""
        url = Config().text("database") if db_path is None else f"sqlite:///{quote(os.fspath(db_path))}"
        self._ledger = Ledger.open(url)
        try:
            if not resume:
                aside = self._ledger.archive(JOB)
                if aside is not None:
                    log.info("starting anew; the earlier progress was put aside", job=JOB, new=aside)
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

    # ---- the document's four ---------------------------------------------------------------------------------------

    def is_done(self, idx: int) -> bool:
        """Whether this product was processed successfully."""
        return self._job.is_done(check_index(idx))

    def mark_done(self, idx: int, meta: Meta | None = None, *, token: int | None = None) -> None:
        """Record success. Done is final: saying it again, or a late failure, changes nothing."""
        self._record([Done(check_index(idx), _checked(meta), token=token)])

    def mark_failed(self, idx: int, meta: Meta | None = None, *, token: int | None = None) -> None:
        """Record a failure: one attempt more, then failed, or dead once attempts exceed ``max_retries``.

        ``meta["error"]`` says why (an exception or a text; "Unknown error" if it is missing).
        """
        self._record([_failure(check_index(idx), meta, token)])

    def stats(self) -> str:
        """A summary to print."""
        info = self._job.info()
        runs = info.done + info.failures
        tried = info.done + info.failed + info.dead
        share = 100 * info.failures / runs if runs else 0.0
        lines = [
            f"{info.done:,} of {info.total:,} done ({info.percent:.1f}%)",
            f"{info.remaining - info.failed:,} pending, {info.failed:,} failed and to be retried, {info.dead:,} dead",
            f"{runs:,} runs, {info.failures:,} of them failed ({share:.1f}%)",
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

    # ---- what a pipeline needs besides -----------------------------------------------------------------------------

    def register(self, items: Iterable[object]) -> int:
        """Make the products known: their indices (ints), or their payloads (anything else that is JSON, indexed in
        order from 0). How many were new. From then on the job can finish.

        A payload that differs from the one known under its index is `InputChanged`, and then nothing is registered:
        what was recorded of the one must not count for the other.
        """
        given = list(items)
        indices = sum(isinstance(item, int) and not isinstance(item, bool) for item in given)
        if 0 < indices < len(given):
            raise InvalidInput("Some items are indices and some are payloads.", hint="Register the ones or the others.")
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
                    f"Item {idx} is known with another payload than {items[idx].payload:.80}; nothing was registered.",
                    hint="Register the items in the order of the first time, or start anew with resume=False.",
                )

    def claim(self, worker: str | None = None, *, limit: int = 1, lease: float = 30.0) -> list[Item]:
        """Take products to work on that nobody else gets for ``lease`` seconds. Pass each one's ``token`` to
        `mark_done` or `mark_failed`: after the lease lapsed and somebody else took it, that raises `StaleClaim`."""
        return self._job.claim(worker or f"{socket.gethostname()}:{os.getpid()}", limit=limit, lease=lease)

    def mark_many(self, done: Sequence[tuple[int, Meta | None]]) -> int:
        """Record many successes in one transaction; how many were not done before."""
        return self._record([Done(check_index(idx), _checked(meta)) for idx, meta in done]) if done else 0

    def pending(self) -> Iterator[int]:
        """Indices still to be processed: never tried, or failed and not dead."""
        database, job = self._ledger.database, self._job.no
        for near in stretches(database, "input_products", job, -1, 1000):
            rows = database.all(
                "SELECT idx FROM input_products WHERE job = ? AND idx > ? AND idx <= ? AND idx NOT IN "
                "(SELECT p.idx FROM progress p WHERE p.job = ? AND p.idx > ? AND p.idx <= ? AND p.status = 'done') "
                "AND idx NOT IN (SELECT d.idx FROM dead_letters d WHERE d.job = ? AND d.idx > ? AND d.idx <= ?) ORDER BY idx",
                (job, *near, job, *near, job, *near),
            )
            yield from (idx for (idx,) in rows)

    def dead_letters(self) -> Iterator[DeadLetter]:
        """Products given up, each with its last error."""
        after = -1
        while page := self._job.dead_letters(after=after):
            yield from page
            after = page[-1].idx

    def retry_dead(self, idx: int | None = None, *, cause: int | None = None) -> int:
        """Give dead letters (all, one, or those of a cause) another life with no attempt counted; how many. Audited."""
        return self._job.retry_dead(cause=cause, indices=None if idx is None else [check_index(idx)])

    @property
    def job(self) -> Job:
        """The job in the ledger, for everything else that can be asked of it."""
        return self._job

    def close(self) -> None:
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
                f"The claim on item {recorded.stale[0]} lapsed and somebody else has it; nothing was recorded.",
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
    if issubclass(type(error), BaseException):  # isinstance would ask the exception
        failure = describe(error)
    else:
        said = _exact(error, "An error")
        failure = Failure("", bounded_error(str(said)) if said else "Unknown error")
    kept = _clean({**_exact(given, "Meta"), "error": shortened(failure.text, META_ERROR_KEPT)})
    return Failed(idx, failure, meta=bounded_meta(kept), token=token)


def _exact(value: object, what: str) -> Any:
    """The value as JSON has it: none of its own classes, whose methods may raise or say something else."""
    return json.loads(canonical(value, what))


def _clean(value: Any) -> Any:
    """Free-form JSON without secrets: what a failure says about itself is shown to many."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: "***" if names_a_secret(str(key)) else _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value

"""The size of items that failed, and what can still be read of their errors."""

import json
from itertools import pairwise

import pytest

from headway.core.failure import Failure, describe, shortened
from headway.core.retry import RetryPolicy
from headway.ledger import Failed, Job, Ledger, NewItem, ProgressManager
from headway.ledger.store.recorder import (
    DEAD_ERROR_KEPT,
    ERROR_KEPT,
    REPEATED_ERROR_KEPT,
    TRACEBACK_END,
    WHOLE_TRACEBACKS,
)
from headway.ledger.values import OF_THE_CAUSE
from headway.views.jobs.items import read_item

COUNT = 2_000
AT_ONCE = RetryPolicy(2, base=0.0, cap=0.0)
#: Bytes of an entry. PostgreSQL has longer rows and indexes, and keeps old versions of updated rows until a vacuum: without
#: any vacuum an entry took 2,613 bytes, rewritten 1,430.
LIMIT = {"sqlite": 1_024, "memory": 1_024, "postgresql": 3_072}


def numbers(idx: int, attempt: int, count: int) -> str:
    """Words that differ between items and attempts."""
    return " ".join(f"{(idx * 3 + attempt + 1) * 7919 * word % 10**9:09}" for word in range(1, count))


def failed(idx: int, attempt: int) -> Failure:
    """A failure as `describe` makes it of a long error: a message of 300 characters, a traceback of 4,000."""
    end = f"upstream refused order {idx} at try {attempt}: {numbers(idx, attempt, 30)}"
    frames = "".join(f'  File "/app/prices.py", line {line}, in step\n    return step(order)\n' for line in range(45))
    message = f"{end[:200]} ... (4321 characters) ... {end[-70:]}"
    detail = f"Traceback (most recent call last):\n{frames}RuntimeError: {end} {numbers(idx, attempt, 60)}"
    return Failure("RuntimeError", message, "prices.py:step", detail)


def stored(ledger: Ledger) -> int:
    """Return the bytes of all tables and indexes."""
    if ledger.database.engine == "sqlite":
        rows = ledger.database.all("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
    else:
        rows = ledger.database.all(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = 'headway' AND c.relkind = 'r'"
        )
    return int(rows[0][0])


def fail_three_times(job: Job, first: int, count: int) -> None:
    job.register(NewItem(idx, f'{{"sku":{idx}}}', f"sku-{idx}") for idx in range(first, first + count))
    for attempt in range(3):
        for start in range(first, first + count, 100):
            batch = range(start, min(start + 100, first + count))
            job.record(
                [Failed(idx, failed(idx, attempt), seconds=0.25, worker="host-1:4711") for idx in batch], policy=AT_ONCE
            )


@pytest.mark.req("S3-56")
def test_an_item_that_failed_three_times_with_long_errors_stays_below_its_limit(engine: str, ledger: Ledger):
    job = ledger.create("ads")
    sizes = [stored(ledger)]
    for first in (0, COUNT):
        fail_three_times(job, first, COUNT)
        sizes.append(stored(ledger))
    assert job.info().dead == 2 * COUNT
    first_half, second_half = ((after - before) / COUNT for before, after in pairwise(sizes))
    assert max(first_half, second_half) < LIMIT[engine], (first_half, second_half)
    assert second_half < 1.1 * first_half, "the size grows faster than the number of items"


def refusal(idx: int, attempt: int) -> RuntimeError:
    try:
        raise RuntimeError(f"upstream refused order {idx} at try {attempt}: {numbers(idx, attempt, 300)}")
    except RuntimeError as error:
        return error


@pytest.mark.req("S3-56")
def test_a_manager_keeps_an_item_that_failed_three_times_below_its_limit(
    engine: str, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_DATABASE", url)
    count = 500
    with ProgressManager() as progress:
        ledger = Ledger(progress.job.database)
        before = stored(ledger)
        progress.register([{"sku": idx} for idx in range(count)])
        for attempt in range(3):
            for idx in range(count):
                progress.mark_failed(idx, {"error": refusal(idx, attempt), "step": "render"})
        assert progress.job.info().dead == count
        assert (stored(ledger) - before) / count < LIMIT[engine]
        (letter,) = progress.job.dead_letters(limit=1)
        assert json.loads(letter.meta or "")["error"].startswith("RuntimeError: ")


@pytest.mark.req("S3-56")
def test_a_dead_letter_keeps_type_beginning_length_and_end_of_its_error(job: Job):
    fail_three_times(job, 10, 2)
    for letter in job.dead_letters():
        whole = failed(letter.idx, 2).text
        assert letter.error.startswith(f"RuntimeError: upstream refused order {letter.idx} at try 2: ")
        assert " ... (4321 characters) ... " in letter.error
        assert letter.error.endswith(whole[-30:])
        assert len(letter.error.encode()) <= DEAD_ERROR_KEPT
        errors = [attempt.error or "" for attempt in job.history(letter.idx)]
        assert all(error.startswith(f"RuntimeError: upstream refused order {letter.idx}") for error in errors)
        limits = (ERROR_KEPT, REPEATED_ERROR_KEPT, REPEATED_ERROR_KEPT)
        assert all(len(error.encode()) <= limit for error, limit in zip(errors, limits, strict=True))
        assert all(error.endswith(" ...") for error in errors)


def test_the_last_attempt_of_a_dead_item_shows_the_error_of_its_dead_letter(job: Job):
    fail_three_times(job, 10, 1)
    (letter,) = job.dead_letters()
    *_, earlier, last = read_item(job, 10).attempts
    assert last.error == letter.error
    assert len((earlier.error or "").encode()) <= REPEATED_ERROR_KEPT


@pytest.mark.req("S3-56")
def test_every_attempt_shows_the_whole_traceback_of_its_cause_and_says_whose_it_is(job: Job):
    fail_three_times(job, 10, 2)
    first, *others = [attempt.detail or "" for idx in (10, 11) for attempt in job.history(idx)]
    assert first == failed(10, 0).detail
    assert len(first) > 3_500
    assert others == [f"{OF_THE_CAUSE}\n{first}"] * 5


@pytest.mark.req("S3-56")
def test_an_attempt_with_the_traceback_of_its_cause_shows_it_as_its_own(job: Job):
    for _ in range(2):
        job.record([Failed(idx, failed(1, 1)) for idx in (1, 2)], policy=AT_ONCE)
    assert {attempt.detail for idx in (1, 2) for attempt in job.history(idx)} == {failed(1, 1).detail}


@pytest.mark.req("S3-56")
def test_a_job_with_many_causes_keeps_whole_tracebacks_of_the_first_ones_only(ledger: Ledger):
    job = ledger.create("ads")
    job.register(NewItem(idx) for idx in range(WHOLE_TRACEBACKS + 5))
    detail = failed(0, 0).detail or ""
    job.record([Failed(n, Failure("E", "x" * (n + 1), "", detail)) for n in range(WHOLE_TRACEBACKS + 5)])
    assert len(job.causes()) == WHOLE_TRACEBACKS + 5
    assert job.history(WHOLE_TRACEBACKS - 1)[0].detail == detail
    assert job.history(WHOLE_TRACEBACKS)[0].detail == f"...\n{detail[-TRACEBACK_END:]}"


@pytest.mark.req("S3-56")
def test_short_errors_are_kept_whole_in_every_attempt_and_in_the_dead_letter(job: Job):
    failure = Failure("ValueError", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 26)
    assert len(failure.text.encode()) == REPEATED_ERROR_KEPT
    for _ in range(3):
        job.record([Failed(1, failure)], policy=AT_ONCE)
    assert [attempt.error for attempt in job.history(1)] == [failure.text] * 3
    assert [letter.error for letter in job.dead_letters()] == [failure.text]


def test_an_attempt_without_a_traceback_does_not_become_that_of_its_cause(job: Job):
    for detail in ("", None, "stderr of the third"):
        job.record([Failed(1, Failure("Timeout", "too slow", "tool", detail))], policy=AT_ONCE)
    assert [attempt.detail for attempt in job.history(1)] == [None, None, "stderr of the third"]


@pytest.mark.parametrize("limit", [64, 240])
@pytest.mark.parametrize("text", ["e" * 5_000, "\N{BALLOON}" * 5_000, "\N{LATIN SMALL LETTER E WITH ACUTE}x" * 2_500])
def test_a_shortened_text_is_bounded_in_bytes_and_a_long_one_states_its_length_once(text: str, limit: int):
    short = shortened(text, limit)
    assert limit - 8 <= len(short.encode()) <= limit
    assert short.count("(5000 characters)") == (limit == 240)
    assert shortened(shortened(text, 250), limit).count("(5000 characters)") == (limit == 240)
    assert limit == 240 or short.endswith(" ...")
    assert shortened("short", limit) == "short"


def test_secrets_are_neither_in_the_traceback_of_a_cause_nor_in_an_error(job: Job):
    error = RuntimeError(f"password=hunter2-canary {'x ' * 400} password=hunter2-canary")
    job.record([Failed(1, describe(error))], policy=AT_ONCE)
    rows = job.database.all("SELECT error FROM attempts UNION ALL SELECT detail FROM tracebacks")
    assert len(rows) == 2
    assert "canary" not in str(rows)

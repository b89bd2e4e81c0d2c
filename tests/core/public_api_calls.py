"""Typical calls of the public API, for the type checker; nothing here is run.

`assert_type` says what a call gives. A call that must be refused has an ignore: were it accepted, strict mypy would report
the ignore as unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import headway
from headway import FinishLine, GiveUp, HeadwayError, Ledger, ProgressManager, Result, map, open_job  # noqa: A004 - the name
from headway.finishline import Answer, Progress
from headway.ledger import DeadLetter, Item, Job, JobInfo
from headway.states import Manager, State, open_store


def make_ad(product: dict[str, str]) -> str:
    if not product["name"]:
        raise GiveUp("a product without a name stays without")
    return product["name"].title()


async def fetch(url: str) -> int:
    return len(url)


def run_jobs() -> None:
    result = headway.map(make_ad, [{"name": "lamp"}], job="ads")
    assert_type(result, Result)
    assert_type(result.done, int)
    assert_type(result.dead_letters(), Iterator[DeadLetter])
    map(fetch, ["https://example.org"], mode="async", timeout=5.0, rate=10, output="sizes.jsonl")
    map(make_ad)  # type: ignore[call-arg]  # without items there is nothing to do
    map("ads:make_ad", [])  # type: ignore[arg-type]  # a function, not its name
    map(make_ad, [], retries="two")  # type: ignore[arg-type]


def hold_the_loop() -> None:
    with open_job("ads", [{"name": "lamp"}], key="name") as job:
        for item in job.remaining():
            with item:
                assert_type(item.payload, Any)
    open_job()  # type: ignore[call-arg]  # it has a name


def keep_progress() -> None:
    with ProgressManager("progress.db", max_retries=2) as progress:
        assert_type(progress.register(["a", "b"]), int)
        assert_type(progress.claim(limit=10), list[Item])
        progress.mark_done(0, {"chars": 12})
        assert_type(progress.is_done(0), bool)
        assert_type(progress.stats(), str)
        progress.mark_done("0")  # type: ignore[arg-type]  # an index, not its text


def read_the_ledger() -> None:
    with Ledger.open("sqlite:///headway.db", create=False) as ledger:
        assert_type(ledger.jobs(), list[JobInfo])
        assert_type(ledger.job("ads"), Job)
        assert_type(ledger.job("ads").info().dead, int)


def count_in_redis() -> None:
    with FinishLine("redis://localhost:6379/1", "sqlite:///headway.db") as line:
        assert_type(line.create("crawl", total=3), Progress)
        assert_type(line.item_done("crawl", 1), Answer)
        assert_type(line.items_done("crawl", ["a", 2]), Answer)
        assert_type(line.progress("crawl").percent, float)
        line.set_total("crawl", "3")  # type: ignore[arg-type]


def report_states() -> None:
    store, num_tasks = open_store("sqlite:///headway.db", "nightly", 4)
    assert_type(num_tasks, int)
    with Manager("nightly", 0, num_tasks, store) as manager:
        assert_type(manager.set_started("ingest"), State)
        assert_type(manager.get_state(tag="ingest").status, int)


def catch_errors() -> tuple[str, int]:
    try:
        run_jobs()
    except HeadwayError as error:
        return error.hint, error.exit_code
    return headway.__version__, 0


def use_a_name_that_does_not_exist() -> None:
    headway.nothing()  # type: ignore[attr-defined]

"""examples/batch: one machine, one SQLite file, an async function against an API that fails.

The runs have 256 descriptors, serve their page and deliver their events. They are killed, the database goes back in time
under one of them, one cause is repaired and retried. The shop's own log says which items were requested when.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.deployment import Deployment
from tests.scenarios.history import (
    assert_counters_match_items,
    assert_every_event_at,
    assert_nothing_held,
    descriptors,
    rows,
)
from tests.services.server import free_port
from tests.services.waiting import eventually

PRICES = (
    "headway run prices:fetch_price --items products.csv --key sku --job prices"
    " --workers 64 --rate 300 --timeout 10 --retry-delay 0.5 --serve"
)
LABELS = (
    "headway run --items products.csv --key sku --job labels --workers 300"
    " -- sh -c 'sleep 0.2; echo \"$1\"' label {name}"
)
NUMBERS = "headway run math:sqrt --items numbers.jsonl --job numbers"
DONE_KEYS = """
    SELECT i.key FROM jobs j JOIN input_products i ON i.job = j.no JOIN progress p ON p.job = j.no AND p.idx = i.idx
    WHERE j.id = 'prices' AND p.status = 'done'
"""

Deploy = Callable[..., Deployment]


@dataclass
class Finished:
    """Items that the ledger had as done: the shop must not get a request for them in these lines of its log."""

    items: set[str]
    begin: int
    end: int | None = None


class Batch:
    """The example with its shop: what happens to it, what the ledger and the shop's log say about it."""

    def __init__(self, deploy: Deploy, products: int) -> None:
        shop = f"http://127.0.0.1:{free_port()}"
        self.products = products
        self.deployment = deploy("batch", SHOP_URL=shop, HEADWAY_SINKS=f"{shop}/events", PRODUCTS=str(products))
        self.directory = self.deployment.directory
        self.file, self.saved = self.directory / "headway.db", self.directory / "saved.db"
        self.database = f"sqlite:///{self.file}"
        self.finished: list[Finished] = []
        self._runs = 0
        #: The run that is being disturbed, and whether the database was restored under it.
        self._working: str | None = None
        self._restored = False
        self.run("python make_products.py")
        self.deployment.start("shop", "python shop_server.py")
        eventually(lambda: "listens" in self.deployment.log("shop"), message="the shop listens")
        self.shop = self.deployment.processes["shop"].pid
        self._shop_descriptors = descriptors(self.shop)
        self.deployment.shell_setup = ["ulimit -n 256"]  # of the runs; the shop has the usual limit

    # ---- what happens ------------------------------------------------------------------------------------------------

    def start(self) -> str:
        """Start the run and return the name of its process."""
        self._runs += 1
        name = f"run-{self._runs}"
        self.deployment.start(name, PRICES)
        return name

    def wait_until_done(self, name: str, count: int) -> None:
        """Wait until the ledger has `count` finished items, while the run works."""

        def enough() -> bool:
            assert self.deployment.processes[name].poll() is None, self.deployment.log(name)
            return len(self.done()) >= count

        eventually(enough, 120, f"{count} items are done")

    def wait_for_end(self, name: str) -> int:
        """Return the exit code of a run that ends by itself."""
        return self.deployment.processes[name].wait(600)

    def kill(self, name: str, *, workers_too: bool) -> None:
        """Kill -9 a run, or its whole process group, and wait for the end of everything it started."""
        if workers_too:
            self.deployment.kill_group(name)
        else:
            self.deployment.stop(name, signal.SIGKILL)
        self.wait_for_orphans()
        self.remember(self.file)

    def wait_for_orphans(self) -> None:
        """Wait until only the shop is left of the deployment."""
        eventually(lambda: set(self.deployment.members()) == {self.shop}, 60, "a run leaves no process behind")

    def remember(self, file: Path) -> None:
        """Remember the finished items of a database: no request for them may follow."""
        self.finished.append(Finished(self.done(file), begin=len(self.requests())))

    def backup(self) -> None:
        with closing(sqlite3.connect(self.file, timeout=60)) as live, closing(sqlite3.connect(self.saved)) as saved:
            live.backup(saved)
        self.remember(self.saved)

    def restore(self) -> None:
        """Restore the backup in place. Items that were finished after it may be requested again."""
        saved_items, now = self.done(self.saved), len(self.requests())
        with closing(sqlite3.connect(self.saved)) as saved, closing(sqlite3.connect(self.file, timeout=60)) as live:
            saved.backup(live)
        for finished in self.finished:
            if finished.end is None and not finished.items <= saved_items:
                finished.end = now

    def repair_and_retry(self) -> None:
        """Repair the function and retry each cause, as the README says."""
        shown = self.deployment.run("headway dead show prices")
        assert "could not convert string to float" in shown.stdout, shown
        self.run("""sed -i 's/float(price)/float(price.replace(",", "."))/' prices.py""")
        for (cause,) in rows(self.database, "SELECT DISTINCT cause FROM dead_letters"):
            self.run('headway retry prices --cause "$CAUSE" --yes --reason "decimal comma"', CAUSE=str(cause))

    def run(self, command: str, **environment: str) -> None:
        """Run a documented command that succeeds."""
        ended = self.deployment.run(command, 120, **environment)
        assert ended.returncode == 0, ended.stderr

    def disturb(self, chance: random.Random) -> None:
        """Let the run finish some items, then do something to it that happens to runs."""
        if self._working is None:
            self._working = self.start()
        process = self.deployment.processes[self._working]
        enough = len(self.done()) + chance.randrange(20, 300)
        eventually(lambda: process.poll() is not None or len(self.done()) >= enough, 120, f"{enough} items are done")
        if process.poll() is not None:
            assert process.returncode in (0, 3) or self._restored, self.deployment.log(self._working)
            self._working, self._restored = None, False
            return
        what = chance.choice(["kill", "kill group", "Ctrl-C", "backup", "restore" if self.saved.exists() else "backup"])
        print(f"{len(self.done())} of {self.products} done: {what}")  # noqa: T201 - pytest shows it when the test fails
        if what == "backup":
            self.backup()
        elif what == "restore":
            self.restore()
            self._restored = True
        elif what.startswith("kill"):
            self.kill(self._working, workers_too=what == "kill group")
            self._working, self._restored = None, False
        else:
            code = self.deployment.stop(self._working, signal.SIGINT)
            assert code == 130 or (code == 1 and self._restored), self.deployment.log(self._working)
            self.wait_for_orphans()
            self.remember(self.file)
            self._working, self._restored = None, False

    def finish(self) -> None:
        """Let the job end undisturbed, with the repaired function."""
        if self._working is not None:
            self.wait_for_end(self._working)
        code = self.wait_for_end(self.start())
        if code == 3:
            self.repair_and_retry()
            code = self.wait_for_end(self.start())
        assert code == 0, self.deployment.log(f"run-{self._runs}")

    # ---- what the ledger and the shop say ----------------------------------------------------------------------------

    def done(self, file: Path | None = None) -> set[str]:
        """Return the finished items of a database."""
        try:
            return {key for (key,) in rows(f"sqlite:///{file or self.file}", DONE_KEYS)}
        except sqlite3.OperationalError:  # the first run is creating the file and its tables
            return set()

    def is_finished(self) -> bool:
        """Return whether the ledger has the job as finished."""
        try:
            return rows(self.database, "SELECT 1 FROM jobs WHERE id = 'prices' AND finished_at IS NOT NULL") != []
        except sqlite3.OperationalError:
            return False

    def requests(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "requests.jsonl")

    def check(self) -> None:
        """Check the whole history after the last run."""
        wanted = {
            row["sku"]: row["name"]
            for row in csv.DictReader((self.directory / "products.csv").open(encoding="utf-8", newline=""))
        }
        assert len(wanted) == self.products

        # The ledger: each item done once, with one result.
        assert assert_counters_match_items(self.database, "prices") == Counter(done=self.products)
        assert self.done() == wanted.keys()
        results = rows(self.database, "SELECT idx, count(*) FROM results GROUP BY idx")
        assert sorted(results) == [(idx, 1) for idx in range(self.products)]
        assert_nothing_held(self.database)
        assert rows(self.database, "PRAGMA integrity_check") == [("ok",)]

        # The shop: it answered every item, and got no request for an item that was done.
        requests = self.requests()
        assert {request["sku"] for request in requests if request["status"] == 200} == wanted.keys()
        for finished in self.finished:
            again = finished.items & {request["sku"] for request in requests[finished.begin : finished.end]}
            assert not again, f"finished items were requested again: {sorted(again)[:5]}"
        answered = Counter(request["sku"] for request in requests if request["status"] in (200, 500))
        recorded = rows(
            self.database,
            "SELECT i.key, 1 + (SELECT count(*) FROM attempts a JOIN causes c ON c.job = a.job AND c.no = a.cause"
            " WHERE a.job = i.job AND a.idx = i.idx AND c.type IN ('HTTPStatusError', 'ValueError'))"
            " FROM input_products i",
        )
        invented = {key: runs for key, runs in recorded if runs > answered[key]}
        assert not invented, f"the ledger has answers that the shop never gave: {invented}"

        # The table: one row per item, with its input.
        self.run("headway results prices --with-input --output prices.csv")
        with (self.directory / "prices.csv").open(encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        assert [row["key"] for row in table] == list(wanted)
        for number, row in enumerate(table):
            assert (row["input.sku"], row["input.name"]) == (row["key"], wanted[row["key"]])
            assert (row["price"], row["currency"]) == (str(round(4.90 + number / 100, 2)), "EUR")

        # The events: everything that was decided arrived.
        decided = [id for (id,) in rows(self.database, "SELECT id FROM outbox WHERE job = 'prices'")]
        told = read_lines(self.directory / "events.jsonl")
        assert_every_event_at(told, decided, "the shop")

        # The processes: only the shop is left, without a connection.
        self.wait_for_orphans()
        eventually(lambda: descriptors(self.shop) <= self._shop_descriptors, 60, "connections to the shop are closed")
        self.deployment.stop("shop")
        self.deployment.assert_no_orphans()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, without one that is being written."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@pytest.mark.req("S3-02", "S3-05", "S3-06", "S3-22")
def test_a_run_that_is_killed_restored_and_repaired_does_every_item_once(deploy: Deploy):
    batch = Batch(deploy, products=600)

    run = batch.start()
    batch.wait_until_done(run, 60)
    batch.kill(run, workers_too=False)

    run = batch.start()
    batch.wait_until_done(run, 120)
    batch.backup()
    batch.wait_until_done(run, 180)
    batch.kill(run, workers_too=True)

    # The backup is of an earlier run: this one cannot go on under it.
    run = batch.start()
    batch.wait_until_done(run, 240)
    batch.restore()
    assert batch.wait_for_end(run) == 1
    assert "Run the same command again" in batch.deployment.log(run)

    # The backup is of the same run: it goes on by itself.
    run = batch.start()
    batch.wait_until_done(run, 200)
    pid = batch.deployment.processes[run].pid
    opened = descriptors(pid)
    batch.backup()
    batch.wait_until_done(run, 400)
    assert descriptors(pid) <= opened + 4, "the run opens more and more descriptors"
    batch.restore()
    assert batch.wait_for_end(run) == 3
    assert "no longer has the records of" in batch.deployment.log(run)
    dead = {idx for (idx,) in rows(batch.database, "SELECT idx FROM dead_letters")}
    assert dead >= set(range(5, batch.products, 40)), "products with a decimal comma are dead"

    batch.repair_and_retry()
    assert batch.wait_for_end(batch.start()) == 0
    batch.check()


def test_more_programs_than_descriptors_fail_no_item(deploy: Deploy):
    products = 600
    deployment = deploy("batch", PRODUCTS=str(products))
    assert deployment.run("python make_products.py").returncode == 0
    deployment.shell_setup = ["ulimit -n 256"]
    ended = deployment.run(LABELS, 180)
    assert ended.returncode == 0, ended.stderr
    assert "No more programs can be started at once: Too many open files" in ended.stderr
    database = f"sqlite:///{deployment.directory}/headway.db"
    assert assert_counters_match_items(database, "labels") == Counter(done=products)
    assert rows(database, "SELECT count(*) FROM attempts") == [(0,)]
    wrong = rows(
        database,
        "SELECT i.key FROM input_products i LEFT JOIN results r ON r.job = i.job AND r.idx = i.idx"
        " WHERE r.result IS NULL OR json_extract(r.result, '$') <> json_extract(i.payload, '$.name')",
    )
    assert wrong == []
    assert_nothing_held(database)
    deployment.assert_no_orphans()


def test_ctrl_c_while_items_are_registered_ends_the_run_and_the_same_command_continues(deploy: Deploy):
    count = 300_000
    deployment = deploy("batch")
    assert deployment.run(f"seq {count} > numbers.jsonl").returncode == 0
    deployment.shell_setup = ["ulimit -n 256"]
    database = f"sqlite:///{deployment.directory}/headway.db"

    def registered() -> int:
        try:
            return int(rows(database, "SELECT count(*) FROM input_products")[0][0])
        except sqlite3.OperationalError:  # the run is creating the file and its tables
            return 0

    process = deployment.start("numbers", NUMBERS)
    eventually(registered, 120, "the run registers items")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(20) == 130, deployment.log("numbers")
    assert "The same command continues." in deployment.log("numbers")
    assert 0 < registered() < count
    assert rows(database, "SELECT count(*) FROM progress") == [(0,)]
    assert_nothing_held(database)
    deployment.assert_no_orphans()

    ended = deployment.run(NUMBERS, 200)
    assert ended.returncode == 0, ended.stderr
    assert assert_counters_match_items(database, "numbers") == Counter(done=count)
    assert rows(database, "SELECT count(*), count(DISTINCT payload) FROM input_products") == [(count, count)]
    assert_nothing_held(database)
    deployment.assert_no_orphans()


@pytest.mark.faults
def test_random_kills_and_restores_lose_and_repeat_nothing(deploy: Deploy, chance: random.Random):
    """Disturb runs at random, for HEADWAY_SCENARIO_SECONDS in all; each job is then finished and checked."""
    until = time.monotonic() + float(os.environ.get("HEADWAY_SCENARIO_SECONDS", "600"))
    while time.monotonic() < until:
        batch = Batch(deploy, products=2_000)
        while time.monotonic() < until and not batch.is_finished():
            batch.disturb(chance)
        batch.finish()
        batch.check()

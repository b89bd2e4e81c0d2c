"""What an item, a group of items, a claim and an idle worker cost PostgreSQL, Redis and the processor.

    python bench/scale.py [--quick] [--only WORD ...] [--ten-million] > bench/results/scale.json
    python bench/measure/fleet_model.py bench/results/scale.json

Counts, not rates: statements, round trips, WAL bytes, processor seconds, bytes on disk, Redis commands. They are the servers'
and the kernel's own (`bench/measure/cost.py`) and hold on a loaded machine too; the rates beside them do not. A job's run
is measured in two parts: registration of its items, and the rest. `docs/internals/scale.md` says what
follows from the figures, and `bench/measure/fleet_model.py` computes it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, Self

from fleet import HEADWAY, Servers, wait_for, write_items
from measure import ROOT, Report, say, scratch, short
from measure.cost import COUNTING, Meter

from headway.ledger import Done, Ledger, NewItem
from headway.ledger.fleet import fleet
from headway.ledger.fleet.share import Share

#: No single job takes longer than this.
LIMIT = 900.0
#: Blocks claimed to see how many there can be in a second.
CLAIMS = 2_000
TABLES = ("input_products", "progress", "results", "blocks", "transactions", "tasks", "jobs")
FUNCTIONS = {0: "measure.noop:noop", 20: "measure.noop:wait", 1000: "measure.noop:wait_second"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer items and slots, rough figures in two minutes")
    parser.add_argument("--only", nargs="*", help="local, growth, slots, idle, claim")
    parser.add_argument("--slots", type=int, nargs="*", help="default 1 2 4 8 16 32")
    parser.add_argument("--ten-million", action="store_true", help="register 10^7 items and work a tenth of them off")
    options = parser.parse_args()
    report = Report("scale", quick=options.quick)
    counts = [10_000, 100_000] if options.quick else [10_000, 100_000, 1_000_000]
    slots = options.slots or ([1, 2, 4] if options.quick else [1, 2, 4, 8, 16, 32])
    parts: dict[str, Callable[[Servers], None]] = {
        "idle": lambda servers: measure_idle(report, servers, slots[-1] // 2 or 1),
        "local": lambda servers: measure_local(report, servers, counts),
        "growth": lambda servers: measure_growth(report, servers, counts),
        "slots": lambda servers: measure_slots(report, servers, slots, seconds=4 if options.quick else 10),
        "claim": lambda servers: measure_claims(report, servers, [0, 100, 1_000]),
    }
    with scratch() as place, Servers(place, **COUNTING) as servers:
        for name, measure in parts.items():
            if not options.only or name in options.only:
                measure(servers)
        if options.ten_million:
            measure_ten_million(report, servers)
    report.print()


# ---- what is measured ---------------------------------------------------------------------------------------------


def measure_idle(report: Report, servers: Servers, workers: int) -> None:
    """What workers cost that have nothing to do."""
    with Machine(servers, workers) as machine:
        time.sleep(3)
        before, began = machine.meter.read(), time.monotonic()
        time.sleep(10)
        cost = (machine.meter.read() - before).per(workers * (time.monotonic() - began))
        connections = machine.meter.connections() / workers
    add(report, f"idle, {workers} workers", "round_trips", cost, "round trips/worker/s", connections=short(connections))


def measure_local(report: Report, servers: Servers, counts: list[int]) -> None:
    for count in counts:
        with Machine(servers, 0) as machine:
            machine.run_job(report, count, 0, "local", "--workers", "2")


def measure_growth(report: Report, servers: Servers, counts: list[int]) -> None:
    """Items that do nothing, on two slots."""
    with Machine(servers, 2) as machine:
        for count in counts:
            machine.run_fleet(report, count, 0, 2)


def measure_slots(report: Report, servers: Servers, slots: list[int], *, seconds: int) -> None:
    for number in slots:
        with Machine(servers, number) as machine:
            machine.run_fleet(report, 20_000, 0, number)
            machine.run_fleet(report, number * 50 * seconds, 20, number)
            if number == slots[-1]:
                machine.run_fleet(report, number * seconds, 1000, number)


def measure_claims(report: Report, servers: Servers, others: list[int]) -> None:
    """How many blocks a second can be claimed of one job at most, beside the open blocks of so many other slots: four
    processes do nothing but claim. What is left of a second is how long one claim has the job's row."""
    for number in others:
        with Machine(servers, 0) as machine:
            with Ledger.open(machine.url) as ledger:
                job = ledger.create("bench")
                job.register(NewItem(idx, str(idx)) for idx in range(CLAIMS * 10))
                job.seal(settle=False)
                hold = ledger.hold(job, {"fleet": True})
                fleet.hand_over(ledger.database, hold, work="", queue="normal", slots=None, most=None, has_pass=True)
                for other in range(number):
                    a_share(ledger, f"slot other.{other}", lease=3600.0).claim_some(1)
            before, began = machine.meter.read(), time.monotonic()
            spawn = multiprocessing.get_context("spawn")
            claimants = [spawn.Process(target=claim, args=(machine.url, name)) for name in range(4)]
            for process in claimants:
                process.start()
            for process in claimants:
                process.join(LIMIT)
            counted = machine.meter.read() - before
            first, last = machine.meter.ask("SELECT min(updated_at), max(updated_at) FROM headway.progress")
            seconds = last - first
        report.add(
            f"claims of one job, {number} other slots", CLAIMS / seconds, "claims/s", others=number,
            lock_ms=short(1000 * seconds / CLAIMS), per=shortened(counted.per(CLAIMS)),
            load=short(os.getloadavg()[0]), waited=short(time.monotonic() - began),
        )  # fmt: skip


def a_share(ledger: Ledger, slot: str, **settings: float) -> Share:
    job = ledger.job("bench")
    known = fleet.read(ledger.database, job.no)
    assert known is not None
    return Share(ledger.database, job.id, known, slot, **settings)


def claim(url: str, name: int) -> None:
    """Claim and record, as a slot whose items take no time and that has one of them in each block."""
    with Ledger.open(url) as ledger:
        share = a_share(ledger, f"slot ours.{name}")
        for _ in range(CLAIMS // 4):
            share.record([Done(item.idx) for item in share.claim_some(1)])


def measure_ten_million(report: Report, servers: Servers) -> None:
    """Ten million items registered; of them as many worked off as two slots do in a minute."""
    with Machine(servers, 2) as machine:
        machine.run_fleet(report, 10_000_000, 0, 2, stop_after=60.0)


# ---- how ----------------------------------------------------------------------------------------------------------


class Machine:
    """A machine with so many warm workers, a database and a Redis of their own, and a meter on all of them."""

    def __init__(self, servers: Servers, workers: int) -> None:
        self._servers, self._workers = servers, workers

    def __enter__(self) -> Self:
        self.url = url = self._servers.database(with_tables=True)
        redis = self._servers.fresh_redis()
        self._env = {**os.environ, "HEADWAY_DATABASE": url, "HEADWAY_REDIS": redis, "HEADWAY_QUEUE_REDIS": redis}
        self.meter = Meter(url, redis, self._servers.postgres.pid)
        self._worker: subprocess.Popen[bytes] | None = None
        if self._workers:
            with open(self._servers.place / "worker.log", "ab") as log:
                self._worker = subprocess.Popen(
                    [str(HEADWAY), "worker", "--workers", str(self._workers)],
                    cwd=ROOT / "bench", env=self._env, stdout=log, stderr=log,
                )  # fmt: skip
            self.meter.worker = self._worker.pid
            wait_for(url, f"SELECT count(*) >= {self._workers} FROM headway.task_workers WHERE ended_at IS NULL")
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.send_signal(signal.SIGTERM)
            try:
                self._worker.wait(60)
            except subprocess.TimeoutExpired:
                self._worker.kill()
        self.meter.close()

    def run_fleet(
        self, report: Report, count: int, item_ms: int, slots: int, *, stop_after: float | None = None
    ) -> None:
        self.run_job(
            report, count, item_ms, "fleet", "--fleet", "--detach", "--slots", str(slots), slots=slots, stop_after=stop_after
        )  # fmt: skip

    def run_job(
        self,
        report: Report,
        count: int,
        item_ms: int,
        kind: str,
        *words: str,
        slots: int = 0,
        stop_after: float | None = None,
    ) -> None:
        job, meter = f"bench-{time.monotonic_ns()}", self.meter
        start = meter.read()
        sizes = meter.bytes_on_disk(TABLES)
        began = time.monotonic()
        command = subprocess.Popen(
            [
                str(HEADWAY), "run", FUNCTIONS[item_ms], "--items", str(write_items(self._servers.place, count)), "--job",
                job, "--progress", "none", *words,
            ],
            cwd=ROOT / "bench", env=self._env, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        if kind == "local":
            meter.worker = command.pid
            wait("EXISTS (SELECT FROM headway.progress)", meter)
        else:
            wait(
                f"EXISTS (SELECT FROM headway.fleets f JOIN headway.jobs j ON j.no = f.job WHERE j.id = '{job}')", meter
            )
        registered, handed_over = meter.read(), time.monotonic()
        meter.most_connections = 0
        if kind == "fleet":
            _, status, used = os.wait4(command.pid, 0)
            assert status == 0, "the command failed"
        question = f"(SELECT finished_at FROM headway.jobs WHERE id = '{job}') IS NOT NULL"
        if stop_after is not None:
            question = f"{time.time() + stop_after} < extract(epoch FROM clock_timestamp())"
        wait(question, meter)
        end = meter.read()
        seconds = time.monotonic() - handed_over
        if kind == "local":
            _, status, used = os.wait4(command.pid, 0)
            assert status == 0, "the command failed"
        done, steady, recorded = self._rates(job)
        if stop_after is not None:
            subprocess.run([str(HEADWAY), "stop", job], env=self._env, check=True, stdout=subprocess.DEVNULL)
        else:
            assert done == count, "headway lost something"
        grown = {name: size - sizes[name] for name, size in meter.bytes_on_disk(TABLES).items()}
        facts: dict[str, Any] = {
            "kind": kind, "items": count, "done": done, "slots": slots, "item_ms": item_ms, "seconds": short(seconds),
            "rate": short(recorded), "steady_rate": short(steady),
            "register_seconds": short(handed_over - began), "register": shortened((registered - start).per(count)),
            "start_cpu": short(used.ru_utime + used.ru_stime), "start_megabytes": short(used.ru_maxrss / 1024),
            "whole": shortened((end - registered).per(1)),
            "bytes": {name: short(size / (count if name == "input_products" else done)) for name, size in grown.items()},
            "connections": meter.most_connections, "load": short(os.getloadavg()[0]),
        }  # fmt: skip
        if slots:
            facts["of_ideal"] = short(steady / (slots * 1000 / item_ms)) if item_ms else None
        name = f"{kind}, {count:,} items of {item_ms} ms" + (f", {slots} slots" if slots else "")
        add(report, name, "server_cpu", (end - registered).per(done), "s of server CPU/item", **facts)

    def _rates(self, job: str) -> tuple[int, float, float]:
        """How many are done; items per second in the middle half of the time, and from the first record to the last."""
        done, first, last = self.meter.ask(
            "SELECT count(*), min(p.updated_at), max(p.updated_at) FROM headway.progress p JOIN headway.jobs j "
            "ON j.no = p.job WHERE j.id = %s AND p.status = 'done'",
            job,
        )
        quarter = max(last - first, 1e-3) / 4
        middle = self.meter.ask(
            "SELECT count(*) FROM headway.progress p JOIN headway.jobs j ON j.no = p.job WHERE j.id = %s "
            "AND p.updated_at BETWEEN %s AND %s",
            job, first + quarter, last - quarter,
        )  # fmt: skip
        return done, middle / (2 * quarter), done / (4 * quarter)


def wait(question: str, meter: Meter) -> None:
    """Until it is so; the connections are counted meanwhile."""
    end = time.monotonic() + LIMIT
    while not meter.ask(f"SELECT {question}"):
        if time.monotonic() > end:
            raise SystemExit(f"not within {LIMIT:g} s: {question}")
        meter.connections()
        time.sleep(0.05)


def add(report: Report, name: str, figure: str, cost: dict[str, float], unit: str, **facts: Any) -> None:
    report.add(name, cost[figure], unit, per=shortened(cost), **facts)
    say("    " + ", ".join(f"{key} {short(value):g}" for key, value in cost.items()))


def shortened(values: dict[str, float]) -> dict[str, float]:
    return {name: short(value) for name, value in values.items()}


if __name__ == "__main__":
    main()

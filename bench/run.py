"""How fast `headway run` is, and how much it needs.

    python bench/run.py [--quick | --full] [--items N] [--rounds N] [--tasks N]

The real command runs no-op items with two worker processes on a SQLite file, every item durably recorded, side by side
with a bare loop (`measure/bare.py`) and with task queues on a Redis of our own (`peers/`). Each round measures all of
them once, so that what disturbs the machine disturbs all; figures, also ratios, are medians over the rounds.
Registering the items (headway), making the chunks (bare loop) and enqueuing (peers) are not part of the compared time;
their rates are figures of their own. ``--full`` adds a million items: memory of the parent, and how soon a killed run
works again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from measure import ROOT, Report, bare, median, say, scratch
from peers import ON_REDIS, Peer, install

import headway
from headway.ledger import Ledger
from headway.run import plan as plans
from headway.run.items import FileItems
from tests.services import redis as redis_service

BIN = Path(sys.executable).parent
WORKERS = 2
#: No single measurement takes longer than this.
LIMIT = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 seconds, rough figures")
    parser.add_argument("--full", action="store_true", help="a million items besides")
    parser.add_argument("--items", type=int, help="default 100,000; 20,000 with --quick")
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--tasks", type=int, help="of each task queue; default 10,000; 2,000 with --quick; 0: none")
    options = parser.parse_args()
    report = Report("run", quick=options.quick)
    count = options.items or (20_000 if options.quick else 100_000)
    rounds = options.rounds or (1 if options.quick else 5)
    tasks = options.tasks if options.tasks is not None else 2_000 if options.quick else 10_000
    with scratch() as place:
        measure_start(report, place, times=5 if options.quick else 15)
        measure_rate(report, place, count, rounds, tasks)
        measure_registration(report, place, count)
        measure_track(report, place, count)
        measure_async(report, place, rounds)
        measure_executor(report, place, count // 5, rounds)
        measure_programs(report, place, 300 if options.quick else 1_000, rounds)
        if options.full:
            measure_million(report, place)
    report.print()


# ---- start-up ---------------------------------------------------------------------------------------------------


def measure_start(report: Report, place: Path, *, times: int) -> None:
    say("start-up")
    database = f"sqlite:///{place}/start.db"
    Ledger.open(database).close()
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "headway --version": [str(BIN / "headway"), "--version"],
        "headway jobs": [str(BIN / "headway"), "jobs", "--database", database],
    }
    took: dict[str, list[float]] = defaultdict(list)
    for name, command in list(commands.items()) * (times + 1):
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        took[name].append(1000 * (time.monotonic() - began))
    for name, values in took.items():
        budget = None if name.startswith("python") else 120
        report.add(f"start-up of {name}", median(values[1:]), "ms", most=budget)  # the first one fills caches


# ---- rate -------------------------------------------------------------------------------------------------------


def measure_rate(report: Report, place: Path, count: int, rounds: int, tasks: int) -> None:
    say(f"{count:,} no-op items, {WORKERS} workers, {rounds} rounds")
    items = write_items(place, count)
    server = None
    contestants: dict[str, Callable[[], float]] = {
        "bare loop": lambda: bare_rate(place, count),
        "headway run": lambda: headway_rate(place, items, count, walls),
    }
    walls: list[float] = []
    enqueuing: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    trouble = install() if tasks else "the peers were not asked for"
    if trouble:
        report.leave_out(f"task queues: {trouble}")
    else:
        server = redis_service.RedisServer(place / "redis", redis_service.installations()[0])
        server.start()
    try:
        for _ in range(rounds):
            for name, measure in contestants.items():
                rates[name].append(measure())
                say(f"  {name}: {rates[name][-1]:,.0f}/s")
            for name in ON_REDIS if server else ():
                server.make_pristine()
                into, out, _ = Peer(name, server.url(), place).measure(tasks, LIMIT)
                enqueuing[name].append(into)
                rates[name].append(out)
                say(f"  {name}: {out:,.0f}/s")
    finally:
        if server is not None:
            server.discard()
    typical = {name: median(values) for name, values in rates.items()}
    for name, rate in typical.items():
        spread = (max(rates[name]) - min(rates[name])) / rate
        what = "tasks done" if name in ON_REDIS else "items recorded"
        report.add(f"{name}: {what}", rate, f"{what[:5]}/s", spread=round(spread, 2), rounds=rounds)
    report.add("headway run / bare loop", ratio(rates, "bare loop"), "x", least=0.2)
    if server is not None:
        fastest = max(ON_REDIS, key=typical.__getitem__)
        report.add("headway run / fastest task queue", ratio(rates, fastest), "x", least=10, fastest=fastest)
        for name, values in enqueuing.items():
            report.add(f"{name}: tasks enqueued", median(values), "tasks/s")
    report.add("headway run: the whole command, registering included", median(walls), "s", items=count)


def ratio(rates: dict[str, list[float]], other: str) -> float:
    """Of what ran next to each other: the median over the rounds."""
    return median([ours / theirs for ours, theirs in zip(rates["headway run"], rates[other], strict=True)])


def bare_rate(place: Path, count: int) -> float:
    path = place / "bare.db"
    bare.register(path, count)
    seconds = bare.run(path, WORKERS, LIMIT)
    remove(path)
    return count / seconds


def headway_rate(place: Path, items: Path, count: int, walls: list[float]) -> float:
    path = place / "headway.db"
    began = time.monotonic()
    out = subprocess.run(command(items, path), cwd=ROOT / "bench", check=True, capture_output=True, timeout=LIMIT)
    walls.append(time.monotonic() - began)
    outcome = json.loads(out.stdout)
    check_recorded(path, count)
    remove(path)
    return float(count / outcome["seconds"])


def command(items: Path, database: Path) -> list[str]:
    return [
        str(BIN / "headway"), "run", "measure.noop:noop", "--items", str(items), "--job", "bench",
        "--database", f"sqlite:///{database}", "--workers", str(WORKERS), "--progress", "none", "--json",
    ]  # fmt: skip


def check_recorded(path: Path, count: int) -> None:
    """Every item has its own row, the counters agree, and the job finished once."""
    connection = sqlite3.connect(path)
    (rows,) = connection.execute("SELECT count(*) FROM progress WHERE status = 'done'").fetchone()
    done, finished = connection.execute("SELECT done, finished_at FROM jobs").fetchone()
    (told,) = connection.execute("SELECT count(*) FROM outbox WHERE type = 'job.completed'").fetchone()
    connection.close()
    assert (rows, done, told) == (count, count, 1), "headway lost something"
    assert finished is not None, "headway did not finish"


def measure_registration(report: Report, place: Path, count: int) -> None:
    say("registration")
    source = FileItems(write_items(place, count))
    path = place / "register.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        began = time.monotonic()
        plan = plans.compare(ledger, "bench", "noop", source)
        looked = time.monotonic()
        plans.carry_out(ledger, ledger.create("bench"), plan, max_retries=2)
        report.add("headway run: items checked", count / (looked - began), "items/s")
        report.add("headway run: items registered", count / (time.monotonic() - looked), "items/s")
    remove(path)


def measure_track(report: Report, place: Path, count: int) -> None:
    say(f"track over {count:,} items")
    path = place / "track.db"
    items = list(range(count))
    tracker = headway.track(items, job="bench", database=f"sqlite:///{path}", progress="none")
    began = time.monotonic()
    for _ in tracker:
        pass
    report.add("headway.track: added to each item", 1000 * (time.monotonic() - began) / count, "ms", most=0.5)
    check_recorded(path, count)
    remove(path)


# ---- an event loop --------------------------------------------------------------------------------------------------


async def nap(_: int) -> None:
    await asyncio.sleep(0.05)


def measure_async(report: Report, place: Path, rounds: int) -> None:
    """2,000 items of 50 ms at 50 at once: two seconds would be ideal."""
    say(f"2,000 async items of 50 ms, {rounds} rounds")
    shares, path = [], place / "async.db"
    for _ in range(rounds):
        result = headway.map(nap, range(2_000), job="bench", database=f"sqlite:///{path}", workers=50, progress="none")
        check_recorded(path, 2_000)
        remove(path)
        shares.append(2.0 / result.seconds)
    report.add("map of async items: share of the ideal rate", median(shares), "x", least=0.9, rounds=rounds)


# ---- an executor of the user's ----------------------------------------------------------------------------------


def measure_executor(report: Report, place: Path, count: int, rounds: int) -> None:
    """No-op items in a ProcessPoolExecutor, beside the same call with workers of our own."""
    say(f"{count:,} items in a ProcessPoolExecutor, {rounds} rounds")
    ratios, rates = [], []
    for _ in range(rounds):
        with ProcessPoolExecutor(WORKERS) as executor:
            list(executor.map(abs, range(WORKERS)))
            own, theirs = (map_rate(place, count, each) for each in (None, executor))
        rates.append(theirs)
        ratios.append(theirs / own)
    report.add("map in a ProcessPoolExecutor: items recorded", median(rates), "items/s", rounds=rounds)
    report.add("map in a ProcessPoolExecutor / in workers of our own", median(ratios), "x", least=0.5)


def map_rate(place: Path, count: int, executor: ProcessPoolExecutor | None) -> float:
    path = place / "map.db"
    result = headway.map(
        abs, range(count), job="bench", database=f"sqlite:///{path}", workers=WORKERS, progress="none", executor=executor,
        start=None if executor is not None else "fork",
    )  # fmt: skip
    check_recorded(path, count)
    remove(path)
    return count / result.seconds


# ---- programs ---------------------------------------------------------------------------------------------------


def measure_programs(report: Report, place: Path, count: int, rounds: int) -> None:
    """``true`` for each item: all of it is starting a program and writing down what became of it. Neither command's own
    start counts: ours by its outcome, theirs from the start of the first program to the end of the last in its log."""
    parallel = find_parallel(place)
    if parallel is None:
        report.leave_out("GNU parallel: neither on PATH nor to be had as Debian's package")
        return
    say(f"{count:,} programs, {WORKERS} at once, {rounds} rounds")
    lines = place / f"lines-{count}.txt"
    lines.write_text("".join(f"{number}\n" for number in range(count)))
    database, log = place / "programs.db", place / "joblog"
    ours = [
        str(BIN / "headway"), "run", "--items", str(lines), "--job", "bench", "--database", f"sqlite:///{database}",
        "--workers", str(WORKERS), "--progress", "none", "--json", "--", "true", "{}",
    ]  # fmt: skip
    theirs = [*parallel, "--will-cite", "-j", str(WORKERS), "--joblog", str(log), "true", "{}", "::::", str(lines)]
    rates: dict[str, list[float]] = {"headway run": [], "GNU parallel": [], "nothing but starting them": []}
    for _ in range(rounds):
        rates["nothing but starting them"].append(bare.start_programs(count, WORKERS, LIMIT))
        out = subprocess.run(ours, check=True, capture_output=True, timeout=LIMIT, cwd=place)
        rates["headway run"].append(count / json.loads(out.stdout)["seconds"])
        subprocess.run(theirs, check=True, capture_output=True, timeout=LIMIT, cwd=place)
        rows = [line.split("\t") for line in log.read_text().splitlines()[1:]]
        began = min(float(row[2]) for row in rows)
        rates["GNU parallel"].append(count / (max(float(row[2]) + float(row[3]) for row in rows) - began))
        say("  " + ", ".join(f"{name}: {values[-1]:,.0f}/s" for name, values in rates.items()))
        check_recorded(database, count)
        assert len(rows) == count, "GNU parallel lost something"
        remove(database)
        log.unlink()
    for name, values in rates.items():
        report.add(f"{name}: programs run", median(values), "programs/s", rounds=rounds)
    report.add("headway run -- true / GNU parallel --joblog", ratio(rates, "GNU parallel"), "x", least=5)
    report.add("headway run -- true / nothing but starting them", ratio(rates, "nothing but starting them"), "x")


def find_parallel(place: Path) -> list[str] | None:
    """GNU parallel from PATH, else from Debian's package, unpacked into the scratch directory and not installed."""
    found = shutil.which("parallel")
    if found:
        return [found]
    perl = shutil.which("perl")
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["apt-get", "download", "parallel"], cwd=place, check=True, capture_output=True, timeout=60)
        (package,) = place.glob("parallel_*.deb")
        subprocess.run(["dpkg", "-x", package, place / "parallel"], check=True, capture_output=True, timeout=60)
        return [perl, str(place / "parallel/usr/bin/parallel")] if perl else None
    return None


# ---- a million --------------------------------------------------------------------------------------------------


def measure_million(report: Report, place: Path, count: int = 1_000_000) -> None:
    say(f"{count:,} items, killed half-way and resumed")
    items, path = write_items(place, count), place / "million.db"
    first = start(command(items, path))
    memory = follow(first, path, until=count // 2)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30)
    time.sleep(1)  # its workers end by themselves
    before = recorded(path)
    began = time.monotonic()
    second = start(command(items, path))
    try:
        while recorded(path) <= before and time.monotonic() < began + LIMIT:
            time.sleep(0.01)
        resumed = time.monotonic() - began
        memory = max(memory, follow(second, path, until=count + 1))
        assert second.wait(60) == 0, "the resumed run failed"
    finally:
        second.kill()
        second.wait(30)
    check_recorded(path, count)
    report.add("1,000,000 items: peak memory of the parent", memory, "MB", most=200)
    report.add("1,000,000 items: killed at half, the first new record after", resumed, "s", most=5, done_before=before)
    report.add("1,000,000 items: database", path.stat().st_size / 2**20, "MB")
    remove(path)


def start(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=ROOT / "bench", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def follow(process: subprocess.Popen[bytes], path: Path, *, until: int) -> float:
    """Wait until so many items are recorded or the process ended; the most memory it ever had, in MB."""
    most = 0.0
    end = time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < end and recorded(path) < until:
        status = Path(f"/proc/{process.pid}/status").read_text()
        # The kernel keeps the maximum itself: looking now and then misses only what was new in the last moment.
        peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
        most = max(most, int(peak) / 1024)
        time.sleep(0.02)
    return most


def recorded(path: Path) -> int:
    """How many items are recorded, read as any other process may read it."""
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
    except sqlite3.OperationalError:
        return 0  # not there yet
    try:
        row = connection.execute("SELECT done FROM jobs").fetchone()
        return int(row[0]) if row else 0
    except sqlite3.OperationalError:
        return 0  # it has no tables yet
    finally:
        connection.close()


# ---- files ------------------------------------------------------------------------------------------------------


def write_items(place: Path, count: int) -> Path:
    path = place / f"items-{count}.jsonl"
    if not path.exists():
        path.write_text("".join(f"{number}\n" for number in range(count)))
    return path


def remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


if __name__ == "__main__":
    main()

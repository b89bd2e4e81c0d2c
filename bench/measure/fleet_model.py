"""A model of a fleet: slots that claim blocks of one job behind its row, and record groups, on one PostgreSQL.

    python bench/measure/fleet_model.py [bench/results/scale.json ...] [--workers N ...]

It computes what no machine here can try: a thousand workers and 10^9 items. A slot does what `headway.run.fleet.slot` and
`headway.run.pool` do, by their own constants; what each step costs PostgreSQL was measured by `bench/scale.py` (`Costs`).
With results of that benchmark it is first compared with the measured runs. Everything is counted in events: a step asks the
network, a processor of the server, the log's flush or the job's row, and waits for its turn. Given a seed, it always says the
same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

#: As in `headway.run.pool` and `headway.run.fleet.slot`; a test compares them.
COMMIT_PAUSE = 0.02
COMMIT_SECONDS = 0.25
COMMIT_MOST = 4000
BATCH_SECONDS = 0.05
BATCH_MOST = 1000
BLOCK_SECONDS = 2.0
BLOCK_SECONDS_MOST = 30.0
CLAIM_TIMES = 20.0
BLOCK_MOST = 20_000


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured. Seconds are of a processor of the server unless they say otherwise."""

    statement: float = 290e-6  # one round trip: parsing, executing, sending
    item: float = 26e-6  # one item recorded, besides its statements
    item_client: float = 12e-6  # the same, of the worker's processors
    statement_client: float = 500e-6
    item_wal: float = 385.0  # bytes
    group_wal: float = 330.0  # what a transaction that records writes besides its items
    claim_wal: float = 1000.0
    group_trips: int = 4
    claim_trips: int = 11  # so many while the job's row is locked
    #: Round trips of a busy slot and its worker in a second that come with neither item nor claim, and their WAL.
    background: float = 19.0
    background_wal: float = 700.0


@dataclass(frozen=True, slots=True)
class Site:
    """The server and the way to it."""

    cores: int = 16
    flush: float = 0.0005  # seconds of one flush of the log, however many wait for it
    wal_rate: float = 500e6  # bytes a second
    trip: float = 0.00025  # seconds there and back
    #: Processors that the workers share with the server; none: every worker has its own.
    shared: bool = False


MEASURED = Costs()
LARGE = Site()
#: The machine on which was measured: two processors, which the workers and the server share.
HERE = Site(cores=2, flush=0.002, trip=0.00005, shared=True)


@dataclass(slots=True)
class Outcome:
    seconds: float
    recorded: int = 0
    claimed: int = 0
    claims: int = 0
    groups: int = 0
    busy: dict[str, float] = field(default_factory=dict)  # share of its capacity
    row_wait: float = 0.0  # mean seconds until a claim has the job's row
    wal: float = 0.0
    left: int = 0  # items that nobody has claimed

    @property
    def rate(self) -> float:
        return self.recorded / self.seconds

    @property
    def tightest(self) -> str:
        return max(self.busy, key=lambda name: self.busy[name])


#: A step of a slot: ("sleep", seconds), ("cpu", seconds), ("flush", bytes), ("lock",), ("unlock",).
Step = tuple[Any, ...]
Process = Generator[Step, None, None]


class _Queue:
    """Servers side by side that take what comes in its order."""

    def __init__(self, world: _World, name: str, servers: int) -> None:
        self._world, self.name, self._free = world, name, servers
        self._waiting: deque[tuple[float, float, Process]] = deque()
        self.servers, self.used, self.waited, self.turns = servers, 0.0, 0.0, 0

    def ask(self, process: Process, seconds: float) -> None:
        self._waiting.append((self._world.now, seconds, process))
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            since, seconds, process = self._waiting.popleft()
            self._free -= 1
            self.waited += self._world.now - since
            self.turns += 1
            self.used += seconds
            self._world.at(seconds, partial(self._end, process))

    def _end(self, process: Process) -> None:
        self._free += 1
        self._world.step(process)
        self._serve()


class _Lock:
    """The job's row: one at a time, in the order they came."""

    def __init__(self, world: _World) -> None:
        self._world, self._held, self._since = world, False, 0.0
        self._waiting: deque[tuple[float, Process]] = deque()
        self.used, self.waited, self.turns = 0.0, 0.0, 0

    def ask(self, process: Process) -> None:
        self._waiting.append((self._world.now, process))
        self._next()

    def _next(self) -> None:
        if not self._held and self._waiting:
            since, process = self._waiting.popleft()
            self._held, self._since = True, self._world.now
            self.waited += self._world.now - since
            self.turns += 1
            self._world.at(0.0, lambda: self._world.step(process))

    def release(self) -> None:
        self._held = False
        self.used += self._world.now - self._since
        self._next()


class _Log:
    """The flush of the log: whoever waits when it begins is flushed together."""

    def __init__(self, world: _World, flush: float, rate: float) -> None:
        self._world, self._flush, self._rate = world, flush, rate
        self._waiting: list[Process] = []
        self._bytes, self._flushing = 0.0, False
        self.written = self.used = 0.0

    def ask(self, process: Process, size: float) -> None:
        self._waiting.append(process)
        self._bytes += size
        self._begin()

    def _begin(self) -> None:
        if self._flushing or not self._waiting:
            return
        together, self._waiting = self._waiting, []
        size, self._bytes, self._flushing = self._bytes, 0.0, True
        self.written += size
        self.used += size / self._rate
        self._world.at(self._flush + size / self._rate, lambda: self._end(together))

    def _end(self, together: list[Process]) -> None:
        self._flushing = False
        for process in together:
            self._world.step(process)
        self._begin()


class _World:
    def __init__(self, site: Site) -> None:
        self.now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.cpu = _Queue(self, "processors", site.cores)
        self.lock = _Lock(self)
        self.log = _Log(self, site.flush, site.wal_rate)

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def step(self, process: Process) -> None:
        try:
            kind, *arguments = next(process)
        except StopIteration:
            return
        if kind == "cpu":
            self.cpu.ask(process, arguments[0])
        elif kind == "flush":
            self.log.ask(process, arguments[0])
        elif kind == "lock":
            self.lock.ask(process)
        elif kind == "unlock":
            self.lock.release()
            self.at(0.0, lambda: self.step(process))
        else:
            self.at(arguments[0], lambda: self.step(process))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until


def simulate(  # noqa: PLR0915 - the steps of one slot, in their order
    workers: int,
    item: float,
    *,
    items: float = 1e9,
    costs: Costs = MEASURED,
    site: Site = LARGE,
    seconds: float = 10.0,
    claim_times: float = CLAIM_TIMES,
    cold: bool = False,
    seed: int = 1,
) -> Outcome:
    """So many workers at a job whose items take ``item`` seconds each, for ``seconds``, from when every slot has a block and
    knows how large one should be (``cold``: from its beginning); a job that is through earlier ends earlier.
    ``claim_times``: a block lasts at least so many times as long as its claim took."""
    world, chance, result = _World(site), random.Random(seed), Outcome(seconds)
    each = item + costs.item_client
    # A worker reports what it did in about this time together, and has no more than twice that to go on with.
    batch = max(1, min(BATCH_MOST, int(BATCH_SECONDS / each))) if each <= BATCH_SECONDS / 2 else 1
    hold = costs.claim_trips * (site.trip + costs.statement_client + costs.statement) + site.flush
    lasts = min(BLOCK_SECONDS_MOST, max(BLOCK_SECONDS, 1.2 * workers * hold if claim_times else 0.0))
    first = max(1, min(BLOCK_MOST, round(lasts / each)))
    left, ended = int(items), 0.0

    def trips(count: int, more: float = 0.0) -> Process:
        """So many round trips, and ``more`` seconds of the server's. They ask for its processors once, all together."""
        if site.shared:
            yield "cpu", costs.statement_client * count
            yield "sleep", site.trip * count
        else:
            yield "sleep", (site.trip + costs.statement_client) * count
        yield "cpu", costs.statement * count + more

    def claim(size: int) -> Generator[Step, None, int]:
        nonlocal left
        yield ("lock",)
        yield from trips(costs.claim_trips)
        fair = -(-left // (2 * workers))
        taken = min(left, max(1, min(size, max(fair, size // 20))))
        left -= taken
        yield "flush", costs.claim_wal
        yield ("unlock",)
        yield from trips(1)  # reading its items, of which no other slot need wait for the end
        result.claims, result.claimed = result.claims + 1, result.claimed + taken
        return taken

    def slot() -> Process:
        nonlocal left, ended
        # Claims are spread evenly over the time that a block lasts.
        size, held = (1, 0) if cold else (first, chance.randint(first // 2 + 1, first // 2 + first))
        held = min(left, held, left // workers)
        left, result.claimed = left - held, result.claimed + held
        claimed_at, held_then = -(size // 2 + size - held) * each, size // 2 + size
        yield "sleep", chance.random() * batch * each
        made = free = attended = world.now
        while True:
            if held <= size // 2 and left:
                began, before = world.now, held
                held += yield from claim(size)
                aim = min(BLOCK_SECONDS_MOST, max(BLOCK_SECONDS, claim_times * (world.now - began)))
                rate = (held_then - before) / max(began - claimed_at, 1e-3)
                size = round(min(8.0 * size, max(0.25 * size, rate * aim)))
                size, claimed_at, held_then = max(1, min(size, BLOCK_MOST)), world.now, held
            if not held:
                return
            group = min(batch, held)
            made = max(made, world.now - 2 * batch * each) if batch > 1 else world.now
            yield "sleep", max(0.0, made + group * each - world.now, free - world.now)
            group = min(held, COMMIT_MOST, max(group, batch * int((world.now - made) / (batch * each) + 1e-9)))
            made += group * each
            began = world.now
            if site.shared:
                yield "cpu", costs.item_client * group
            yield from trips(costs.group_trips, costs.item * group)
            yield "flush", costs.group_wal + costs.item_wal * group
            held, free = held - group, max(world.now + COMMIT_PAUSE, began + COMMIT_SECONDS)
            result.groups, result.recorded, ended = result.groups + 1, result.recorded + group, world.now
            due = int((world.now - attended) * costs.background)
            if due:
                attended = world.now
                yield from trips(due)
                yield "flush", costs.background_wal / costs.background * due

    for _ in range(workers):
        world.step(slot())
    world.run(seconds)
    result.left = left
    if not left and result.recorded == result.claimed:
        result.seconds = ended
    result.wal = world.log.written
    result.busy = {
        "processors": world.cpu.used / world.cpu.servers / result.seconds,
        "row": world.lock.used / result.seconds,
        "wal": world.log.used / result.seconds,
    }
    result.row_wait = world.lock.waited / max(1, world.lock.turns)
    return result


def ideal(workers: int, item: float) -> float:
    return workers / item


# ---- on the command line ------------------------------------------------------------------------------------------


def fitted(runs: Sequence[dict[str, Any]], figures: dict[str, float]) -> tuple[float, float]:
    """(a, b) of the least squares of figure = a * items + b * round trips, each run weighing the same."""
    rows = [(run["done"], run["whole"]["round_trips"], figures[run["name"]]) for run in runs]
    xx = xy = yy = xz = yz = 0.0
    for items, trips, figure in rows:
        x, y = items / figure, trips / figure
        xx, xy, yy, xz, yz = xx + x * x, xy + x * y, yy + y * y, xz + x, yz + y
    scale = xx * yy - xy * xy
    return (xz * yy - yz * xy) / scale, (yz * xx - xz * xy) / scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 100, 300, 1000, 3000])
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    figures = [each for path in options.results for each in json.loads(path.read_text())["figures"]]
    runs = [each for each in figures if each.get("kind") == "fleet" and each["done"] == each["items"]]
    costs = MEASURED
    if runs:
        server = fitted(runs, {run["name"]: run["whole"]["server_cpu"] for run in runs})
        client = fitted(runs, {run["name"]: run["whole"]["worker_cpu"] for run in runs})
        costs = replace(costs, item=server[0], statement=server[1], item_client=client[0], statement_client=client[1])
        print(costs)
        compare(runs, costs)
    print("\nworkers  item ms      items/s of ideal tightest    processors   row WAL MB/s  claims/s  row wait, ms")
    for item in (0.001, 0.02, 1.0):
        for workers in options.workers:
            found = simulate(workers, item, costs=costs, seconds=options.seconds)
            busy = found.busy
            print(
                f"{workers:7,} {1000 * item:8g} {found.rate:12,.0f} {found.rate / ideal(workers, item):7.0%}   "
                f"{found.tightest:12}{busy['processors']:8.0%} {busy['row']:5.0%} {found.wal / found.seconds / 1e6:8.1f} "
                f"{found.claims / found.seconds:9.0f} {1000 * found.row_wait:12.0f}",
                flush=True,
            )


def compare(runs: Sequence[dict[str, Any]], costs: Costs) -> None:
    """Measured and computed, side by side. Rates are left out: others used the machine too, which the model does not know."""
    print(f"\n{'measured, computed':44} groups/item        WAL bytes/item     locks of the row/item")
    for run in runs:
        found = simulate(
            run["slots"], run["item_ms"] / 1000, items=run["items"], costs=costs, site=HERE, seconds=600.0, cold=True
        )
        pairs = (
            (run["per"]["groups"], found.groups),
            (run["per"]["wal_bytes"], found.wal),
            (run["per"]["locks"], found.claims),
        )
        words = [f"{measured:8.4g} {computed / run['items']:8.4g}" for measured, computed in pairs]
        print(f"{run['name']:44} {'  '.join(words)}")


if __name__ == "__main__":
    main()

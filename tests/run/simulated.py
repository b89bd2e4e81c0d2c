"""Runs in simulated time: what finished when, of every kind of work that people have. Each is the same at every call."""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from headway.run.display.estimate import RunSnapshot

#: How long an item takes, by how far the run is (0 to 1): a draw, of about ``mean`` seconds in the beginning.
Length = Callable[[random.Random, float, float], float]

SHAPES: dict[str, Length] = {
    "constant": lambda draw, mean, _: mean * draw.uniform(0.95, 1.05),
    "scattered": lambda draw, mean, _: draw.expovariate(1 / mean),
    "now and then a long one": lambda draw, mean, _: mean * draw.lognormvariate(-0.72, 1.2),
    "growing": lambda draw, mean, part: mean * (1 + 1.5 * part) * draw.uniform(0.7, 1.3),
    "shrinking": lambda draw, mean, part: mean * (1 - 0.6 * part) * draw.uniform(0.7, 1.3),
    "a slow tail": lambda draw, mean, part: mean * (3 if part > 0.9 else 1) * draw.uniform(0.7, 1.3),
    "waves": lambda draw, mean, part: mean * (2 if int(part * 20) % 2 else 1) * draw.uniform(0.7, 1.3),
    "failing": lambda draw, mean, _: draw.expovariate(1 / mean),
    "paused": lambda draw, mean, _: mean * draw.uniform(0.5, 1.5),
    "bursts": lambda draw, mean, _: mean * draw.uniform(0.99, 1.01),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """A run at one moment."""

    at: float
    snapshot: RunSnapshot


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """All that happened, in order; ``paused`` is from when to when nothing was begun."""

    shape: str
    moments: tuple[Moment, ...]
    paused: tuple[float, float] | None

    @property
    def end(self) -> float:
        return self.moments[-1].at

    def at(self, seconds: float) -> RunSnapshot:
        place = bisect_right(self.moments, seconds, key=lambda moment: moment.at)
        return self.moments[max(0, place - 1)].snapshot


def simulate(shape: str, seed: int) -> SimulatedRun:
    """A job of some hundred or thousand items on some workers, of which some were done before."""
    draw = random.Random(f"{shape} {seed}")
    length, workers = SHAPES[shape], draw.choice([1, 2, 4, 8, 16])
    total = draw.randint(300, 2000)
    kept = draw.choice([0, 0, total // 3])
    mean = draw.uniform(0.5, 3.0) * draw.uniform(120, 1200) * workers / (total - kept)
    failing = draw.choice([0.05, 0.15, 0.3]) if shape == "failing" else 0.0
    pause = None
    if shape == "paused":
        began = draw.uniform(0.1, 0.5) * mean * (total - kept) / workers
        pause = (began, began + draw.uniform(30, 600))
    order = count()
    events: list[tuple[float, int, int]] = []  # when an item ends, and how often it was tried before
    pending = iter([0] * (total - kept))
    retries: list[tuple[float, int]] = []
    done = dead = failures = running = 0
    moments = [Moment(0.0, RunSnapshot(total, kept, 0, workers, 0, 0, 0))]

    def begin(now: float) -> None:
        nonlocal running
        while running < workers:
            if pause is not None and pause[0] <= now < pause[1]:
                return
            due = retries and retries[0][0] <= now
            tries = heapq.heappop(retries)[1] if due else next(pending, -1)
            if tries < 0:
                return
            running += 1
            heapq.heappush(events, (now + length(draw, mean, done / (total - kept)), next(order), tries))

    now = 0.0
    begin(now)
    while done + dead < total - kept:
        ends, due = [at for at, _, _ in events[:1]], [at for at, _ in retries[:1] if running < workers]
        on = [at for at in pause or () if at > now]  # it is said when a pause begins and when it ends
        now = max(now, min(ends + due + on))
        if ends and ends[0] <= now:
            _, _, tries = heapq.heappop(events)
            running -= 1
            if draw.random() >= failing:
                done += 1
            else:
                failures += 1
                if tries == 2:
                    dead += 1
                else:
                    heapq.heappush(retries, (now + 2.0 * 2**tries, tries + 1))
        begin(now)
        asked = "alice" if pause is not None and pause[0] <= now < pause[1] else ""
        moments.append(
            Moment(now, RunSnapshot(total, kept, done, running, len(retries), dead, failures, paused_by=asked))
        )
    return SimulatedRun(shape, tuple(moments), pause)


def looks(run: SimulatedRun, seed: int, *, every: float) -> Iterator[float]:
    """Moments at which somebody looks at a run: every so much of it, at no round number."""
    draw = random.Random(seed)
    at = run.end * every * draw.random()
    while at < run.end:
        yield at
        at += run.end * every

"""The finish line as a model: two workers, a crawler, a relay; replies get lost, processes are killed, Redis is wiped.

The variants leave out one idea each (see docs/reference/finishline.md); the tests show what goes wrong without it. Names of
steps are those of the code: *count* and *crawled* are the scripts, *deliver* and *acknowledge* the relay.

Two items are worked off. A worker that was killed or whose call failed is started again and reports its item again
(redelivery). Each `Failure` spends one of a small budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.models.explorer import Model

ITEMS = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """Which ideas are in."""

    one_script: bool = True  # count and check in one step, else two commands
    identity: bool = True  # an item counts once
    outbox: bool = True  # the event is appended where DONE is set, else published by the caller afterwards
    crawl_end_checks: bool = True  # the end of the crawl looks at the finish line too
    journal: bool = False  # counts are committed to SQL first, and Redis is rebuilt from there
    wipes: bool = False  # Redis may lose everything


@dataclass(frozen=True, slots=True)
class State:
    # Redis
    exists: bool = True
    crawling: bool = True
    status_done: bool = False
    done: int = 0
    seen: frozenset[int] = frozenset()
    stream: int = 0  # entries in the outbox
    # SQL
    journal: frozenset[int] = frozenset()
    sql_crawled: bool = False
    told: bool = False
    # agents: what each is about to do
    workers: tuple[str, ...] = ("process",) * ITEMS
    crawler: str = "crawl"
    relay: str = "idle"
    # the world
    processed: frozenset[int] = frozenset()  # items that were really worked on
    published: int = 0  # deliveries of the event
    decided: int = 0  # how often the finish line was crossed
    faults: int = 0


def model(variant: Variant, faults: int) -> Model[State]:
    return Model(
        State(faults=faults),
        lambda state: _steps(state, variant),
        lambda state: _violation(state, variant),
        lambda state: _unfinished(state, variant),
    )


def _violation(state: State, variant: Variant) -> str | None:
    early = len(state.processed) < ITEMS or state.crawler == "crawl"
    if early and (state.status_done or state.published or state.stream):
        return "complete too early"
    if state.decided > 1 and not variant.wipes:
        return "decided twice"
    if not variant.outbox and state.published > 1:
        return "told twice by two deciders"
    return None


def _unfinished(state: State, variant: Variant) -> str | None:
    if not state.published:
        return "never told"
    if not variant.wipes and not (state.status_done and state.done == ITEMS):
        return "the counter is wrong"
    return None


def _steps(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    for index in range(ITEMS):
        yield from _worker(state, variant, index)
    yield from _crawler(state, variant)
    yield from _set_done(state)
    yield from _relay(state, variant)
    if variant.wipes and state.faults and state.exists:
        lost = replace(
            state, exists=False, status_done=False, done=0, seen=frozenset(), stream=0, faults=state.faults - 1
        )
        yield "wipe", replace(lost, relay="idle")
    if not state.exists and variant.journal:
        yield "restore", _restored(state)


def _restored(state: State) -> State:
    """install.lua: the journal's counts and identities, the record's status, and a look at the finish line."""
    back = replace(state, exists=True, crawling=not state.sql_crawled, done=len(state.journal), seen=state.journal)
    return _checked(back, announce=not state.told)


def _checked(state: State, *, announce: bool) -> State:
    """finished() of project.lua: DONE and the event, or nothing."""
    if state.status_done or state.crawling or state.done < ITEMS:
        return state
    state = replace(state, status_done=True, decided=state.decided + 1)
    return replace(state, stream=state.stream + 1) if announce else state


def _set_worker(state: State, index: int, what: str) -> State:
    return replace(state, workers=(*state.workers[:index], what, *state.workers[index + 1 :]))


def _worker(state: State, variant: Variant, index: int) -> Iterator[tuple[str, State]]:
    what = state.workers[index]
    name = f"worker {index}"
    if what == "process":
        after = "journal" if variant.journal else "count"
        yield f"{name} works", _set_worker(replace(state, processed=state.processed | {index}), index, after)
    elif what == "journal":
        yield f"{name} commits", _set_worker(replace(state, journal=state.journal | {index}), index, "count")
    elif what == "count" and state.exists:
        yield from _count(state, variant, index)
    elif what == "check":
        yield from _check(state, variant, index)
    elif what == "publish":
        yield f"{name} publishes", _set_worker(replace(state, published=state.published + 1), index, "idle")
    if what in ("journal", "count", "check", "publish") and state.faults:
        again = _set_worker(replace(state, faults=state.faults - 1), index, "process")
        yield f"{name} is killed", again


def _count(state: State, variant: Variant, index: int) -> Iterator[tuple[str, State]]:
    name = f"worker {index}"
    after = state
    if not (variant.identity and index in state.seen):
        after = replace(state, done=state.done + 1, seen=state.seen | {index})
    following = "idle"
    if not variant.one_script:
        following = "check"
    elif variant.outbox:
        after = _checked(after, announce=True)
    else:
        decided = _checked(after, announce=False)
        following = "publish" if decided.decided > after.decided else "idle"
        after = decided
    yield f"{name} counts", _set_worker(after, index, following)
    if state.faults:
        lost = _set_worker(replace(after, faults=state.faults - 1), index, "count")
        yield f"{name} counts, its reply is lost", lost


def _check(state: State, variant: Variant, index: int) -> Iterator[tuple[str, State]]:
    """The five steps as separate commands: what was read may be old when it is acted upon."""
    name = f"worker {index}"
    if state.crawling or state.status_done or state.done < ITEMS:
        yield f"{name} reads: not finished", _set_worker(state, index, "idle")
    else:
        yield f"{name} reads: finished", _set_worker(state, index, "set")


def _crawler(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    if state.crawler == "crawl":
        if variant.journal:
            yield "crawler records", replace(state, sql_crawled=True, crawler="tell")
        else:
            yield "crawler has found all", replace(state, crawler="tell")
    elif state.crawler == "tell" and state.exists:
        after = replace(state, crawling=False)
        if variant.crawl_end_checks and variant.one_script:
            decided = _checked(after, announce=variant.outbox)
            crossed = decided.decided > after.decided
            following = "publish" if crossed and not variant.outbox else "idle"
            yield "crawled", replace(decided, crawler=following)
        elif variant.crawl_end_checks:
            yield "crawled", replace(after, crawler="check")
        else:
            yield "crawled", replace(after, crawler="idle")
    elif state.crawler == "check":
        if state.status_done or state.done < ITEMS:
            yield "crawler reads: not finished", replace(state, crawler="idle")
        else:
            yield "crawler reads: finished", replace(state, crawler="set")
    elif state.crawler == "publish":
        yield "crawler publishes", replace(state, published=state.published + 1, crawler="idle")


def _set_done(state: State) -> Iterator[tuple[str, State]]:
    """The last of the separate commands: whoever read "finished" sets DONE, and publishes next."""
    decided = replace(state, status_done=True, decided=state.decided + 1)
    if state.crawler == "set":
        yield "crawler sets DONE", replace(decided, crawler="publish")
    for index, what in enumerate(state.workers):
        if what == "set":
            yield f"worker {index} sets DONE", _set_worker(decided, index, "publish")


def _relay(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    if state.relay == "idle" and state.stream:
        yield "deliver", replace(state, published=min(state.published + 1, 3), relay="delivered")
    elif state.relay == "delivered":
        yield "acknowledge", replace(state, stream=max(0, state.stream - 1), told=variant.journal, relay="idle")
        if state.faults:
            yield "relay is killed", replace(state, relay="idle", faults=state.faults - 1)

"""The life of a task as a model: a submitter, two workers, a sweeper, a canceller, an operator; faults of Redis and workers.

The row is the truth; the hint in RQ only says *look*, and the row's mark says that a hint was given. The variants leave out
one idea each; the tests show what goes wrong without it. Names of steps are those of the code: *submit*, *push*, *pop*,
*claim*, *complete*, *fail*, *give back*, *promote*, *sweep*, *cancel*, *retry*, *pause*.

One user submits one task and, when it is over, a second one; another user's task may run beside it where a limit of one
allows. Each fault (a wipe, an older dump, a death, a pause past the lease, a shutdown) spends one of a small budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.models.explorer import Model

RETRIES = 1


@dataclass(frozen=True, slots=True)
class Variant:
    """Which ideas are in."""

    row_first: bool = True  # the row is committed before the hint is pushed, else the hint comes first
    compare_and_set: bool = True  # a claim succeeds for one worker only
    fencing: bool = True  # a finisher shows the token of its claim
    sweeper: bool = True  # somebody gives lost hints again and ends runs without a worker
    slot_in_row: bool = True  # the user's place is held by the row itself, else by a key in Redis
    looks_for_hints: bool = True  # a hint that was given is looked for, else the row's mark is believed
    promotes: bool = True  # a task whose wait is over may run again
    pause_in_claim: bool = True  # the claim itself looks whether the queue is paused, else only the pop does
    limit_in_claim: bool = True  # what runs is counted in the claim's transaction, else before it
    retry_takes_place: bool = True  # a task that is tried again by hand needs the user's place


@dataclass(frozen=True, slots=True)
class World:
    """Who else is there."""

    cancels: bool = False  # somebody may cancel the task; that also ends one that nobody would ever run
    pauses: bool = False  # an operator pauses the queue, and resumes it
    other: bool = False  # another user's task, and a limit of one that run at once
    by_hand: bool = False  # somebody tries a failed or cancelled task again
    restores: bool = False  # Redis saves, and may go back to what it saved


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    doing: str = "idle"  # idle, popped, looked, running, paused, dead, other, other dead
    token: int = 0


@dataclass(frozen=True, slots=True)
class State:
    # SQL
    status: str = "none"  # none, QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED
    ready: bool = True
    hinted: bool = False
    token: int = 0
    attempts: int = 0
    cancel: bool = False
    paused: bool = False
    # Redis
    hints: int = 0
    slot: bool = False
    dump: int | None = None  # what it saved; -1: it does not save (any more)
    # agents
    submitter: str = "submit"  # submit, second half, over, gone
    second: str = "wants"  # wants, active, over
    canceller: str = "never"  # never, may, did
    operator: str = "never"  # never, may, paused, did
    by_hand: str = "never"  # never, may, did
    other: str = "none"  # none, QUEUED, RUNNING, over
    workers: tuple[Worker, ...] = (Worker(), Worker())
    # the world
    acknowledged: bool = False
    recorded: int = 0  # ends that were written, in this life of the task
    wrong: str | None = None
    faults: int = 0


def model(variant: Variant, faults: int, world: World) -> Model[State]:
    start = State(
        faults=faults,
        canceller="may" if world.cancels else "never",
        operator="may" if world.pauses else "never",
        by_hand="may" if world.by_hand else "never",
        other="QUEUED" if world.other else "none",
        dump=None if world.restores else -1,
    )
    return Model(start, lambda state: _steps(state, variant), _violation, _unfinished)


FINAL = ("COMPLETED", "FAILED", "CANCELLED")


def _violation(state: State) -> str | None:
    if state.recorded > 1:
        return "recorded twice"
    if state.other == "RUNNING" and state.status == "RUNNING":
        return "more run than the limit allows"
    return state.wrong


def _unfinished(state: State) -> str | None:
    if state.acknowledged and state.status not in FINAL:
        return "an accepted task never ends"
    if state.acknowledged and state.second != "over":
        return "the user's place is never free again"
    if state.other not in ("none", "over"):
        return "the other user's task never ends"
    return None


def _steps(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    yield from _submitting(state, variant)
    for number, worker in enumerate(state.workers):
        yield from _working(state, variant, number, worker)
        if state.other != "none":
            yield from _working_on_the_other(state, number, worker)
    if variant.sweeper:
        yield from _sweeping(state, variant)
    yield from _people(state, variant)
    if state.faults:
        yield from _faults(state)


def _submitting(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    first, then = ("row", "push") if variant.row_first else ("push", "row")
    if state.submitter == "submit":
        yield f"submit: {first}", _submitted(replace(state, submitter="second half"), first)
    elif state.submitter == "second half":
        yield f"submit: {then}", replace(_submitted(state, then), submitter="over", acknowledged=True)


def _submitted(state: State, half: str) -> State:
    if half == "push":
        return replace(state, hints=state.hints + 1, slot=True)
    return replace(state, status="QUEUED", hinted=True) if state.status == "none" else state


# ---- workers ---------------------------------------------------------------------------------------------------------


def _working(state: State, variant: Variant, number: int, worker: Worker) -> Iterator[tuple[str, State]]:
    name = f"worker {number}"
    if worker.doing == "idle" and state.hints and not state.paused:
        yield f"{name}: pop", _with(replace(state, hints=state.hints - 1), number, Worker("popped"))
    if worker.doing == "idle" and not state.hinted and _may_be_claimed(state, variant):
        yield f"{name}: finds the row", _claimed(state, number)
    if worker.doing == "popped":
        if _may_be_claimed(state, variant) and not variant.limit_in_claim:
            yield f"{name}: sees a free place", _with(state, number, Worker("looked"))
        elif _may_be_claimed(state, variant):
            yield f"{name}: claim", _claimed(state, number)
        else:
            yield f"{name}: nothing to claim", _with(replace(state, hinted=False), number, Worker())
    if worker.doing == "looked":
        if state.status == "QUEUED":
            yield f"{name}: claim", _claimed(state, number)
        else:
            yield f"{name}: nothing to claim", _with(state, number, Worker())
    if worker.doing == "running":
        yield from _running(state, variant, number, worker)
    if worker.doing == "paused":
        yield f"{name}: wakes", _with(state, number, Worker("running", worker.token))
    if worker.doing == "dead":
        yield f"{name}: replaced", _with(state, number, Worker())


def _may_be_claimed(state: State, variant: Variant) -> bool:
    waits = state.status == "QUEUED" and state.ready
    again = not variant.compare_and_set and state.status == "RUNNING"
    return (waits or again) and not (state.paused and variant.pause_in_claim) and state.other != "RUNNING"


def _claimed(state: State, number: int) -> State:
    token = state.token + 1
    wrong = "begun although the queue is paused" if state.paused else state.wrong
    claimed = replace(state, status="RUNNING", token=token, hinted=False, wrong=wrong)
    return _with(claimed, number, Worker("running", token))


def _running(state: State, variant: Variant, number: int, worker: Worker) -> Iterator[tuple[str, State]]:
    name = f"worker {number}"
    ours = state.status == "RUNNING" and (state.token == worker.token or not variant.fencing)
    late = not variant.fencing and state.status in FINAL
    if not (ours or late):
        yield f"{name}: refused", _with(state, number, Worker())
        return
    yield f"{name}: complete", _with(_ended(state, "COMPLETED"), number, Worker())
    yield f"{name}: fail", _with(_failed(state), number, Worker())
    if state.cancel and ours:
        yield f"{name}: cancelled", _with(_ended(state, "CANCELLED"), number, Worker())
    if state.faults and ours:
        back = replace(state, status="QUEUED", ready=True, hinted=False, faults=state.faults - 1)
        yield f"{name}: give back", _with(back, number, Worker())


def _ended(state: State, status: str) -> State:
    return replace(state, status=status, recorded=state.recorded + 1, slot=False)


def _failed(state: State) -> State:
    if state.cancel:
        return _ended(state, "CANCELLED")
    state = replace(state, attempts=state.attempts + 1)
    if state.attempts > RETRIES:
        return _ended(state, "FAILED")
    return replace(state, status="QUEUED", ready=False, hinted=False)


def _working_on_the_other(state: State, number: int, worker: Worker) -> Iterator[tuple[str, State]]:
    """As simple as can be: it is there for the limit."""
    if worker.doing == "idle" and state.other == "QUEUED" and state.status != "RUNNING" and not state.paused:
        yield f"worker {number}: claim the other", _with(replace(state, other="RUNNING"), number, Worker("other"))
    if worker.doing == "other":
        yield f"worker {number}: complete the other", _with(replace(state, other="over"), number, Worker())
    if worker.doing == "other dead":
        yield f"worker {number}: replaced", _with(replace(state, other="QUEUED"), number, Worker())


# ---- the sweeper -----------------------------------------------------------------------------------------------------


def _sweeping(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    if state.status == "QUEUED" and not state.ready and variant.promotes:
        yield "sweep: promote", replace(state, ready=True, hinted=False)
    if state.status == "QUEUED" and state.ready:
        if not state.hinted and not state.paused and not state.hints:
            yield "sweep: hint", replace(state, hints=1, hinted=True)
        if state.hinted and not state.hints and variant.looks_for_hints:
            yield "sweep: the hint is lost", replace(state, hinted=False)
    if state.status == "RUNNING" and not any(
        worker.doing == "running" and worker.token == state.token for worker in state.workers
    ):
        yield "sweep: the run is lost", _failed(state)


# ---- people ----------------------------------------------------------------------------------------------------------


def _people(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    if state.canceller == "may" and state.acknowledged:
        asked = replace(state, canceller="did")
        if state.status == "QUEUED":
            yield "cancel", replace(_ended(asked, "CANCELLED"), cancel=True, hints=0)
        elif state.status == "RUNNING":
            yield "cancel: ask", replace(asked, cancel=True)
    if state.operator == "may":
        yield "pause", replace(state, operator="paused", paused=True)
    if state.operator == "paused":
        yield "resume", replace(state, operator="did", paused=False)
    if state.by_hand == "may" and state.status in ("FAILED", "CANCELLED"):
        again = replace(
            state,
            by_hand="did",
            status="QUEUED",
            ready=True,
            hinted=False,
            attempts=0,
            cancel=False,
            recorded=0,
            slot=True,
        )
        if state.second == "active":
            if not variant.retry_takes_place:
                yield "retry", replace(again, wrong="two active tasks of one user")
        else:
            yield "retry", again
    yield from _second(state, variant)


def _second(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    """The same user submits another task as soon as the queue lets them; it runs at once and ends."""
    if state.second == "wants" and state.acknowledged:
        active = state.status in ("QUEUED", "RUNNING")
        refused = active if variant.slot_in_row else state.slot
        if not refused:
            wrong = "two active tasks of one user" if active else state.wrong
            yield "second submit", replace(state, second="active", wrong=wrong)
    if state.second == "active":
        yield "the second ends", replace(state, second="over")


def _faults(state: State) -> Iterator[tuple[str, State]]:
    less = replace(state, faults=state.faults - 1)
    if state.hints or state.slot:
        yield "redis is wiped", replace(less, hints=0, slot=False)
    if state.dump is None and state.hints:
        yield "redis saves", replace(state, dump=state.hints)
    if state.dump is not None and state.dump not in (-1, state.hints):
        yield "redis goes back to what it saved", replace(less, hints=state.dump, dump=-1)
    if state.submitter == "second half":
        yield "the submitter dies", replace(less, submitter="gone")
    for number, worker in enumerate(state.workers):
        if worker.doing in ("popped", "looked", "running"):
            yield f"worker {number} dies", _with(less, number, Worker("dead"))
        if worker.doing == "other":
            yield f"worker {number} dies", _with(less, number, Worker("other dead"))
        if worker.doing == "running":
            yield f"worker {number} is paused past its lease", _with(less, number, Worker("paused", worker.token))


def _with(state: State, number: int, worker: Worker) -> State:
    workers = list(state.workers)
    workers[number] = worker
    return replace(state, workers=tuple(sorted(workers)))  # which of the two does what makes no difference

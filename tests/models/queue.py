"""The life of a task as a model: a submitter, two workers, a sweeper, a canceller; Redis is wiped, workers die or pause.

The row is the truth; the hint in RQ only says *look*. The variants leave out one idea each; the tests show what goes wrong
without it. Names of steps are those of the code: *submit*, *push*, *pop*, *claim*, *complete*, *fail*, *sweep*, *cancel*.

One user submits one task and, when it is over, a second one. Each fault (a wipe, a death, a pause past the lease) spends
one of a small budget.
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


@dataclass(frozen=True, slots=True)
class Worker:
    doing: str = "idle"  # idle, popped, running, paused, dead
    token: int = 0


@dataclass(frozen=True, slots=True)
class State:
    # SQL
    status: str = "none"  # none, QUEUED, RUNNING, COMPLETED, FAILED, CANCELLED
    token: int = 0
    attempts: int = 0
    cancel: bool = False
    # Redis
    hints: int = 0
    slot: bool = False
    # agents
    submitter: str = "submit"  # submit, push, over, gone
    second: str = "wants"  # wants, accepted
    canceller: str = "may"
    workers: tuple[Worker, ...] = (Worker(), Worker())
    # the world
    acknowledged: bool = False
    recorded: int = 0  # completions and final failures that were written
    active_twice: bool = False
    faults: int = 0


def model(variant: Variant, faults: int, *, cancels: bool) -> Model[State]:
    """``cancels``: somebody may cancel the task. That also ends a task that nobody would ever run, so look at both."""
    return Model(
        State(faults=faults, canceller="may" if cancels else "never"),
        lambda state: _steps(state, variant),
        _violation,
        _unfinished,
    )


FINAL = ("COMPLETED", "FAILED", "CANCELLED")


def _violation(state: State) -> str | None:
    if state.recorded > 1:
        return "recorded twice"
    if state.active_twice:
        return "two active tasks of one user"
    return None


def _unfinished(state: State) -> str | None:
    if state.acknowledged and state.status not in FINAL:
        return "an accepted task never ends"
    if state.acknowledged and state.second == "wants":
        return "the user's place is never free again"
    return None


def _steps(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    yield from _submitting(state, variant)
    for number, worker in enumerate(state.workers):
        yield from _working(state, variant, number, worker)
    if variant.sweeper:
        yield from _sweeping(state)
    if state.canceller == "may" and state.acknowledged:
        yield from _cancelling(state)
    yield from _second(state, variant)
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
    return replace(state, status="QUEUED") if state.status == "none" else state


def _working(state: State, variant: Variant, number: int, worker: Worker) -> Iterator[tuple[str, State]]:
    name = f"worker {number}"
    if worker.doing == "idle" and state.hints:
        yield f"{name}: pop", _with(replace(state, hints=state.hints - 1), number, Worker("popped"))
    if worker.doing == "popped":
        if state.status == "QUEUED" or (not variant.compare_and_set and state.status == "RUNNING"):
            token = state.token + 1
            claimed = replace(state, status="RUNNING", token=token)
            yield f"{name}: claim", _with(claimed, number, Worker("running", token))
        else:
            yield f"{name}: nothing to claim", _with(state, number, Worker())
    if worker.doing == "running":
        ours = state.status == "RUNNING" and (state.token == worker.token or not variant.fencing)
        late = not variant.fencing and state.status in FINAL
        if ours or late:
            done = replace(state, status="COMPLETED", recorded=state.recorded + 1, slot=False)
            yield f"{name}: complete", _with(done, number, Worker())
            yield f"{name}: fail", _with(_failed(state), number, Worker())
        else:
            yield f"{name}: refused", _with(state, number, Worker())
        if state.cancel and ours:
            ended = replace(state, status="CANCELLED", recorded=state.recorded + 1, slot=False)
            yield f"{name}: cancelled", _with(ended, number, Worker())
    if worker.doing == "paused":
        yield f"{name}: wakes", _with(state, number, Worker("running", worker.token))
    if worker.doing == "dead":
        yield f"{name}: replaced", _with(state, number, Worker())


def _failed(state: State) -> State:
    attempts = state.attempts + 1
    if state.cancel:
        return replace(state, status="CANCELLED", attempts=attempts, recorded=state.recorded + 1, slot=False)
    if attempts > RETRIES:
        return replace(state, status="FAILED", attempts=attempts, recorded=state.recorded + 1, slot=False)
    return replace(state, status="QUEUED", attempts=attempts)


def _sweeping(state: State) -> Iterator[tuple[str, State]]:
    if state.status == "QUEUED" and not state.hints and not any(worker.doing == "popped" for worker in state.workers):
        yield "sweep: hint again", replace(state, hints=1)
    if state.status == "RUNNING" and not any(
        worker.doing == "running" and worker.token == state.token for worker in state.workers
    ):
        yield "sweep: the run is lost", _failed(state)


def _cancelling(state: State) -> Iterator[tuple[str, State]]:
    asked = replace(state, canceller="did")
    if state.status == "QUEUED":
        yield "cancel", replace(asked, status="CANCELLED", recorded=state.recorded + 1, slot=False)
    elif state.status == "RUNNING":
        yield "cancel: ask", replace(asked, cancel=True)


def _second(state: State, variant: Variant) -> Iterator[tuple[str, State]]:
    """The same user submits another task as soon as the queue lets them."""
    if state.second != "wants" or not state.acknowledged:
        return
    active = state.status in ("QUEUED", "RUNNING")
    refused = active if variant.slot_in_row else state.slot
    if not refused:
        yield "second submit", replace(state, second="accepted", active_twice=active)


def _faults(state: State) -> Iterator[tuple[str, State]]:
    less = replace(state, faults=state.faults - 1)
    if state.hints or state.slot:
        yield "redis is wiped", replace(less, hints=0, slot=False)
    if state.submitter == "second half":
        yield "the submitter dies", replace(less, submitter="gone")
    for number, worker in enumerate(state.workers):
        if worker.doing in ("popped", "running"):
            yield f"worker {number} dies", _with(less, number, Worker("dead"))
        if worker.doing == "running":
            yield f"worker {number} is paused past its lease", _with(less, number, Worker("paused", worker.token))


def _with(state: State, number: int, worker: Worker) -> State:
    workers = list(state.workers)
    workers[number] = worker
    return replace(state, workers=tuple(workers))

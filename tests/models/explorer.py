"""A small explicit-state explorer: every order of steps of a few agents, with faults, breadth first.

A model is a start state, `steps(state)` giving (name, next state) for everything that may happen next, a safety
property of every state, and a liveness property of states in which nothing more can happen. Because the search is
breadth first, the first counterexample found is a shortest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Model(Generic[S]):
    start: S
    steps: Callable[[S], Iterable[tuple[str, S]]]
    #: What is wrong with a state, or None.
    violation: Callable[[S], str | None]
    #: What is wrong with a state from which nothing leads on, or None.
    unfinished: Callable[[S], str | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem`` is None when the model holds; else ``trace`` is a shortest way to it."""

    problem: str | None
    trace: tuple[str, ...]
    states: int


def explore(model: Model[S], *, limit: int = 200_000) -> Verdict:
    came_from: dict[S, tuple[S, str] | None] = {model.start: None}
    queue = deque([model.start])
    while queue:
        state = queue.popleft()
        problem = model.violation(state)
        following = [] if problem else list(model.steps(state))
        if problem is None and not following:
            problem = model.unfinished(state)
        if problem is not None:
            return Verdict(problem, _trace(came_from, state), len(came_from))
        for name, successor in following:
            if successor not in came_from:
                came_from[successor] = (state, name)
                queue.append(successor)
        assert len(came_from) <= limit, "the model is too large"
    return Verdict(None, (), len(came_from))


def _trace(came_from: dict[S, tuple[S, str] | None], state: S) -> tuple[str, ...]:
    names: list[str] = []
    while (step := came_from[state]) is not None:
        state, name = step
        names.append(name)
    return tuple(reversed(names))

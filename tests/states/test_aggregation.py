"""The rule that the lowest status wins, on a store that is ten lines of dictionary: any `Store` will do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidInput
from headway.states import ERROR, FINISHED, WARNING, Manager, State, Store, TaskFailed, WaitTimeout
from headway.states.buffer import Overflow
from headway.states.subscription import DEPTH, Subscription


class DictStore:
    """A foreign store: the six operations and nothing of ours but `Subscription`."""

    def __init__(self, num_tasks: int = 3) -> None:
        self.job_id, self.num_tasks = "job", num_tasks
        self.states: dict[tuple[int, str], State] = {}
        self.subscriptions: list[Subscription] = []
        self.closed = False

    def set_state(self, state: State) -> State:
        stored = replace(state, version=self.get_state(*state.key).version + 1)
        self.states[state.key] = stored
        for subscription in self.subscriptions:
            subscription.offer(stored)
        return stored

    def get_state(self, task_id: int, tag: str) -> State:
        return self.states.get((task_id, tag), State("job", task_id, tag))

    def list_states_for_tag(self, tag: str) -> list[State]:
        return [state for state in self.states.values() if state.tag == tag]

    def list_all_states(self) -> list[State]:
        return list(self.states.values())

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "latest",
        timeout: float | None = None,
    ) -> Subscription:
        subscription = Subscription(accepts=accepts, depth=depth, overflow=overflow, timeout=timeout)
        self.subscriptions.append(subscription)
        subscription.start(self.states.values())
        return subscription

    def close(self) -> None:
        self.closed = True


def job(*reports: tuple[int, str, int], num_tasks: int = 3, expected_tags: tuple[str, ...] = ()) -> Manager:
    store = DictStore(num_tasks)
    for task, tag, status in reports:
        store.set_state(State("job", task, tag, status))
    return Manager("job", 0, num_tasks, store, expected_tags=expected_tags)


def found(state: State) -> tuple[int, str, int]:
    return (state.task_id, state.tag, state.status)


@pytest.mark.req("S1-10", "S1-65")
def test_any_object_with_the_six_operations_is_a_store():
    assert isinstance(DictStore(), Store)


@pytest.mark.req("S1-12", "S1-02")
def test_a_manager_is_bound_to_its_task_for_life():
    manager = Manager("job", 2, 3, DictStore())
    assert (manager.job_id, manager.task_index, manager.num_tasks) == ("job", 2, 3)
    for name in ("job_id", "task_index", "num_tasks"):
        with pytest.raises(AttributeError):
            setattr(manager, name, 1)


@pytest.mark.req("S1-01", "S1-12")
@pytest.mark.parametrize(
    ("job_id", "task_index", "num_tasks"),
    [("job", 3, 3), ("job", -1, 3), ("job", True, 3), ("job", 0, 4), ("other", 0, 3), ("a/b", 0, 3), ("job", 0, 0)],
)
def test_a_manager_that_does_not_fit_its_store_is_refused(job_id: str, task_index: Any, num_tasks: int):
    with pytest.raises(InvalidInput):
        Manager(job_id, task_index, num_tasks, DictStore())


@pytest.mark.req("S1-05", "S1-07")
def test_no_call_writes_another_tasks_state():
    store = DictStore()
    manager = Manager("job", 1, 3, store)
    for other in (0, 2, True, 1.5):
        theirs = State("job", other, "a", 5)  # type: ignore[arg-type]
        for write in (
            manager.set_state,
            manager.set_started,
            manager.set_finished,
            partial(manager.set_error, ValueError("x")),
            partial(manager.set_warning, "x"),
        ):
            with pytest.raises(InvalidInput, match="task 1 only"):
                write(theirs)
    with pytest.raises(InvalidInput, match="belongs to the job"):
        manager.set_state(State("other", 1, "a"))
    assert store.states == {}


@pytest.mark.req("S1-04", "S1-20", "S1-18")
@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], (0, "a", 0)),
        ([(0, "a", 5), (1, "a", 3), (2, "a", 9)], (1, "a", 3)),
        ([(0, "a", 5), (2, "a", 9)], (1, "a", 0)),  # a gap in the middle
        ([(1, "a", 5), (2, "a", 9)], (0, "a", 0)),  # at the beginning
        ([(0, "a", 5), (1, "a", 9)], (2, "a", 0)),  # at the end
        ([(0, "a", FINISHED), (1, "a", FINISHED), (2, "a", FINISHED)], (0, "a", FINISHED)),
        ([(0, "a", FINISHED), (1, "a", ERROR), (2, "a", 4)], (1, "a", ERROR)),
        ([(1, "a", ERROR), (2, "a", WARNING)], (2, "a", WARNING)),  # literally the lowest
        ([(0, "a", 4), (1, "a", 4), (2, "a", 4), (2, "b", -9)], (0, "a", 4)),  # a tie; another tag
    ],
)
def test_the_lowest_task_decides_for_a_tag(reports: list[tuple[int, str, int]], expected: tuple[int, str, int]):
    assert found(job(*reports).get_state(tag="a")) == expected


@pytest.mark.req("S1-21")
def test_the_lowest_tag_decides_for_a_task():
    manager = job((1, "a", 5), (1, "b", 3), (0, "a", -1))
    assert found(manager.get_state(task_id=1)) == (1, "b", 3)
    assert found(manager.get_state(task_id=2)) == (2, "", 0)


@pytest.mark.req("S1-22")
def test_the_lowest_of_all_decides_for_the_job_and_a_silent_task_counts_as_0():
    assert found(job((0, "a", 5), (1, "a", 3)).get_state()) == (2, "", 0)
    assert found(job((0, "a", 5), (1, "a", 3), (2, "b", 7)).get_state()) == (1, "a", 3)
    assert found(job((0, "b", 3), (0, "a", 3), (1, "a", 3), (2, "a", 3)).get_state()) == (0, "a", 3)
    assert found(job((0, "a", -4)).get_state()) == (0, "a", -4)


@pytest.mark.req("S1-19")
def test_one_key_is_answered_as_it_is():
    manager = job((1, "a", 5))
    assert found(manager.get_state(task_id=1, tag="a")) == (1, "a", 5)
    assert found(manager.get_state(task_id=1, tag="b")) == (1, "b", 0)


def test_expected_tags_make_a_task_that_reported_only_some_of_them_not_started():
    reports = ((0, "a", FINISHED), (1, "a", FINISHED), (2, "a", FINISHED), (0, "b", FINISHED))
    assert job(*reports).get_state().status == FINISHED
    strict = job(*reports, expected_tags=("a", "b"))
    assert found(strict.get_state()) == (1, "b", 0)
    assert found(strict.get_state(task_id=2)) == (2, "b", 0)
    assert strict.get_state(task_id=0).status == FINISHED


@pytest.mark.req("S1-04", "S1-22")
@given(st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from("abc")), st.integers(-3, 3), max_size=9))
def test_the_lowest_status_counts_unreported_tasks_as_0(reports: dict[tuple[int, str], int]):
    manager = job(*[(task, tag, status) for (task, tag), status in reports.items()])
    silent = {0, 1, 2} - {task for task, _ in reports}
    assert manager.get_state().status == min([*reports.values(), *[0 for _ in silent]])
    for tag in "abc":
        assert manager.get_state(tag=tag).status == min(reports.get((task, tag), 0) for task in range(3))
    for task in range(3):
        own = [status for (who, _), status in reports.items() if who == task]
        assert manager.get_state(task_id=task).status == min(own, default=0)


def test_a_warning_does_not_hide_an_error_in_the_summary():
    summary = job((0, "a", WARNING), (1, "a", ERROR), (2, "a", 7), (2, "b", FINISHED)).summary()
    assert found(summary.state) == (0, "a", WARNING)
    assert summary.worst_error is not None
    assert found(summary.worst_error) == (1, "a", ERROR)
    assert summary.counts == {"not_started": 0, "running": 1, "finished": 1, "warning": 1, "error": 1}
    assert not summary.finished


def test_a_summary_counts_who_is_silent_and_knows_when_all_is_finished():
    assert job((0, "a", FINISHED)).summary(tag="a").counts["not_started"] == 2
    done = job(*[(task, "a", FINISHED) for task in range(3)]).summary()
    assert done.finished
    assert done.worst_error is None


@pytest.mark.req("S1-14", "S1-17")
def test_an_error_or_warning_keeps_the_progress_it_replaces():
    manager = job()
    manager.set_state("a", status=40)
    assert manager.set_warning("slow", "a").payload == {"last_status": 40}
    assert manager.set_error(ValueError("x"), "a", payload={"row": 3}).payload == {"row": 3, "last_status": 40}
    assert manager.set_error(ValueError("x"), "b").payload is None


@pytest.mark.req("S1-14")
@pytest.mark.parametrize(
    ("code", "status"), [(-7, -7), (-2, -1), (-(2**31), -(2**31)), (-(2**31) - 1, -1), (404, -1), (True, -1), ("x", -1)]
)
def test_an_exception_may_bring_its_own_negative_status_but_never_the_warnings(code: Any, status: int):
    error = ValueError("x")
    error.status_code = code  # type: ignore[attr-defined]
    assert job().set_error(error, "a").status == status


# ---- the barrier ------------------------------------------------------------------------------------------------


def test_waiting_returns_when_the_last_task_gets_there():
    manager = job((0, "a", FINISHED), (1, "a", FINISHED))
    store = manager._store
    threading.Timer(0.05, lambda: store.set_state(State("job", 2, "a", FINISHED))).start()
    assert manager.wait_for("a", timeout=20).finished


def test_waiting_for_a_number_is_over_when_everybody_is_that_far_or_further():
    assert job((0, "a", 5), (1, "a", FINISHED), (2, "a", 9)).wait_for("a", 5, timeout=1).state.status == 5
    with pytest.raises(WaitTimeout, match=r"1 of 3 tasks have not reached 'a': 0"):
        job((0, "a", 4), (1, "a", FINISHED), (2, "a", 9)).wait_for("a", 5, timeout=0.05)
    with pytest.raises(InvalidInput, match="status must be above 0"):
        job().wait_for("a", 0)


def test_waiting_ends_at_once_when_a_task_reports_an_error_unless_it_may_be_tried_again():
    manager = job((0, "a", FINISHED), (1, "a", ERROR), (2, "a", FINISHED))
    with pytest.raises(TaskFailed, match="Task 1 reported an error for 'a'"):
        manager.wait_for("a", timeout=20)
    store = manager._store
    threading.Timer(0.05, lambda: store.set_state(State("job", 1, "a", FINISHED))).start()
    assert manager.wait_for("a", timeout=20, ignore_errors=True).finished


def test_a_task_with_a_warning_keeps_its_progress():
    manager = job((0, "a", 50), (1, "a", 60), (2, "a", 70))
    manager.set_warning("slow", "a")
    manager.wait_for("a", 50, timeout=1)
    with pytest.raises(WaitTimeout):
        manager.wait_for("a", 51, timeout=0.05)


@pytest.mark.req("S1-13")
def test_closing_a_manager_closes_its_subscriptions_and_the_store():
    manager = job()
    subscription = manager.subscribe()
    manager.close()
    assert list(subscription) == []
    assert manager._store.closed  # type: ignore[attr-defined]


def test_what_only_our_own_stores_can_do_is_refused_on_a_foreign_one():
    with pytest.raises(InvalidInput, match="DictStore"):
        job().history(task_id=0, tag="a")

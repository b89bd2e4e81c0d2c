"""When to try again, how long to wait, when to stop asking."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import retry
from headway.core.retry import CircuitBreaker, RetryPolicy
from headway.errors import Stopping


def test_a_redis_operation_is_tried_again_after_1_2_and_4_seconds():
    assert list(retry.REDIS_OPERATION.delays()) == [1.0, 2.0, 4.0]
    assert not retry.REDIS_OPERATION.exhausted(3)
    assert retry.REDIS_OPERATION.exhausted(4)


def test_a_listener_is_brought_back_from_1_second_up_to_60():
    assert list(retry.LISTENER.delays()) == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert [retry.LISTENER.delay(n) for n in (6, 7, 8, 100)] == [32.0, 60.0, 60.0, 60.0]


def test_an_item_has_two_retries_so_three_runs():
    assert [retry.ITEM.exhausted(n) for n in (1, 2, 3)] == [False, False, True]


def test_a_task_has_three_retries():
    assert [retry.TASK.exhausted(n) for n in (3, 4)] == [False, True]


def test_jitter_takes_away_at_most_its_share():
    policy = RetryPolicy(retries=1, base=10.0, jitter=0.5)
    assert policy.delay(1, draw=lambda: 0.0) == 10.0
    assert policy.delay(1, draw=lambda: 1.0) == 5.0


@given(
    failures=st.integers(1, 10**9),
    base=st.floats(0, 100),
    factor=st.floats(1, 100),
    cap=st.floats(0, 1000),
    jitter=st.floats(0, 1),
)
def test_a_wait_is_never_negative_never_above_its_cap_and_never_overflows(failures, base, factor, cap, jitter):
    wait = RetryPolicy(5, base, factor, cap, jitter).delay(failures)
    assert 0.0 <= wait <= cap


def test_a_call_is_retried_until_it_returns_and_each_wait_is_reported():
    told: list[tuple[int, float, str]] = []
    answers: list[object] = [OSError("a"), OSError("b"), "here"]

    def work() -> object:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    policy = RetryPolicy(retries=3, base=0.001)
    result = retry.call(
        work, policy, retry_on=OSError, on_retry=lambda *facts: told.append((*facts[:2], str(facts[2])))
    )
    assert result == "here"
    assert told == [(1, 0.001, "a"), (2, 0.002, "b")]


def test_when_the_policy_is_exhausted_the_last_error_is_raised_as_it_is():
    errors = [OSError(str(n)) for n in range(3)]
    left = list(errors)

    def work() -> None:
        raise left.pop(0)

    with pytest.raises(OSError, match="2") as caught:
        retry.call(work, RetryPolicy(retries=2, base=0.0), retry_on=OSError)
    assert caught.value is errors[2]
    assert not left


def test_an_error_of_another_kind_is_not_tried_again():
    calls = []

    def work() -> None:
        calls.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        retry.call(work, RetryPolicy(retries=5), retry_on=OSError)
    assert len(calls) == 1


def test_a_shutdown_ends_a_wait_of_an_hour_at_once():
    stop = threading.Event()
    failed = threading.Event()
    outcome: list[BaseException] = []

    def work() -> None:
        failed.set()
        raise OSError("away")

    def wait() -> None:
        try:
            retry.call(work, RetryPolicy(retries=1, base=3600.0, cap=3600.0), retry_on=OSError, stop=stop)
        except Stopping as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert failed.wait(10)
    stop.set()
    thread.join(10)
    assert [error.exit_code for error in outcome] == [143]  # type: ignore[attr-defined]  # Stopping has it


def test_a_pause_without_a_stop_event_is_as_long_as_it_says():
    began = time.monotonic()
    retry.pause(0.02, None)
    assert time.monotonic() - began >= 0.02


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker_opens_at_its_threshold_and_reports_it_once():
    breaker = CircuitBreaker(threshold=3, cooldown=5.0, clock=Clock())
    assert [breaker.failed() for _ in range(5)] == [False, False, True, False, False]


def test_a_success_in_between_starts_the_count_again():
    breaker = CircuitBreaker(threshold=2, clock=Clock())
    assert not breaker.failed()
    assert not breaker.succeeded()
    assert not breaker.failed()
    assert breaker.allow()


def test_an_open_breaker_lets_one_probe_through_per_cooldown():
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, cooldown=5.0, clock=clock)
    breaker.failed()
    assert not breaker.allow()
    clock.now += 4.9
    assert not breaker.allow()
    clock.now += 0.2
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    breaker.failed()  # the probe came back with nothing
    assert not breaker.allow()
    assert breaker.open_for == pytest.approx(5.1)


def test_a_successful_probe_closes_it_and_reports_it():
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, cooldown=1.0, clock=clock)
    breaker.failed()
    clock.now += 2
    assert breaker.allow()
    assert breaker.succeeded()
    assert breaker.open_for is None
    assert all(breaker.allow() for _ in range(3))
    assert not breaker.succeeded()

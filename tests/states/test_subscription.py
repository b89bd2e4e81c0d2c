"""One reader, without a store: order, duplicates, limits, and how it ends."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.states import State, StateEvent, Subscription, SubscriptionClosed
from headway.telemetry import metrics
from tests.states.conftest import live, replayed, take

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def state(version: int, tag: str = "a", task: int = 0, seconds: float = 0) -> State:
    return State("job", task, tag, version=version, timestamp=NOON + timedelta(seconds=seconds))


def started(*standing: State, **options: object) -> Subscription:
    subscription = Subscription(**options)  # type: ignore[arg-type]
    subscription.start(standing)
    return subscription


@pytest.fixture
def tiny_switch_interval() -> Iterator[None]:
    """Threads take turns as often as the interpreter can: a race that exists is likely to show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.req("S1-11", "S1-25", "S1-26")
def test_an_event_says_whether_it_is_replay_sentinel_or_news():
    subscription = started(state(4))
    subscription.offer(state(5))
    assert take(subscription, 3) == [
        StateEvent(state(4), replay=True),
        StateEvent(None, replay=False),
        StateEvent(state(5), replay=False),
    ]


@pytest.mark.req("S1-23")
def test_replay_goes_by_time_and_states_of_one_commit_by_task_and_tag():
    standing = [state(1, "b", 1), state(1, "a", 1), state(9, "z", 0, -1), state(1, "b", 0), state(2, "c", 2, 1)]
    keys = [found.key for found in replayed(started(*standing))]
    assert keys == [(0, "z"), (0, "b"), (1, "a"), (1, "b"), (2, "c")]


@pytest.mark.req("S1-51")
def test_only_a_higher_version_is_delivered():
    subscription = started(state(4))
    for version in (4, 3, 5, 5, 4, 7, 6):
        subscription.offer(state(version))
    subscription.offer(state(1, "b"))
    assert [found.version for found in replayed(subscription)] == [4]
    assert [(found.tag, found.version) for found in live(subscription, 3)] == [("a", 5), ("a", 7), ("b", 1)]
    assert subscription.waiting == 0


@pytest.mark.req("S1-51")
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=60), st.integers(0, 60))
def test_a_reader_sees_growing_versions_whatever_the_order_of_offers(offers: list[tuple[str, int]], split: int):
    subscription = Subscription(depth=4)
    standing: dict[str, State] = {}
    for tag, version in offers[:split]:
        standing[tag] = max(standing.get(tag, state(0, tag)), state(version, tag), key=lambda found: found.version)
    subscription.start(standing.values())
    for tag, version in offers[split:]:
        subscription.offer(state(version, tag))
    subscription.end()
    seen: dict[str, int] = {}
    for event in subscription:
        if event.state is not None:
            assert event.state.version > seen.get(event.state.tag, 0)
            seen[event.state.tag] = event.state.version
    assert seen == {
        tag: max(version for name, version in offers if name == tag) for tag in {name for name, _ in offers}
    }


@pytest.mark.req("S1-51", "S1-27")
def test_a_clock_that_jumps_back_changes_nothing_order_is_by_version():
    subscription = started(state(4, seconds=3600))
    subscription.offer(state(5, seconds=0))
    subscription.offer(state(6, seconds=-86_400 * 8))
    replayed(subscription)
    assert [found.version for found in live(subscription, 2)] == [5, 6]


def test_a_change_offered_before_the_start_is_delivered_once():
    subscription = Subscription()
    subscription.offer(state(5))
    subscription.start([state(5), state(2, "b")])
    assert [found.key for found in replayed(subscription)] == [(0, "b")]
    assert [found.version for found in live(subscription)] == [5]


def test_a_key_that_was_removed_begins_again_at_version_1():
    subscription = started(state(7))
    replayed(subscription)
    subscription.forget((0, "a"))
    subscription.offer(state(1))
    assert live(subscription) == [state(1)]


@pytest.mark.req("S1-29")
def test_at_least_four_events_are_buffered():
    subscription = started(depth=4, overflow="close")
    for version in range(1, 5):
        subscription.offer(state(version))
    replayed(subscription)
    assert [found.version for found in live(subscription, 4)] == [1, 2, 3, 4]
    with pytest.raises(InvalidInput, match="at least 4"):
        Subscription(depth=3)
    with pytest.raises(InvalidInput, match="must be 'all'"):
        Subscription(overflow="drop")  # type: ignore[arg-type]


def test_a_reader_too_far_behind_gets_the_newest_of_each_key_and_the_rest_is_counted():
    skipped = metrics.value("headway_states_skipped")
    subscription = started(depth=4, overflow="latest")
    for version in range(1, 101):
        subscription.offer(state(version))
        subscription.offer(state(version, "b"))
    assert subscription.waiting <= 1 + 4 + 2
    replayed(subscription)
    told = [(found.tag, found.version) for found in live(subscription, 6)]
    assert told == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 100), ("b", 100)]
    assert metrics.value("headway_states_skipped") - skipped == 2 * 97
    subscription.offer(state(101))
    assert live(subscription) == [state(101)]


@pytest.mark.req("S1-69")
def test_by_default_a_slow_reader_gets_every_change_in_order_and_memory_stays_bounded():
    subscription = started(depth=4)
    told: list[State] = []
    replayed(subscription)
    for version in range(1, 5_001):
        subscription.offer(replace(state(version, "ab"[version % 2]), payload={"text": "😀\n" * 20, "n": [1, None]}))
        if version % 3 == 0:
            told += live(subscription)
        assert len(subscription._buffer._live) <= 4
        assert not subscription._buffer._latest
    told += live(subscription, 5_000 - len(told))
    assert [found.version for found in told] == list(range(1, 5_001))
    assert told[-1] == replace(state(5_000, "a"), payload={"text": "😀\n" * 20, "n": [1, None]})
    subscription.offer(state(5_001))
    assert len(subscription._buffer._live) == 1  # it has caught up, and the file is not used any more
    assert live(subscription) == [state(5_001)]


def test_a_state_longer_than_a_page_waits_on_disk_like_any_other():
    subscription = started(depth=4)
    replayed(subscription)
    large = replace(state(5), payload={"text": "x" * 200_000})
    for found in (state(1), state(2), state(3), state(4), large, state(6)):
        subscription.offer(found)
    assert live(subscription, 6)[4:] == [large, state(6)]


def test_beyond_the_space_on_disk_the_newest_of_each_key_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("headway.states.spool.LIMIT", 1_000)
    subscription = started(depth=4)
    for version in range(1, 101):
        subscription.offer(state(version))
    replayed(subscription)
    told = take(subscription, subscription.waiting)
    versions = [event.state.version for event in told if event.state is not None]
    assert versions[:-1] == list(range(1, len(versions)))
    assert (versions[-1], told[-1].skipped) == (100, 100 - len(versions))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_reader_whose_disk_is_missing_gets_the_newest_of_each_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    subscription = started(depth=4)
    for version in range(1, 11):
        subscription.offer(state(version))
    replayed(subscription)
    assert [event.skipped for event in take(subscription, 5)] == [0, 0, 0, 0, 5]
    assert "cannot be written" in caplog.records[0].getMessage()


def test_a_reader_may_ask_to_be_closed_with_an_error_instead():
    subscription = started(depth=4, overflow="close")
    for version in range(1, 7):
        subscription.offer(state(version))
    replayed(subscription)
    assert len(live(subscription, 4)) == 4
    with pytest.raises(Unavailable, match="too slow"):
        next(subscription)
    assert subscription.closed


@pytest.mark.req("S1-28")
def test_closing_drops_and_counts_unread_events():
    dropped = metrics.value("headway_states_dropped")
    subscription = started(state(1), state(1, "b"), depth=4)
    for version in range(2, 12):
        subscription.offer(state(version))
    subscription.get(1)
    subscription.close()
    subscription.close()
    assert list(subscription) == []
    assert subscription.waiting == 0
    assert metrics.value("headway_states_dropped") - dropped == 1 + 10
    with pytest.raises(SubscriptionClosed):
        subscription.get(1)
    subscription.offer(state(99))
    assert subscription.waiting == 0


@pytest.mark.req("S1-28")
def test_closing_from_another_thread_ends_a_reader_who_waits():
    with started() as subscription:
        replayed(subscription)
        reader = threading.Thread(target=list, args=(subscription,))
        reader.start()
        subscription.close()
        reader.join(20)
        assert not reader.is_alive()


def test_iteration_with_a_time_limit_says_that_nothing_came():
    subscription = started(timeout=0.02)
    assert next(subscription).replay_complete
    with pytest.raises(TimeoutError, match=r"0\.02 s"):
        next(subscription)
    subscription.offer(state(1))
    assert next(subscription).state == state(1)


def test_an_ended_subscription_returns_buffered_events_and_then_the_error():
    subscription = started(state(1))
    subscription.offer(state(2))
    subscription.end(Unavailable("gone"))
    assert len(take(subscription, 3)) == 3
    for _ in range(2):
        with pytest.raises(Unavailable, match="gone"):
            next(subscription)


@pytest.mark.req("S1-52")
@pytest.mark.usefixtures("tiny_switch_interval")
def test_offers_from_many_threads_reach_a_reader_once_each_and_in_order():
    subscription = started(depth=100_000)
    tags = [f"t{number}" for number in range(6)]

    def offer(tag: str) -> None:
        for version in range(1, 201):
            subscription.offer(state(version, tag))
            subscription.offer(state(version, tag))

    threads = [threading.Thread(target=offer, args=(tag,)) for tag in tags]
    for thread in threads:
        thread.start()
    assert subscription.get(20).replay_complete
    told: dict[str, list[int]] = {tag: [] for tag in tags}
    for _ in range(200 * len(tags)):
        (found,) = live(subscription)
        told[found.tag].append(found.version)
    for thread in threads:
        thread.join()
    assert all(versions == list(range(1, 201)) for versions in told.values())


def test_the_newest_state_counts_replaced_ones_and_a_slow_reader_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    subscription = started(depth=4, overflow="latest")
    for version in range(1, 11):
        subscription.offer(state(version))
    replayed(subscription)
    assert [event.skipped for event in take(subscription, 5)] == [0, 0, 0, 0, 5]
    assert ["too slow" in record.getMessage() for record in caplog.records] == [True]


def test_an_accepts_callback_that_raises_ends_its_subscription_only():
    def picky(found: State) -> bool:
        if found.version == 2:
            raise KeyError("not my day")
        return True

    subscription = started(accepts=picky)
    for version in (1, 2, 3):
        subscription.offer(state(version))
    replayed(subscription)
    assert live(subscription) == [state(1)]
    with pytest.raises(HeadwayError, match="accepts callback of this subscription raised KeyError") as caught:
        subscription.get(1)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("timeout", [math.nan, -1.0])
def test_a_time_limit_that_is_none_is_refused(timeout: float):
    with pytest.raises(InvalidInput, match="number of seconds"):
        started(timeout=timeout)
    with pytest.raises(InvalidInput, match="number of seconds"):
        started().get(timeout)


def test_the_longest_time_limit_there_is_does_not_overflow():
    assert started(state(1), timeout=1e300).get(1e300).state == state(1)


async def all_read(*subscriptions: Subscription) -> None:
    while any(subscription.waiting for subscription in subscriptions):  # noqa: ASYNC110  (nothing tells of it)
        await asyncio.sleep(0)


def test_an_event_loop_reads_with_async_for_without_a_thread_until_it_is_closed():
    subscription = started(state(1))

    async def read() -> list[StateEvent]:
        return [event async for event in subscription]

    async def both() -> list[StateEvent]:
        reading = asyncio.create_task(read())
        await all_read(subscription)
        assert threading.active_count() == threads_before
        await asyncio.to_thread(subscription.offer, state(2))
        await all_read(subscription)
        subscription.end()
        return await reading

    threads_before = threading.active_count()
    events = asyncio.run(both())
    assert [event.state and event.state.version for event in events] == [1, None, 2]


def test_async_iteration_has_the_same_time_limit_and_may_be_cancelled():
    async def read() -> None:
        subscription = started(timeout=0.02)
        assert (await anext(subscription)).replay_complete
        with pytest.raises(TimeoutError, match=r"0\.02 s"):
            await anext(subscription)
        subscription.timeout = None
        waiting = asyncio.create_task(subscription.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        subscription.offer(state(1))
        assert (await anext(subscription)).state == state(1)
        subscription.end(Unavailable("gone"))
        with pytest.raises(Unavailable, match="gone"):
            await anext(subscription)

    asyncio.run(read())


def test_two_hundred_coroutines_wait_at_once_and_an_ended_loop_does_no_harm():
    subscriptions = [started() for _ in range(200)]

    async def one(subscription: Subscription) -> int:
        async for event in subscription:
            if event.state is not None:
                return event.state.version
        return 0

    async def everybody() -> list[int]:
        tasks = [asyncio.create_task(one(subscription)) for subscription in subscriptions]
        await all_read(*subscriptions)
        for subscription in subscriptions:
            subscription.offer(state(7))
        return await asyncio.gather(*tasks)

    assert asyncio.run(everybody()) == [7] * 200
    abandoned = started()

    async def leave() -> None:
        await anext(abandoned)
        waiting = asyncio.create_task(abandoned.__anext__())
        await asyncio.sleep(0)
        waiting.get_loop().stop()

    with pytest.raises(RuntimeError):
        asyncio.run(leave())
    abandoned.offer(state(1))
    assert live(abandoned) == [state(1)]

"""Subscriptions that begin while their store ends, and those that are closed where they are served."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

import pytest

from headway._sql import connect
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, Unavailable
from headway.states import JobRecord, LiveStore, State, Subscription, SubscriptionClosed
from headway.states.store import open_backend
from headway.states.store.postgres import NotificationWaker
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually
from tests.states.conftest import Place, live, replayed


class Interrupting:
    """A clock. At the ``at``-th time that the thread which armed it asks, ``act`` happens before it is answered."""

    def __init__(self, act: Callable[[], object], at: int) -> None:
        self._act, self._left, self._thread = act, at, 0

    def arm(self) -> None:
        self._thread = threading.get_ident()

    def __call__(self) -> float:
        if threading.get_ident() == self._thread:
            self._left -= 1
            if self._left == 0:
                self._act()
        return time.monotonic()


def opened(url: str, clock: Callable[[], float], retry: RetryPolicy) -> LiveStore:
    backend = open_backend(url)
    return LiveStore(backend, backend.register("job", 3, history=False), retry=retry, clock=clock)


def end_of(subscription: Subscription) -> HeadwayError:
    """What it says at last."""
    try:
        while True:
            subscription.get(20)
    except HeadwayError as error:
        return error


@pytest.mark.req("S1-13")
@pytest.mark.parametrize("at", [1, 2, 3])
def test_who_subscribes_while_the_store_is_closed_is_refused_or_hears_the_end(at: int):
    store: LiveStore
    clock = Interrupting(lambda: store.close(), at)  # noqa: PLW0108 (there is none yet)
    store = opened("sqlite:///:memory:", clock, RetryPolicy(retries=0))
    store.list_all_states()  # it listens
    clock.arm()
    try:
        subscription = store.subscribe()
    except HeadwayError:
        return
    finally:
        store.close()
    assert isinstance(end_of(subscription), SubscriptionClosed)


@pytest.mark.req("S1-47")
@pytest.mark.parametrize("at", [1, 2])
def test_a_subscriber_learns_that_the_listener_gave_up_meanwhile(redis_server: RedisServer, at: int):
    store: LiveStore

    def away() -> None:
        redis_server.kill9()
        eventually(lambda: store._supervisor._gave_up is not None, 60)

    clock = Interrupting(away, at)
    store = opened(redis_server.url(1), clock, RetryPolicy(retries=0))
    store.list_all_states()
    clock.arm()
    try:
        subscription = store.subscribe()
    except Unavailable:
        return
    finally:
        store.close()
    assert not redis_server.running
    assert isinstance(end_of(subscription), Unavailable)


def test_a_new_subscriber_beside_an_ending_listener_gets_changes(
    redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy = tcp_proxy(redis_server.port)
    store = opened(f"redis://127.0.0.1:{proxy.port}/1", time.monotonic, RetryPolicy(retries=0))
    later: list[Subscription] = []

    class Mender(logging.Handler):
        """What a program may do when it is told: it mends the way, and subscribes."""

        def emit(self, record: logging.LogRecord) -> None:
            if "gave up" in record.getMessage():
                proxy.pass_through()
                other = threading.Thread(target=lambda: later.append(store.subscribe()))
                other.start()
                other.join(30)

    mender = Mender()
    logging.getLogger("headway").addHandler(mender)
    try:
        first = store.subscribe()
        proxy.refuse()
        proxy.cut()
        assert isinstance(end_of(first), Unavailable)
        eventually(lambda: later)
        heard = [*later, store.subscribe()]
        store.set_state(State("job", 0, "a"))
        for subscription in heard:
            replayed(subscription)
            assert live(subscription)[0].tag == "a"
    finally:
        logging.getLogger("headway").removeHandler(mender)
        store.close()


@pytest.mark.stores(("memory", "redis"))
@pytest.mark.parametrize("which", [0, 1])
def test_an_accepts_callback_may_close_any_subscription(place: Place, which: int, caplog: pytest.LogCaptureFixture):
    store = place.open()
    subscriptions: list[Subscription] = []

    def accepts(state: State) -> bool:
        if state.status == 2:
            subscriptions[which].close()
        return True

    subscriptions += [store.subscribe(accepts=accepts), *(store.subscribe() for _ in range(4))]
    for status in (1, 2, 3):
        store.set_state(State("job", 0, "a", status))
    for subscription in subscriptions[2:]:
        replayed(subscription)
        assert [state.status for state in live(subscription, 3)] == [1, 2, 3]
    assert store.subscribers == 4
    assert "lost its store" not in caplog.text


@pytest.mark.stores(("memory", "redis"))
def test_an_accepts_callback_may_subscribe(place: Place, caplog: pytest.LogCaptureFixture):
    store = place.open()
    later: list[Subscription] = []

    def accepts(state: State) -> bool:
        if state.status == 2:
            later.extend(store.subscribe() for _ in range(20))
        return True

    subscriptions = [store.subscribe(accepts=accepts), *(store.subscribe() for _ in range(4))]
    for status in (1, 2, 3):
        store.set_state(State("job", 0, "a", status))
    for subscription in subscriptions:
        replayed(subscription)
        assert [state.status for state in live(subscription, 3)] == [1, 2, 3]
    assert len(later) == 20
    for subscription in later:  # what was written meanwhile stands already, or is told
        (first,) = replayed(subscription)
        assert first.status == 3 or live(subscription)[0].status == 3
    assert "lost its store" not in caplog.text


def test_a_closed_waker_does_not_write_to_a_reused_descriptor(postgres_url: str):
    with connect(postgres_url) as database:
        waker = NotificationWaker(database, JobRecord("job", 1, None, "incarnation"))
        waker.wake()
        waker.close()
        pipes = [os.pipe() for _ in range(8)]  # the numbers that it had are theirs now
        waker.wake()
        waker.close()
        assert select.select([reader for reader, _ in pipes], [], [], 0)[0] == []
        for descriptor in (descriptor for pipe in pipes for descriptor in pipe):
            os.close(descriptor)  # it did not do that either

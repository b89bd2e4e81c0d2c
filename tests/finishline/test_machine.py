"""Random histories against real Redis: items, repetitions, the end of the crawl, lost replies, wipes.

The model beside it is a few sets. Whatever the order, a project is DONE exactly when its crawl has ended and as many
different items are through as its total says, and then there is one event.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headway.core.retry import RetryPolicy
from headway.errors import InvalidInput
from headway.finishline import Answer, FinishLine, Outcome, Status
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer

AT_ONCE = RetryPolicy(retries=3, base=0.001, cap=0.001)

ITEMS = st.one_of(
    st.integers(0, 5),
    st.sampled_from([40_000, 60_000_000, "60000000"]),  # bits would be dear
    st.sampled_from(["a", "b", "https://example.org/an/item/with/a/long/name"]),
)


class Machine(RuleBasedStateMachine):
    """One project. ``journal`` says whether Redis may be wiped."""

    items: Bundle[Any] = Bundle("items")

    def __init__(self, line: FinishLine, server: RedisServer, proxy: TcpProxy, *, journal: bool) -> None:
        super().__init__()
        self.line, self.server, self.proxy, self.journal = line, server, proxy, journal
        self.state: Any = server.client(1)
        self.state.flushall()
        self.line.delete("p")

    @initialize(total=st.integers(0, 4))
    def begin(self, total: int) -> None:
        self.line.create("p", total=total)
        self.total = total
        self.status = "INITIALIZING"
        self.crawled = False
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.anonymous = 0
        self.finished = False
        self.completions = 0

    def teardown(self) -> None:
        self.proxy.pass_through()

    # ---- what callers do -----------------------------------------------------------------------------------

    @rule(item=ITEMS, failed=st.booleans(), reply_lost=st.booleans())
    def item(self, item: int | str, failed: bool, reply_lost: bool) -> None:
        known = str(item) in self.done
        answer = self._call(self.line.item_failed if failed else self.line.item_done, "p", item, lost=reply_lost)
        if not known:
            self.done.add(str(item))
            if failed:
                self.failed.add(str(item))
        self._heard(answer, Outcome.DUPLICATE if known else Outcome.COUNTED)

    @rule(failed=st.booleans(), reply_lost=st.booleans())
    def item_without_id(self, failed: bool, reply_lost: bool) -> None:
        answer = self._call(self.line.item_failed if failed else self.line.item_done, "p", lost=reply_lost)
        self.anonymous += 1
        if failed:
            self.failed.add(f"anonymous {self.anonymous}")
        self._heard(answer, Outcome.COUNTED)

    @rule(batch=st.lists(ITEMS, min_size=1, max_size=4), reply_lost=st.booleans())
    def items_at_once(self, batch: list[int | str], reply_lost: bool) -> None:
        fresh = {str(item) for item in batch} - self.done
        answer = self._call(self.line.items_done, "p", batch, lost=reply_lost)
        self.done |= fresh
        assert answer.counted == len(fresh)
        self._heard(answer, Outcome.COUNTED if fresh else Outcome.DUPLICATE)

    @rule(total=st.integers(0, 6), reply_lost=st.booleans())
    def set_total(self, total: int, reply_lost: bool) -> None:
        answer = self._call(self.line.set_total, "p", total, lost=reply_lost)
        late = self.finished
        if not late:
            self.total = total
        self._heard(answer, Outcome.LATE if late else Outcome.UPDATED)

    @rule(status=st.sampled_from(["INITIALIZING", "CRAWLING", "PROCESSING", "FAILED"]), reply_lost=st.booleans())
    def set_status(self, status: str, reply_lost: bool) -> None:
        answer = self._call(self.line.set_status, "p", status, lost=reply_lost)
        late = self.finished
        if not late:
            self.status = status
            self.crawled = self.crawled and status != "CRAWLING"
        self._heard(answer, Outcome.LATE if late else Outcome.UPDATED)

    @rule(total=st.one_of(st.none(), st.integers(0, 6)), reply_lost=st.booleans())
    def finish_crawl(self, total: int | None, reply_lost: bool) -> None:
        late = self.finished
        if not late:
            self.total = self.total if total is None else total
            self.status, self.crawled = "PROCESSING", True
        if not late and self.total == 0 and (self.done or self.anonymous):
            with pytest.raises(InvalidInput, match="its total is 0"):
                self._call(self.line.finish_crawl, "p", total, lost=reply_lost)
            return
        answer = self._call(self.line.finish_crawl, "p", total, lost=reply_lost)
        self._heard(answer, Outcome.LATE if late else Outcome.UPDATED)

    # ---- what happens to the server ------------------------------------------------------------------------

    @precondition(lambda self: self.journal)
    @rule(everything=st.booleans())
    def redis_loses(self, everything: bool) -> None:
        if everything:
            self.state.flushall()
        else:
            self.state.delete("smap:proj:p")

    @precondition(lambda self: self.journal)
    @rule()
    def checkpointer(self) -> None:
        self.state.delete("smap:checkpointer")
        assert self.line.checkpointer is not None
        self.line.checkpointer.tick()

    @rule()
    def server_forgets_its_scripts(self) -> None:
        self.state.script_flush()

    # ---- what must hold ------------------------------------------------------------------------------------

    @invariant()
    def redis_is_as_it_should_be(self) -> None:
        if not hasattr(self, "total"):
            return
        progress = self.line.progress("p")
        assert progress.done == len(self.done) + self.anonymous
        assert progress.errors == len(self.failed)
        assert progress.total == self.total
        assert progress.status is (Status.DONE if self.finished else Status(self.status))
        assert len({fields["id"] for _, fields in self.state.xrange("smap:events")}) == int(self.finished)
        assert self.completions <= int(self.finished)
        assert all(self.state.ttl(name) > 0 for name in self.state.scan_iter("smap:proj:*"))

    # ---- within --------------------------------------------------------------------------------------------

    def _call(self, call: Callable[..., Answer], *arguments: Any, lost: bool) -> Answer:
        if not lost:
            return call(*arguments)
        self.proxy.drop_replies(every=2, to=b"EVALSHA")
        self.proxy._answers = 1  # the next one
        try:
            return call(*arguments)
        finally:
            self.proxy.pass_through()

    def _heard(self, answer: Answer, otherwise: Outcome) -> None:
        """Crossing the line now is COMPLETED, for this call or, after a wipe, for whoever rebuilt the project."""
        done = len(self.done) + self.anonymous
        crossed = (
            not self.finished
            and self.status not in ("CRAWLING", "FAILED")
            and done >= self.total
            and (self.total > 0 or (self.crawled and not done))
        )
        self.finished = self.finished or crossed
        if crossed:
            assert answer.outcome in ((Outcome.COMPLETED, otherwise) if self.journal else (Outcome.COMPLETED,))
            self.completions += answer.completed
        else:
            assert answer.outcome is otherwise
        assert answer.done == done


@pytest.mark.req("S0-14", "S0-16", "S0-17", "S0-18")
@pytest.mark.parametrize("journal", [False, True], ids=["redis", "journal"])
def test_any_history_counts_exactly_and_completes_once(
    journal: bool, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy], tmp_path: Path
):
    proxy = tcp_proxy(redis_server.port)
    url = f"redis://127.0.0.1:{proxy.port}/1"
    database = f"sqlite:///{tmp_path}/p.db" if journal else None
    with FinishLine(url, database, journal, checkpointer=False, retry=AT_ONCE) as line:
        make: Any = lambda: Machine(line, redis_server, proxy, journal=journal)  # noqa: E731  # typed as a class there
        examples = settings().max_examples // 5  # 20 in make test
        run_state_machine_as_test(make, settings=settings(stateful_step_count=15, max_examples=examples))
